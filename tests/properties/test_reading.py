"""Whatever was committed, quarantined, built, damaged or replaced before: opening shows what the records say.

A machine takes random steps on a real store and keeps a model of it that is nothing but two sets of shard numbers.
After every step the store is opened anew, and every reader that is still open is looked at.
"""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hsstore import index, manifest
from hsstore.layout import assign
from hsstore.plan import PlanParameters
from hsstore.quarantine import quarantine, release
from hsstore.source import LocalSource
from hsstore.store import Store
from tests.stores import Sample, create, make_samples, stage

SAMPLES = make_samples([30, 20, 25, 14, 32, 9, 31, 28, 5, 17], seed=8)
DERIVED = ["manifest.json", "manifest.sha256", *(f"index/{name}.npy" for name in index.COLUMNS)]
SEEN: Counter[str] = Counter()
"""How often what the machine is for came about, over all its runs."""


class Reading(RuleBasedStateMachine):
    @initialize()
    def make(self) -> None:
        self.directory = Path(tempfile.mkdtemp())
        self.root = self.directory / "store"
        self.writer = create(self.root, SAMPLES, shard_rows=32)
        self.placed = assign([s.entry for s in SAMPLES], 32)
        self.committed: set[int] = set()
        self.dead: set[int] = set()
        self.kept: dict[str, frozenset[int]] = {}
        """Shards by manifest_id of each state that a manifest was built for."""
        self.older: list[dict[str, bytes]] = []
        self.readers: list[tuple[Store, frozenset[int]]] = []

    def teardown(self) -> None:
        if hasattr(self, "directory"):
            shutil.rmtree(self.directory)

    @property
    def live(self) -> frozenset[int]:
        return frozenset(self.committed - self.dead)

    @precondition(lambda self: len(self.committed) < len(self.placed))
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        shard = data.draw(st.sampled_from(sorted(set(range(len(self.placed))) - self.committed)))
        assert stage(self.writer, shard, SAMPLES).commit() is not None
        self.committed.add(shard)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def bury(self, data: st.DataObject) -> None:
        shard = data.draw(st.sampled_from(sorted(self.live)))
        quarantine(self.root, shard, "a step of the machine")
        self.dead.add(shard)

    @precondition(lambda self: self.dead)
    @rule(data=st.data())
    def revive(self, data: st.DataObject) -> None:
        shard = data.draw(st.sampled_from(sorted(self.dead)))
        release(self.root, shard, "a step of the machine")
        self.dead.discard(shard)

    @rule()
    def build(self) -> None:
        self.kept[manifest.write(self.root)] = self.live
        self.older.append({name: (self.root / name).read_bytes() for name in DERIVED})

    @precondition(lambda self: self.older)
    @rule(data=st.data(), name=st.sampled_from(DERIVED))
    def damage(self, data: st.DataObject, name: str) -> None:
        """A flipped bit, a lost file, or one of an older build."""
        path, how = self.root / name, data.draw(st.sampled_from(["flip", "lose", "older"]))
        path.unlink(missing_ok=True)
        body = data.draw(st.sampled_from(self.older))[name]
        if how == "flip":
            at = data.draw(st.integers(0, len(body) - 1))
            body = body[:at] + bytes([body[at] ^ 1 << data.draw(st.integers(0, 7))]) + body[at + 1 :]
        if how != "lose":
            path.write_bytes(body)

    @precondition(lambda self: self.older)
    @rule(data=st.data())
    def restore_an_older_build(self, data: st.DataObject) -> None:
        """All of it, as a backup would: sound in itself, and perhaps not of these records."""
        for name, body in data.draw(st.sampled_from(self.older)).items():
            (self.root / name).unlink(missing_ok=True)
            (self.root / name).write_bytes(body)

    @rule(backend=st.sampled_from(["mmap", "pread"]))
    def open_reader(self, backend: str) -> None:
        self.readers.append((Store.open(self.root, backend=backend), self.live))  # type: ignore[arg-type]
        if len(self.readers) > 3:
            self.readers.pop(0)

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        manifest_id = data.draw(st.sampled_from(sorted(self.kept)))
        store = Store.open(self.root, manifest_id=manifest_id)
        assert store.manifest_id == manifest_id
        self.readers.append((store, self.kept[manifest_id]))
        SEEN["pinned, older than the records"] += self.kept[manifest_id] != self.live

    @precondition(lambda self: self.readers)
    @rule()
    def refresh(self) -> None:
        store, seen = self.readers.pop()
        assert store.refresh() == (seen != self.live)
        self.readers.append((store, self.live))
        SEEN["refreshed"] += seen != self.live

    @invariant()
    def opening_shows_what_the_records_say(self) -> None:
        if not hasattr(self, "root"):
            return
        store = Store.open(self.root)
        header = store.header
        oracle = manifest.compile_manifest(header, manifest.load_records(self.root, header))
        assert store.manifest_id == manifest.manifest_id(oracle)
        assert store.manifest == oracle
        self._look_at(store, self.live)
        SEEN[store.state.taken_from] += 1

    @invariant()
    def readers_keep_to_what_they_saw(self) -> None:
        for store, shards in getattr(self, "readers", []):
            self._look_at(store, shards)

    def _look_at(self, store: Store, shards: frozenset[int]) -> None:
        assert set(store.state.shards) == shards
        expected = sorted((e.source_index, shard, e.row) for shard in shards for e in self.placed[shard])
        at = store.index
        assert list(zip(at.source_index.tolist(), at.shard.tolist(), at.row.tolist(), strict=True)) == expected
        for i in range(len(at)):
            self._same(store, i, SAMPLES[int(at.source_index[i])])
        source = LocalSource(store, verify="always")
        plan = source.make_plan(PlanParameters(max_seq_len=64, split="all"))
        n_tokens = 0
        for number in range(source.epoch_info(plan.plan_id, 0).n_batches):
            n_tokens += source.read_batch(plan.plan_id, 0, number).n_tokens
        assert n_tokens == sum(e.n_tokens for shard in shards for e in self.placed[shard])

    def _same(self, store: Store, i: int, sample: Sample) -> None:
        np.testing.assert_array_equal(store.input_ids(i), sample.input_ids)
        np.testing.assert_array_equal(store.loss_mask(i), sample.loss_mask)
        np.testing.assert_array_equal(store.hidden(i, "final"), sample.states["final"])


Reading.TestCase.settings = settings(
    max_examples=20, stateful_step_count=16, deadline=None, suppress_health_check=list(HealthCheck)
)


class TestReading(Reading.TestCase):  # type: ignore[name-defined, misc]
    @classmethod
    def tearDownClass(cls) -> None:
        """The runs must have come to what they are for."""
        missing = {"derived files", "records", "refreshed", "pinned, older than the records"} - set(+SEEN)
        assert not missing, f"never came about: {missing}"
