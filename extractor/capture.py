"""Samples through the engine, shard by shard: stage, send, check every ticket, seal, commit.

One stream of jobs feeds the engine across shard borders, so it never idles while a shard is sealed: sealing runs in a
thread (hashing and fsync release the GIL). A lease keeps other processes from the shard meanwhile. A sample whose
ticket does not hold is sent once more, then noted as failed. Leaves to `hsstore.writer` what a commit is, to
`extractor.run` what happens before and after.

Letters: T tokens of a sample, S rows of a shard, H hidden size.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from typing import Protocol

from extractor.engines.base import Engine, Job, Ticket
from extractor.prompts import Sample
from hsstore import paths
from hsstore.digest import crc32c
from hsstore.errors import IncompleteError
from hsstore.leases import DEFAULT_SECONDS, Leases
from hsstore.records import SampleEntry, ShardRecord
from hsstore.writer import StagedShard, StoreWriter

_MAX_TRIES = 2
_MAX_SEALING = 2  # finished shards that wait for their commit: bounds the work that a crash costs
_HOPELESS = 4  # that many samples failed and none came through: the engine is at fault, not the samples
_PIECE = 8 << 20
_POLL_SECONDS = 0.5


class Listener(Protocol):
    """Who hears how it goes."""

    def sample_done(self, n_tokens: int, ok: bool) -> None: ...

    def shard_done(self, record: ShardRecord | None) -> None:
        """`None`: another writer had committed that shard first."""
        ...

    def shard_elsewhere(self, n_samples: int) -> None:
        """Another process has committed a shard that was on the list."""
        ...

    def waiting(self, n_shards: int) -> None:
        """Every shard that is left is another process's; called while that is so."""
        ...


@dataclass(slots=True)
class _OpenShard:
    """A staged shard and what it still waits for."""

    staged: StagedShard
    jobs: dict[int, Job]
    """By source_index, of samples without a good ticket."""
    tries: dict[int, int] = field(default_factory=dict)


class ShardRun:
    """Captures the given shards of a store with an engine that is up."""

    def __init__(
        self,
        writer: StoreWriter,
        shards: Mapping[int, tuple[SampleEntry, ...]],
        samples: Mapping[int, Sample],
        engine: Engine,
        listener: Listener,
        lease_seconds: float = DEFAULT_SECONDS,
    ) -> None:
        """`shards` by number: all that the input has; `samples` by source_index."""
        self._writer, self._shards, self._samples = writer, shards, samples
        self._leases = Leases(writer.root, lease_seconds)
        self._engine, self._listener = engine, listener
        self._todo: deque[int] = deque()
        self._again: deque[Job] = deque()
        self._open: dict[int, _OpenShard] = {}
        self._shard_of = {e.source_index: n for n, entries in shards.items() for e in entries}
        self._sealing: deque[tuple[StagedShard, Future[ShardRecord | None]]] = deque()
        self._row_bytes = 2 * writer.header.capture.hidden_size
        self._n_good = self._n_failed = 0

    def run(self, todo: Sequence[int]) -> None:
        """Capture those shards. Whatever ends this early, committed shards stay and open ones are dropped.

        Raises `IncompleteError` when the engine is lost or fails on everything.
        """
        self._todo.extend(todo)
        with self._leases, ThreadPoolExecutor(1, thread_name_prefix="seal") as self._pool:
            try:
                while self._todo or self._again:
                    with closing(_tickets(self._engine, self._jobs())) as tickets:
                        for ticket in tickets:
                            self._take(ticket)
                    if lost := sum(len(shard.jobs) for shard in self._open.values()) - len(self._again):
                        raise IncompleteError(f"the engine gave no ticket for {lost} samples", hint=RESUME)
                    if self._todo and not self._again:
                        self._wait_for_others()
                while self._sealing:
                    self._wait_for_one()
            except BaseException:
                self._abandon()
                raise

    def _jobs(self) -> Iterator[Job]:
        while self._again or self._todo:
            while self._again:
                yield self._again.popleft()
            if self._todo:
                while len(self._sealing) >= _MAX_SEALING:
                    self._wait_for_one()
                number = self._next()
                if number is None:
                    return  # the engine finishes what it has; then others are waited for
                yield from list(self._stage(number).jobs.values())

    def _next(self) -> int | None:
        """A shard that nobody has committed and nobody works at; None when there is none at this moment."""
        for _ in range(len(self._todo)):
            number = self._todo.popleft()
            if self._is_committed(number):
                self._listener.shard_elsewhere(len(self._shards[number]))
            elif self._leases.take(number):
                return number
            else:
                self._todo.append(number)
        return None

    def _is_committed(self, number: int) -> bool:
        return paths.record(self._writer.root, number).exists()

    def _wait_for_others(self) -> None:
        """Other processes hold every shard that is left: each is either committed by its holder or taken over."""
        while self._sealing:
            self._wait_for_one()
        self._listener.waiting(len(self._todo))
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
        return self._open[number]

    def _take(self, ticket: Ticket) -> None:
        shard = self._open.get(self._shard_of.get(ticket.source_index, -1))
        job = shard.jobs.get(ticket.source_index) if shard else None
        if shard is None or job is None:
            raise IncompleteError(f"the engine answered for sample {ticket.source_index}, which was not asked")
        fault = ticket.error or ticket_fault(ticket, job, self._row_bytes)
        tries = shard.tries[job.source_index] = shard.tries.get(job.source_index, 0) + 1
        if fault and tries < _MAX_TRIES:
            self._again.append(job)
            return
        if fault:
            shard.staged.fail(job.source_index, fault)
            self._note_failure(fault)
        else:
            self._n_good += 1
        del shard.jobs[job.source_index]
        self._listener.sample_done(len(job.input_ids), not fault)
        if not shard.jobs:
            del self._open[shard.staged.shard]
            self._sealing.append((shard.staged, self._pool.submit(shard.staged.commit)))

    def _note_failure(self, fault: str) -> None:
        self._n_failed += 1
        if not self._n_good and self._n_failed >= _HOPELESS:
            raise IncompleteError(
                f"the engine failed on each of the first {self._n_failed} samples: {fault}",
                hint="nothing was committed for them; mend the engine, then run the same with --resume",
            )

    def _wait_for_one(self) -> None:
        # Taken off the queue only when it is through: an interrupt while waiting must still find it.
        record = self._sealing[0][1].result()
        staged, _ = self._sealing.popleft()
        self._leases.release(staged.shard)
        self._listener.shard_done(record)

    def _abandon(self) -> None:
        for shard in self._open.values():
            shard.staged.abandon()
        for staged, future in self._sealing:
            if future.cancel():  # one that is running is let through: its shard is complete
                staged.abandon()


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
        if _rows_crc32c(path, job, row_bytes) != ticket.crc32c[state]:
            return f"the rows of {state} in the file are not those that were captured"
    return ""


def _rows_crc32c(path: str, job: Job, row_bytes: int) -> int:
    with open(path, "rb", buffering=0) as file:
        at, end, crc = job.row * row_bytes, (job.row + len(job.input_ids)) * row_bytes, 0
        while at < end:
            piece = os.pread(file.fileno(), min(_PIECE, end - at), at)
            if not piece:
                return -1
            crc = crc32c(piece, crc)
            at += len(piece)
        return crc


RESUME = "run the same with --resume"
