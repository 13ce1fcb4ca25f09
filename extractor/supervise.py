"""An engine that is lost is started again, and what was on its way to it is sent again.

Responsible for telling a lost engine from a sick sample: what was in flight when an engine died is sent alone to the
next one, so a sample that kills every engine is found and failed, and costs nobody else. Waits between starts with
exponential back-off, and gives up by a circuit breaker. Leaves bad answers of a living engine to `extractor.capture`.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field

from extractor.engines.base import Engine, EngineInfo, Job, Ticket
from extractor.watch.events import Watcher
from extractor.words import counted
from hsstore.errors import HsstoreError, IncompleteError, UsageError

DEFAULT_MAX_CONSECUTIVE_ERRORS = 8
FIRST_WAIT_SECONDS = 1.0
LONGEST_WAIT_SECONDS = 60.0
HOPELESS = 4
"""Errors before the first good sample that end a run, unless it was told how many: the engine is at fault then."""
_RESUME = "what was committed is kept; run the same with --resume once it is mended"


@dataclass(slots=True)
class Breaker:
    """Counts errors in a row: samples without states, and deaths of the engine. A sample that kills engines is one."""

    limit: int | None = None
    """None = the default, and fewer before anything was good."""
    in_a_row: int = field(default=0, init=False)
    _any_good: bool = field(default=False, init=False)

    def good(self) -> None:
        """A sample came through."""
        self.in_a_row, self._any_good = 0, True

    def bad(self, reason: str) -> None:
        """Raises `IncompleteError` when these are too many in a row."""
        self.in_a_row += 1
        if self._any_good or self.limit is not None:
            if self.in_a_row >= (self.limit or DEFAULT_MAX_CONSECUTIVE_ERRORS):
                raise IncompleteError(
                    f"{counted(self.in_a_row, 'error')} in a row (--max-consecutive-errors), the last one: {reason}",
                    hint=_RESUME,
                )
        elif self.in_a_row >= HOPELESS:
            raise IncompleteError(
                f"{self.in_a_row} errors and no good sample yet, the engine seems to be at fault: {reason}",
                hint="nothing was committed for them; mend the engine, then run the same with --resume. Is it the"
                " samples, give --max-consecutive-errors 100 as well",
            )

    def explained(self) -> None:
        """The last death was of a sample, which is counted when it fails."""
        self.in_a_row = max(0, self.in_a_row - 1)


def wait_seconds(n_failures: int, jitter: Callable[[], float] = random.random) -> float:
    """How long to wait before the next start: 1, 2, 4 … 60 s, less up to a fifth, so that many do not come at once."""
    longest = min(LONGEST_WAIT_SECONDS, FIRST_WAIT_SECONDS * float(1 << min(n_failures - 1, 16)))
    return longest * (1 - jitter() / 5)


class SupervisedEngine:
    """An `Engine` (extractor.engines.base) that outlives the death of the one it holds."""

    def __init__(
        self,
        name: str,
        start: Callable[[], Engine],
        breaker: Breaker,
        watcher: Watcher,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Start the first engine; its errors are the caller's. `start` is called again whenever one was lost."""
        self._name, self._start, self._breaker, self._watcher, self._sleep = name, start, breaker, watcher, sleep
        self._engine: Engine | None = None
        self.info: EngineInfo = self._up().info

    def capture(self, jobs: Iterable[Job]) -> Iterator[Ticket]:
        """Every job gets one ticket, whatever dies meanwhile.

        Raises `IncompleteError` when the breaker opens; what `jobs` itself raises goes through.
        """
        feed = _Feed(jobs)
        try:
            while not feed.exhausted or feed.pending:
                try:
                    yield from self._watched(feed.jobs(), feed)
                    if feed.pending:
                        raise IncompleteError(f"the engine gave no ticket for {counted(len(feed.pending), 'sample')}")
                except IncompleteError as error:
                    if feed.broken:
                        raise
                    yield from self._recover(error, feed)
        finally:
            feed.close()

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
            self._watcher.engine_stopped()
        self._engine = None

    def _up(self) -> Engine:
        started = time.monotonic()
        self._watcher.engine_starting(self._name)
        self._engine = self._start()
        self._watcher.engine_started(self._engine.info, time.monotonic() - started)
        return self._engine

    def _watched(self, jobs: Iterator[Job], feed: _Feed) -> Generator[Ticket, None, None]:
        assert self._engine is not None
        with closing(_generator(self._engine, jobs)) as tickets:
            for ticket in tickets:
                feed.pending.pop(ticket.source_index, None)
                yield ticket

    def _recover(self, error: IncompleteError, feed: _Feed) -> Iterator[Ticket]:
        """Start anew, and send alone, one after the other, what was in flight; what kills again is failed."""
        suspects = deque(feed.pending.values())
        feed.pending.clear()
        self._restart(error)
        while suspects:
            job = suspects.popleft()
            alone = _Feed([job])
            try:
                yield from self._watched(alone.jobs(), alone)
                if alone.pending:
                    raise IncompleteError("the engine gave no ticket")
            except IncompleteError as again:
                self._breaker.explained()
                self._restart(again, counts=False)
                yield Ticket(
                    source_index=job.source_index,
                    n_rows=0,
                    crc32c={},
                    error=f"two engines were lost on it: {again.message}",
                    retry=False,
                )

    def _restart(self, error: IncompleteError, *, counts: bool = True) -> None:
        """Raises `IncompleteError` when the breaker opens, `UsageError` when another engine comes up than before."""
        while True:
            self._watcher.engine_lost(error.message)
            self._drop()
            if counts:
                self._breaker.bad(error.message)
            counts = True
            seconds = wait_seconds(max(1, self._breaker.in_a_row))
            self._watcher.backoff(seconds, error.message)
            self._sleep(seconds)
            try:
                info = self._up().info
            except IncompleteError as again:
                error = again
                continue
            break
        if info != self.info:
            raise UsageError(
                f"the engine came back as another one: {info}, expected {self.info}",
                hint="see that it runs the same model with the same flags, then --resume",
            )

    def _drop(self) -> None:
        """Close what is lost already: that this may fail too says nothing new."""
        engine, self._engine = self._engine, None
        with contextlib.suppress(HsstoreError, OSError):
            if engine is not None:
                engine.close()


class _Feed:
    """Jobs on their way to an engine, and which of them wait for a ticket."""

    def __init__(self, jobs: Iterable[Job]) -> None:
        self._jobs = iter(jobs)
        self.pending: dict[int, Job] = {}
        """By source_index."""
        self.exhausted = self.broken = False

    def jobs(self) -> Iterator[Job]:
        """The jobs that are left. Going through it again, after an engine was lost, goes on where that one was."""
        while True:
            try:
                job = next(self._jobs)
            except StopIteration:
                self.exhausted = True
                return
            except BaseException:
                self.broken = True  # an error of the caller's own, not of the engine
                raise
            self.pending[job.source_index] = job
            yield job

    def close(self) -> None:
        close = getattr(self._jobs, "close", None)
        if close is not None:
            close()


def _generator(engine: Engine, jobs: Iterator[Job]) -> Generator[Ticket, None, None]:
    yield from engine.capture(jobs)
