"""Samples through the engine, shard by shard: stage, send, check every ticket, seal, commit.

One stream of jobs feeds the engine across shard borders, so it never idles while a shard is sealed: sealing runs in a
thread (hashing and fsync release the GIL). A lease keeps other processes from the shard meanwhile. A sample whose
ticket does not hold is sent once more, then noted as failed. Nothing is committed before the first samples were looked
at, nothing is staged that the disk has no room for. Leaves to `hsstore.writer` what a commit is, to `supervise` the
death of engines, to `extractor.run` what happens before and after.

Letters: T tokens of a sample, S rows of a shard, H hidden size.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from extractor.engines.base import Engine, Job, Ticket
from extractor.prompts import Sample
from extractor.supervise import Breaker
from extractor.watch.events import Watcher
from hsstore import paths
from hsstore.digest import crc32c_at
from hsstore.errors import IncompleteError, NoSpaceError
from hsstore.leases import DEFAULT_SECONDS, Leases
from hsstore.records import SampleEntry, ShardRecord
from hsstore.writer import StagedShard, StoreWriter

_MAX_TRIES = 2
_MAX_SEALING = 2  # finished shards that wait for their commit: bounds the work that a crash costs
_POLL_SECONDS = 0.5


class Guard(Protocol):
    """Who says whether there is room for another shard."""

    def low(self) -> NoSpaceError | None:
        """Why no further shard may be staged; None while there is room."""
        ...


class FirstLook(Protocol):
    """Who looks at the first samples, before anything is committed."""

    @property
    def satisfied(self) -> bool:
        """Whether the samples shown so far are enough, or no more are wanted."""
        ...

    def show(self, job: Job, loss_mask: npt.NDArray[np.uint8]) -> None:
        """A sample whose rows have arrived in the job's files."""
        ...

    def check(self) -> None:
        """Judge what was shown. Raises `HsstoreError` when the states are wrong."""
        ...


@dataclass(slots=True)
class _OpenShard:
    """A staged shard and what it still waits for."""

    staged: StagedShard
    jobs: dict[int, Job]
    """By source_index, of samples without a good ticket."""
    tries: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Sealing:
    staged: StagedShard
    result: Future[tuple[ShardRecord | None, float]]
    """The record, None when another writer was first; seconds it took."""


class ShardRun:
    """Captures the given shards of a store with an engine that is up."""

    def __init__(
        self,
        writer: StoreWriter,
        shards: Mapping[int, tuple[SampleEntry, ...]],
        samples: Mapping[int, Sample],
        engine: Engine,
        watcher: Watcher,
        *,
        breaker: Breaker | None = None,
        guard: Guard | None = None,
        first: FirstLook | None = None,
        known_failures: Collection[int] = (),
        lease_seconds: float = DEFAULT_SECONDS,
    ) -> None:
        """`shards` by number: all that the input has; `samples` by source_index; `known_failures` those that failed
        in an earlier run: that they fail again says nothing of the engine."""
        self._writer, self._shards, self._samples = writer, shards, samples
        self._leases = Leases(writer.root, lease_seconds)
        self._engine, self._watcher = engine, watcher
        self._breaker, self._guard, self._first = breaker or Breaker(), guard, first
        self._known_failures = frozenset(known_failures)
        self._full: NoSpaceError | None = None
        self._n_shown = 0
        self._todo: deque[int] = deque()
        self._again: deque[Job] = deque()
        self._open: dict[int, _OpenShard] = {}
        self._shard_of = {e.source_index: n for n, entries in shards.items() for e in entries}
        self._filled: deque[StagedShard] = deque()
        """Complete, and held until the first samples were looked at."""
        self._sealing: deque[_Sealing] = deque()
        self._row_bytes = 2 * writer.header.capture.hidden_size

    def run(self, todo: Sequence[int]) -> None:
        """Capture those shards. Whatever ends this early, committed shards stay and open ones are dropped.

        Raises `IncompleteError` when the engine is lost or fails on everything, `NoSpaceError` when the disk has no
        room for another shard: those that were open are committed then.
        """
        self._todo.extend(todo)
        with self._leases, ThreadPoolExecutor(1, thread_name_prefix="seal") as self._pool:
            try:
                while (self._todo and not self._full) or self._again:
                    with closing(_tickets(self._engine, self._jobs())) as tickets:
                        for ticket in tickets:
                            self._take(ticket)
                    if lost := sum(len(shard.jobs) for shard in self._open.values()) - len(self._again):
                        raise IncompleteError(f"the engine gave no ticket for {lost} samples", hint=RESUME)
                    if self._todo and not self._again and not self._full:
                        self._wait_for_others()
                self._seal_filled()  # held for a first sample, and every one failed
                while self._sealing:
                    self._wait_for_one()
                if self._full:
                    raise self._full
            except BaseException as error:
                self._abandon(str(error) or type(error).__name__)
                raise

    def _jobs(self) -> Iterator[Job]:
        while self._again or self._todo:
            while self._again:
                yield self._sent(self._again.popleft())
            if self._todo:
                while len(self._sealing) >= _MAX_SEALING:
                    self._wait_for_one()
                number = None if self._is_full() else self._next()
                if number is None:
                    return  # the engine finishes what it has; then others are waited for, or the run ends
                for job in list(self._stage(number).jobs.values()):
                    yield self._sent(job)

    def _sent(self, job: Job) -> Job:
        self._watcher.sample_sent(job.source_index)
        return job

    def _is_full(self) -> bool:
        if self._guard is not None and self._full is None:
            self._full = self._guard.low()
        return self._full is not None

    def _next(self) -> int | None:
        """A shard that nobody has committed and nobody works at; None when there is none at this moment."""
        for _ in range(len(self._todo)):
            number = self._todo.popleft()
            if not self._is_committed(number) and not self._leases.take(number):
                self._todo.append(number)
            elif self._is_committed(number):  # its holder may have committed it, then let go
                self._leases.release(number)
                entries = self._shards[number]
                self._watcher.shard_elsewhere(number, len(entries), sum(e.n_tokens for e in entries))
            else:
                return number
        return None

    def _is_committed(self, number: int) -> bool:
        return paths.record(self._writer.root, number).exists()

    def _wait_for_others(self) -> None:
        """Other processes hold every shard that is left: each is either committed by its holder or taken over."""
        while self._sealing:
            self._wait_for_one()
        self._watcher.waiting(len(self._todo))
        time.sleep(_POLL_SECONDS)

    def _stage(self, number: int) -> _OpenShard:
        entries = self._shards[number]
        tokens = {e.source_index: self._samples[e.source_index] for e in entries}
        staged = self._writer.stage(number, entries, {i: (s.input_ids, s.loss_mask) for i, s in tokens.items()})
        jobs = {
            e.source_index: Job(
                source_index=e.source_index,
                input_ids=tokens[e.source_index].input_ids,
                row=e.row,
                files=staged.files,
            )
            for e in entries
        }
        self._open[number] = _OpenShard(staged=staged, jobs=jobs)
        self._watcher.shard_staged(number, len(entries), sum(e.n_tokens for e in entries))
        return self._open[number]

    def _take(self, ticket: Ticket) -> None:
        shard = self._open.get(self._shard_of.get(ticket.source_index, -1))
        job = shard.jobs.get(ticket.source_index) if shard else None
        if shard is None or job is None:
            raise IncompleteError(f"the engine answered for sample {ticket.source_index}, which was not asked")
        fault = ticket.error or ticket_fault(ticket, job, self._row_bytes)
        tries = shard.tries[job.source_index] = shard.tries.get(job.source_index, 0) + 1
        if fault and ticket.retry and tries < _MAX_TRIES:
            self._again.append(job)
            self._watcher.sample_retried(job.source_index, fault)
            return
        if fault:
            shard.staged.fail(job.source_index, fault)
            self._watcher.sample_failed(job.source_index, fault, tries)
            if job.source_index not in self._known_failures:
                self._breaker.bad(fault)
        else:
            self._breaker.good()
            self._look_at(job)
        del shard.jobs[job.source_index]
        self._watcher.sample_done(job.source_index, len(job.input_ids), not fault)
        if not shard.jobs:
            del self._open[shard.staged.shard]
            self._fill(shard.staged)

    def _look_at(self, job: Job) -> None:
        if self._first is not None:
            self._first.show(job, self._samples[job.source_index].loss_mask)
            self._n_shown += 1
            if self._first.satisfied:
                self._first_look()

    def _first_look(self) -> None:
        """Judge the first samples; what was held until then may be committed."""
        first, self._first = self._first, None
        if first is not None:
            first.check()

    def _fill(self, staged: StagedShard) -> None:
        self._watcher.shard_filled(staged.shard)
        self._filled.append(staged)
        if self._n_shown:
            self._first_look()  # at what there is: a full shard waits for no more
        if self._first is None:
            self._seal_filled()

    def _seal_filled(self) -> None:
        while self._filled:
            # Off the list first: whatever interrupts this, what is being committed must not be dropped.
            held = self._filled.popleft()
            self._sealing.append(_Sealing(held, self._pool.submit(_commit, held)))

    def _wait_for_one(self) -> None:
        # Taken off the queue only when it is through: an interrupt while waiting must still find it.
        record, seconds = self._sealing[0].result.result()
        shard = self._sealing.popleft().staged.shard
        self._leases.release(shard)
        n_bytes = sum(entry.bytes for entry in record.files.values()) if record else 0
        self._watcher.shard_sealed(shard, seconds, n_bytes)
        self._watcher.shard_done(record)

    def _abandon(self, reason: str) -> None:
        dropped = [*(shard.staged for shard in self._open.values()), *self._filled]
        # One that is being sealed is let through: it is complete.
        dropped += [sealing.staged for sealing in self._sealing if sealing.result.cancel()]
        waiting = {i for shard in self._open.values() for i in shard.jobs}
        for staged in dropped:
            staged.abandon()
            done = [e.n_tokens for e in staged.entries if e.source_index not in waiting]
            self._watcher.shard_dropped(staged.shard, len(done), sum(done), reason)


def _commit(staged: StagedShard) -> tuple[ShardRecord | None, float]:
    started = time.monotonic()
    return staged.commit(), time.monotonic() - started


def _tickets(engine: Engine, jobs: Iterator[Job]) -> Generator[Ticket, None, None]:
    yield from engine.capture(jobs)


def ticket_fault(ticket: Ticket, job: Job, row_bytes: int) -> str:
    """What is wrong with a sample's rows as they lie in the files, "" when nothing is.

    The digest was taken where the rows were captured, so rows of another sample, lost writes and torn ones all show.
    """
    if ticket.n_rows != len(job.input_ids):
        return f"the engine captured {ticket.n_rows} rows for {len(job.input_ids)} tokens"
    for state, path in job.files.items():
        if state not in ticket.crc32c:
            return f"the engine gave no {state}"
        if ticket.confirmed:
            continue
        if crc32c_at(path, job.row * row_bytes, len(job.input_ids) * row_bytes) != ticket.crc32c[state]:
            return f"the rows of {state} in the file are not those that were captured"
    return ""


RESUME = "run the same with --resume"
