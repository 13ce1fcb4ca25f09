"""Several actors in one process of which exactly one runs at any time: each gives way only before a call to the
operating system, and a policy says to whom.

Every interleaving is thereby chosen, and the same policy gives the same one again. Calls are those that the layer of
`tests.faults` sees below one directory. Waiting for others (a lease that somebody holds) gives way too. Leaves to
`scenarios` what the actors do, to `harness` which interleavings are tried and what must hold after them.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol
from unittest.mock import patch

from hsstore import copying
from tests.faults.shim import Shim, _place

STUCK_SECONDS = 120
"""Only a deadlock takes so long: no turn is waited for by the clock."""
_IDLE_TURNS = 1000


class Policy(Protocol):
    """Who goes on."""

    def choose(self, actor: int, calls: int, others: Sequence[int]) -> int:
        """The next one, of `actor` and `others`, before call number `calls` of `actor`."""


@dataclass(slots=True)
class Switches:
    """Actor 0 makes so many calls, then actor 1 so many, and so on in turn; who has none left runs to its end."""

    counts: Sequence[int]
    _at: int = 0
    _used: int = 0

    def choose(self, actor: int, calls: int, others: Sequence[int]) -> int:
        if self._at >= len(self.counts):
            return actor
        if self._used == self.counts[self._at]:
            self._at, self._used = self._at + 1, 0
            return min((n for n in others if n > actor), default=min(others, default=actor))
        self._used += 1
        return actor


@dataclass(slots=True)
class Drawn:
    """Gives way before each call with a chance, drawn by a seed."""

    seed: int
    chance: float
    _random: random.Random = field(default_factory=random.Random)

    def __post_init__(self) -> None:
        self._random.seed(self.seed)

    def choose(self, actor: int, calls: int, others: Sequence[int]) -> int:
        if others and self._random.random() < self.chance:
            return self._random.choice(list(others))
        return actor


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One call of one actor."""

    actor: int
    name: str
    path: str
    place: str

    def __str__(self) -> str:
        return f"{'ABCD'[self.actor]}: {self.name}({self.path}) at {self.place}"


@dataclass(slots=True)
class _Actor:
    number: int
    work: Callable[[], object]
    go: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    thread: threading.Thread | None = None
    calls: int = 0
    done: bool = False
    result: object = None
    error: BaseException | None = None


class _Abandoned(BaseException):
    """Ends an actor of a run that has failed."""


class Turns(Shim):
    """Runs the actors to their ends. After that `steps` says what was done in which order."""

    __slots__ = ("_actors", "_by_thread", "_ended", "_failed", "_idle", "_policy", "steps")

    def __init__(self, root: Path, policy: Policy, works: Sequence[Callable[[], object]]) -> None:
        super().__init__(root)
        self._policy = policy
        self._actors = [_Actor(n, work) for n, work in enumerate(works)]
        self._by_thread: dict[int, _Actor] = {}
        self._ended = threading.Event()
        self._failed = False
        self._idle = 0
        self.steps: list[Step] = []

    def run(self) -> list[tuple[object, BaseException | None]]:
        """What each actor returned, or raised."""
        with self, patch.object(copying, "wait_for_others", self._idles):
            for actor in self._actors:
                actor.thread = threading.Thread(target=self._act, args=(actor,), daemon=True)
                actor.thread.start()
            self._actors[0].go.release()
            ended = self._ended.wait(STUCK_SECONDS)
            self._failed = not ended
            for actor in self._actors:
                actor.go.release()
                assert actor.thread is not None
                actor.thread.join(STUCK_SECONDS)
        assert ended, f"the actors wait for one another after {self.steps[-3:]}"
        return [(actor.result, actor.error) for actor in self._actors]

    def _act(self, actor: _Actor) -> None:
        self._by_thread[threading.get_ident()] = actor
        actor.go.acquire()
        try:
            if not self._failed:
                actor.result = actor.work()
        except BaseException as error:
            actor.error = error
        finally:
            actor.done = True
            left = self._others(actor)
            (self._actors[left[0]].go.release if left else self._ended.set)()

    def _others(self, actor: _Actor) -> list[int]:
        return [a.number for a in self._actors if not a.done and a is not actor]

    def check(self, kind: str, name: str, path: str, n_bytes: int = 0, second: str | None = None) -> bool:
        """Called by the layer before every call: the place where an actor may give way."""
        actor = self._by_thread.get(threading.get_ident())
        if actor is not None:
            self._idle = 0
            self._give_way(actor, self._policy.choose(actor.number, actor.calls, self._others(actor)))
            actor.calls += 1
            place = _place(sys._getframe(1))
            self.steps.append(Step(actor=actor.number, name=name, path=path.removeprefix(self._prefix), place=place))
        return False

    def _idles(self) -> None:
        """Instead of waiting: another actor goes on."""
        actor = self._by_thread[threading.get_ident()]
        self._idle += 1
        assert self._idle < _IDLE_TURNS, "everybody waits"
        self._give_way(actor, next(iter(self._others(actor)), actor.number))

    def _give_way(self, actor: _Actor, to: int) -> None:
        if to != actor.number:
            self._actors[to].go.release()
            actor.go.acquire()
            if self._failed:
                raise _Abandoned
