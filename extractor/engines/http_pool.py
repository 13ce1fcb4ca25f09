"""Samples to several servers at once: who is up, who gets the next one, and what becomes of a lost server's.

Every server has threads of its own, one for each request that it may have in flight, and an up or a down of its own: a
lost one is asked again with back-off, and comes back when it is what it was. Its samples go to the others. Leaves one
server's business to `http_link`.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from extractor.engines.base import Job, Ticket
from extractor.engines.http_link import Link, ServerLost
from extractor.engines.receipts import failed_ticket, refusal
from extractor.sglang_plugin.process import RESUME_HINT
from hsstore.answers import TransientError
from hsstore.console import note, warn
from hsstore.errors import HsstoreError, IncompleteError

FIRST_WAIT_SECONDS = 0.5
LONGEST_WAIT_SECONDS = 30.0
MOST_LOSSES = 3  # a sample that was on its way when so many servers were lost may be what ends them
_TICK_SECONDS = 0.25
_END_SECONDS = 5.0  # a thread that reads a file of a hung disk is left behind then

Task = Callable[[], None]


@dataclass(slots=True, kw_only=True)
class Member:
    """A server of the pool. Its fields are changed in the caller's thread only."""

    link: Link
    in_flight: int
    check: Callable[[Link], None]
    """Handshake; raises an `HsstoreError` when the server is not there, or not what it was."""
    up: bool = True
    busy: int = 0
    reason: str = ""
    """Why it is down."""
    wait_seconds: float = FIRST_WAIT_SECONDS
    try_at: float = 0.0
    asking: bool = False
    _tasks: queue.SimpleQueue[Task | None] = field(default_factory=queue.SimpleQueue)
    _threads: list[threading.Thread] = field(default_factory=list)
    _n_tasks: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def free(self) -> int:
        return self.in_flight - self.busy if self.up else 0

    def start(self, task: Task) -> None:
        """Run it in a thread of this server."""
        with self._lock:
            self._n_tasks += 1
            if len(self._threads) < self._n_tasks:  # no task waits for another, a handshake least of all
                self._threads.append(threading.Thread(target=self._work, name=f"at {self.link.url}", daemon=True))
                self._threads[-1].start()
        self._tasks.put(task)

    def end(self) -> None:
        """End its threads, whatever they wait for. For good; safe to call again."""
        self.link.client.end()
        for _ in self._threads:
            self._tasks.put(None)
        deadline = time.monotonic() + _END_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self.link.client.close()  # of the thread that made the first handshake

    def lost(self, reason: str) -> None:
        if self.up:
            warn(f"{self.link.url} is lost: {reason}")
            self.wait_longer()
        self.up, self.reason = False, reason

    def wait_longer(self) -> None:
        """Before it is asked again."""
        self.try_at = time.monotonic() + self.wait_seconds * random.uniform(0.8, 1.0)
        self.wait_seconds = min(2 * self.wait_seconds, LONGEST_WAIT_SECONDS)

    def back(self) -> None:
        self.up, self.reason = True, ""
        note(f"{self.link.url} is back")

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()
            with self._lock:
                self._n_tasks -= 1
        self.link.client.close()


Outcome = Ticket | None | BaseException
"""Ticket of a job, None of a handshake that went well, else what was raised."""


class Dispatch:
    """One `capture`: its jobs, spread over the members."""

    def __init__(self, members: Sequence[Member], longest_tokens: int, outage_seconds: float) -> None:
        self._members, self._longest, self._outage_seconds = members, longest_tokens, outage_seconds
        self._results: queue.SimpleQueue[tuple[Member, Job | None, Outcome]] = queue.SimpleQueue()
        self._again: deque[Job] = deque()
        self._losses: dict[int, int] = {}
        self._pending = 0
        """Requests whose outcome has not come."""
        self._all_down_since = 0.0
        self.stop = threading.Event()

    def tickets(self, jobs: Iterable[Job]) -> Iterator[Ticket]:
        """One for each job. Raises `IncompleteError` when no server is up for too long."""
        source = iter(jobs)
        open_ = True
        while open_ or self._pending or self._again:
            while member := self._freest():
                job = self._again.popleft() if self._again else next(source, None)
                if job is None:
                    open_ = False
                    break
                if reason := refusal(job, self._longest):
                    yield failed_ticket(job, reason, retry=False)
                else:
                    self._send(member, job)
            if open_ or self._pending or self._again:
                yield from self._receive()

    def close(self) -> None:
        """Let go of what is still on its way: it reports to nobody, and writes nothing that was not begun."""
        self.stop.set()
        for member in self._members:
            if member.busy:
                member.link.client.shutdown()
            member.busy, member.asking = 0, False

    def _freest(self) -> Member | None:
        member = max(self._members, key=lambda m: m.free)
        return member if member.free > 0 else None

    def _send(self, member: Member, job: Job) -> None:
        def task() -> None:
            outcome: Outcome
            try:
                outcome = member.link.capture(job, self.stop)
            except BaseException as error:  # noqa: BLE001 - raised in the caller's thread, or the sample is sent again
                outcome = error
            self._results.put((member, job, outcome))

        member.start(task)
        member.busy += 1
        self._pending += 1

    def _receive(self) -> Iterator[Ticket]:
        """What the next result gives: mostly a ticket, nothing when a server was lost or came back."""
        self._ask_lost_ones()
        self._give_up_in_time()
        try:
            member, job, outcome = self._results.get(timeout=_TICK_SECONDS)
        except queue.Empty:
            return
        if job is None:
            self._take_handshake(member, outcome)
            return
        member.busy -= 1
        self._pending -= 1
        if isinstance(outcome, Ticket):
            member.wait_seconds = FIRST_WAIT_SECONDS
            self._losses.pop(job.source_index, None)
            yield outcome
        elif isinstance(outcome, ServerLost):
            member.lost(str(outcome))
            yield from self._send_again(job, str(outcome))
        else:
            assert isinstance(outcome, BaseException)
            raise outcome

    def _send_again(self, job: Job, reason: str) -> Iterator[Ticket]:
        losses = self._losses[job.source_index] = self._losses.get(job.source_index, 0) + 1
        if losses >= MOST_LOSSES:
            del self._losses[job.source_index]
            yield failed_ticket(job, f"{losses} times without an answer from a server, the last time: {reason}")
        else:
            self._again.append(job)

    def _ask_lost_ones(self) -> None:
        now = time.monotonic()
        for member in self._members:
            if not member.up and not member.asking and now >= member.try_at:
                member.asking = True
                member.start(self._handshake(member))

    def _handshake(self, member: Member) -> Task:
        def task() -> None:
            outcome: Outcome = None
            try:
                member.check(member.link)
            except BaseException as error:  # noqa: BLE001 - judged in the caller's thread
                outcome = error
            self._results.put((member, None, outcome))

        return task

    def _take_handshake(self, member: Member, outcome: Outcome) -> None:
        member.asking = False
        if outcome is None:
            member.back()
        elif isinstance(outcome, HsstoreError):
            if not isinstance(outcome, TransientError) and member.reason != outcome.message:  # once for each reason
                warn(f"{member.link.url} stays out: {outcome.message}")
            member.reason = outcome.message
            member.wait_longer()
        else:
            assert isinstance(outcome, BaseException)
            raise outcome

    def _give_up_in_time(self) -> None:
        now = time.monotonic()
        if any(member.up for member in self._members):
            self._all_down_since = 0.0
            return
        self._all_down_since = self._all_down_since or now
        if now - self._all_down_since >= self._outage_seconds:
            reasons = "; ".join(f"{member.link.url} ({member.reason})" for member in self._members)
            raise IncompleteError(f"no server answers any more: {reasons}", hint=RESUME_HINT)
