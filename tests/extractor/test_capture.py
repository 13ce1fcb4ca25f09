"""The loop over shards against an engine that lies, loses, fails and shuffles: no wrong row is ever committed."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from extractor.capture import ShardRun
from extractor.engines.base import EngineInfo, Job, Ticket
from extractor.prompts import Sample
from extractor.watch.events import Deaf
from hsstore import paths
from hsstore.digest import crc32c, sample_uid
from hsstore.errors import IncompleteError
from hsstore.layout import assign
from hsstore.leases import Leases
from hsstore.records import InputSummary, SampleEntry, ShardRecord, Split
from hsstore.store import Store
from hsstore.verify import Verifier
from hsstore.writer import StoreWriter
from tests.stores import capture

H = 8
LAYERS = ("after_2", "after_3", "after_5", "final")
Fault = Callable[[Job, int], Any]


def truth(source_index: int, n: int) -> dict[str, np.ndarray[Any, Any]]:
    """The states that the fake verifier gives a sample."""
    rng = np.random.default_rng(source_index)
    return {name: rng.integers(0x3F00, 0x4000, (n, H)).astype("<u2") for name in LAYERS}


class FakeEngine:
    """Captures `truth`; `fault(job, attempt)` may answer a ticket, `"lose"`, `"tear"`, `"skip a state"` or raise."""

    def __init__(self, fault: Fault = lambda _job, _attempt: None, *, in_flight: int = 1, seed: int = 0) -> None:
        self.info = EngineInfo(
            engine="transformers", version="test", norm="post", compute_dtype="float32", longest_tokens=99, flags={}
        )
        self._fault, self._in_flight, self._random = fault, in_flight, random.Random(seed)
        self.attempts: dict[int, int] = {}

    def capture(self, jobs: Iterable[Job]) -> Iterator[Ticket]:
        ready: list[Ticket] = []
        for job in jobs:
            if (ticket := self._one(job)) is not None:
                ready.append(ticket)
            while len(ready) >= self._in_flight:
                yield ready.pop(self._random.randrange(len(ready)))
        yield from ready

    def _one(self, job: Job) -> Ticket | None:
        attempt = self.attempts[job.source_index] = self.attempts.get(job.source_index, 0) + 1
        fault = self._fault(job, attempt)
        if isinstance(fault, Ticket) or fault == "lose":
            return fault if isinstance(fault, Ticket) else None
        crcs = {}
        for name, rows in truth(job.source_index, len(job.input_ids)).items():
            crcs[name] = crc32c(rows.tobytes())
            data = rows.tobytes()[:-2] if fault == "tear" and name == "final" else rows.tobytes()
            with open(job.files[name], "r+b") as file:
                os.pwrite(file.fileno(), data, job.row * H * 2)
        if fault == "skip a state":
            del crcs["after_3"]
        return Ticket(source_index=job.source_index, n_rows=len(job.input_ids), crc32c=crcs)

    def close(self) -> None: ...


class Heard(Deaf):
    def __init__(self) -> None:
        self.samples: list[bool] = []
        self.shards: list[ShardRecord | None] = []
        self.elsewhere = self.waited = 0
        self.sent = self.retried = 0
        self.lost: list[str] = []
        self.dropped: list[int] = []

    def sample_sent(self, source_index: int) -> None:
        self.sent += 1

    def sample_retried(self, source_index: int, reason: str) -> None:
        self.retried += 1

    def engine_lost(self, reason: str) -> None:
        self.lost.append(reason)

    def shard_dropped(self, shard: int, n_samples: int, n_tokens: int, reason: str) -> None:
        self.dropped.append(n_samples)

    def sample_done(self, source_index: int, n_tokens: int, ok: bool) -> None:
        self.samples.append(ok)

    def shard_done(self, record: ShardRecord | None) -> None:
        self.shards.append(record)

    def shard_elsewhere(self, shard: int, n_samples: int, n_tokens: int) -> None:
        self.elsewhere += n_samples

    def waiting(self, n_shards: int) -> None:
        self.waited += 1


class Setup:
    """A store of 40 samples in several shards, and a way to run an engine over it."""

    def __init__(self, root: Path) -> None:
        rng = np.random.default_rng(5)
        self.samples = {}
        for i in range(0, 80, 2):  # every other line was rejected
            n = int(rng.integers(2, 60))
            ids, mask = rng.integers(0, 99, n, np.int32), np.ones(n, np.uint8)
            self.samples[i] = Sample(source_index=i, uid=sample_uid(ids, mask), input_ids=ids, loss_mask=mask, n_cut=0)
        entries = [SampleEntry(s.uid, i, 0, len(s.input_ids)) for i, s in self.samples.items()]
        summary = InputSummary(name="p", bytes=1, sha256="0" * 64, lines=80, rejected={"blank_line": 40}, options={})
        split = Split(salt="s", validation_fraction=0.1)
        self.writer = StoreWriter.create(
            root, capture=capture(H), split=split, samples=entries, input_summary=summary, shard_rows=256
        )
        self.shards = dict(enumerate(assign(entries, 256)))
        assert len(self.shards) >= 4

    def run(self, engine: FakeEngine) -> Heard:
        heard = Heard()
        ShardRun(self.writer, self.shards, self.samples, engine, heard).run(self.writer.todo())
        return heard

    def check(self, failed: set[int] = frozenset()) -> None:  # type: ignore[assignment]
        """Every sample exactly once, with its true states; the failed ones flagged and zero."""
        self.writer.finish()
        assert not list((self.writer.root / "staging").iterdir())
        assert not list(Verifier(str(self.writer.root), "full").findings())
        with Store.open(self.writer.root) as store:
            found = store.index.source_index.tolist()
            assert sorted(found) == sorted(self.samples)
            for i, index in enumerate(found):
                n = len(self.samples[index].input_ids)
                for name, rows in truth(index, n).items():
                    shard, row = int(store.index.shard[i]), int(store.index.row[i])
                    view = np.frombuffer(store.rows(f"hidden/{name}", shard, row, n), "<u2").reshape(n, H)
                    np.testing.assert_array_equal(view, np.zeros_like(rows) if index in failed else rows)
                assert bool(store.index.flags[i]) == (index in failed)


@pytest.fixture
def setup(tmp_path: Path) -> Setup:
    return Setup(tmp_path / "store")


@pytest.mark.parametrize("in_flight", [1, 7, 64])
def test_tickets_in_any_order(setup: Setup, in_flight: int) -> None:
    heard = setup.run(FakeEngine(in_flight=in_flight))
    assert len(heard.shards) == len(setup.shards)
    assert heard.samples == [True] * 40
    setup.check()


@pytest.mark.parametrize("kind", ["tear", "skip a state", "short", "error"])
@pytest.mark.parametrize("in_flight", [1, 64])
def test_a_bad_ticket_is_tried_again(setup: Setup, kind: str, in_flight: int) -> None:
    """Torn rows, a missing state, too few rows, an error: the second attempt counts, nothing wrong stays."""

    def fault(job: Job, attempt: int) -> Any:
        if job.source_index % 6 or attempt > 1:
            return None
        if kind == "short":
            return Ticket(source_index=job.source_index, n_rows=1, crc32c={})
        if kind == "error":
            return Ticket(source_index=job.source_index, n_rows=0, crc32c={}, error="abort")
        return kind

    engine = FakeEngine(fault, in_flight=in_flight)
    heard = setup.run(engine)
    assert sum(n == 2 for n in engine.attempts.values()) == 14  # the fault did occur
    assert heard.samples == [True] * 40
    setup.check()


@pytest.mark.parametrize("in_flight", [1, 64])
def test_samples_that_never_work_are_flagged(setup: Setup, in_flight: int) -> None:
    """A poisoned sample costs itself only; its reason is in the record, its rows are zeros."""

    def fault(job: Job, _attempt: int) -> Any:
        return "tear" if job.source_index in {10, 44, 78} else None

    heard = setup.run(FakeEngine(fault, in_flight=in_flight))
    assert heard.samples.count(False) == 3
    setup.check(failed={10, 44, 78})
    reasons = {k: v for record in heard.shards if record for k, v in record.failures.items()}
    assert set(reasons) == {"10", "44", "78"}
    assert "not those that were captured" in reasons["10"]


def test_an_engine_that_fails_on_everything_commits_nothing(setup: Setup) -> None:
    """A sick engine must not brand a whole corpus as failed."""

    def fault(job: Job, _attempt: int) -> Any:
        return Ticket(source_index=job.source_index, n_rows=0, crc32c={}, error="CUDA fell off")

    with pytest.raises(IncompleteError, match=r"4 errors and no good sample yet.*CUDA fell off"):
        setup.run(FakeEngine(fault))
    assert setup.writer.todo() == list(range(len(setup.shards)))
    assert not list((setup.writer.root / "staging").iterdir())
    setup.run(FakeEngine())
    setup.check()


def test_lost_tickets_are_an_error(setup: Setup) -> None:
    """No ticket is no success: the shard stays open and a resume redoes it."""
    with pytest.raises(IncompleteError, match="no ticket for 1 samples"):
        setup.run(FakeEngine(lambda job, _: "lose" if job.source_index == 44 else None))
    done = len(setup.shards) - len(setup.writer.todo())
    assert 0 < done < len(setup.shards)
    setup.run(FakeEngine())
    setup.check()


def test_a_ticket_nobody_asked_for_is_an_error(setup: Setup) -> None:
    def fault(job: Job, _attempt: int) -> Any:
        return Ticket(source_index=7, n_rows=1, crc32c={}) if job.source_index == 44 else None

    with pytest.raises(IncompleteError, match="sample 7, which was not asked"):
        setup.run(FakeEngine(fault))


@pytest.mark.parametrize("stop", [KeyboardInterrupt, OSError(28, "No space left on device"), IncompleteError("gone")])
def test_an_end_in_the_middle_keeps_what_is_committed(setup: Setup, stop: Any) -> None:
    """Ctrl-C, a full disk, a dead engine: open shards leave no file, committed ones stay, a resume ends equal."""

    def fault(job: Job, _attempt: int) -> Any:
        if job.source_index == 60:
            raise stop
        return None

    with pytest.raises(stop if isinstance(stop, type) else type(stop)):
        setup.run(FakeEngine(fault, in_flight=3))
    assert not list((setup.writer.root / "staging").iterdir())
    todo = setup.writer.todo()
    assert 0 < len(todo) < len(setup.shards)
    engine = FakeEngine(in_flight=3)
    setup.run(engine)
    assert len(engine.attempts) == sum(len(setup.shards[n]) for n in todo)  # nothing is done twice
    setup.check()


def test_two_runs_share_the_work(setup: Setup) -> None:
    """Leases: no sample goes through two engines while both live, and both runs end when all is committed."""
    heard: list[Heard] = []
    threads = [threading.Thread(target=lambda: heard.append(setup.run(FakeEngine(in_flight=4)))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(heard) == 2
    assert sum(len(h.samples) for h in heard) == 40, "a shard was captured twice"
    assert sum(h.shards.count(None) for h in heard) == 0
    assert all(len(h.samples) + h.elsewhere == 40 for h in heard)
    setup.check()


def test_a_shard_of_a_silent_run_is_taken_over(setup: Setup) -> None:
    """Its holder was stopped: after the lease the shard is done by another, and the woken holder does no harm."""
    silent = Leases(setup.writer.root, seconds=3600)
    assert silent.take(1)
    entries = setup.shards[1]
    tokens = {
        e.source_index: (setup.samples[e.source_index].input_ids, setup.samples[e.source_index].loss_mask)
        for e in entries
    }
    stopped = setup.writer.stage(1, entries, tokens)

    class Waiting(Heard):
        def waiting(self, n_shards: int) -> None:
            super().waiting(n_shards)
            os.utime(paths.lease(setup.writer.root, 1), (0, 0))  # the time of the lease passes

    heard = Waiting()
    run = ShardRun(setup.writer, setup.shards, setup.samples, FakeEngine(), heard, lease_seconds=3600)
    run.run(setup.writer.todo())
    assert heard.waited
    assert len(heard.samples) == 40
    assert stopped.commit() is None
    silent.release(1)
    setup.check()


def test_a_shard_that_is_committed_as_its_lease_is_given_back_is_not_done_again(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look at the record and the lease another run may commit: the record is looked at once more."""
    real, raced = Leases.take, []

    def take(self: Leases, shard: int) -> bool:
        if shard == 1 and not raced:
            raced.append(shard)
            setup.run(FakeEngine())
        return real(self, shard)

    monkeypatch.setattr(Leases, "take", take)
    engine = FakeEngine()
    heard = setup.run(engine)
    assert raced
    assert heard.elsewhere == len(setup.shards[1]) + sum(len(setup.shards[n]) for n in setup.shards if n > 1)
    assert not set(engine.attempts) & {e.source_index for e in setup.shards[1]}
    setup.check()
