"""Keeps workers at work on whatever nodes there are, until nothing is left to do.

Nodes that join get workers; workers of nodes that are gone are forgotten, others that are lost are started again after
a while, a few times. A wrong call ends the run, for it would be wrong everywhere. Decides nothing about shards: the
workers share them by leases, so nothing is handed over when one is lost. Leaves Ray to `cluster`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from extractor.fleet.actor import Status
from extractor.fleet.messages import (
    Committed,
    Ended,
    Erred,
    FromDriver,
    FromWorker,
    Resources,
    Said,
    Staged,
    Started,
    Strength,
    Troubled,
)
from extractor.fleet.places import Need, Node, capacity, need_of, refuse_too_small
from extractor.supervise import wait_seconds
from extractor.words import counted

MAX_LOSSES = 5
"""That many times in a row a worker may be lost before it has committed anything."""
ENDING_SECONDS = 90.0
"""How long workers may take to end in good order."""
_QUIET_SECONDS = 60.0
_ENDS_ALL = ("usage", "missing_extra", "not_found", "damaged", "conflict", "format_not_supported", "unauthorized")
_NO_SPACE = "no_space"


class LostActorError(Exception):
    """An actor will answer no more; the text says why."""


class Cluster(Protocol):
    """The actors, by whatever runs them."""

    def nodes(self) -> list[Node]:
        """Those that live now."""
        ...

    def start(self, node: str | None, need: Need) -> object:
        """A new actor, on that node or anywhere; it may take any time until it is there."""
        ...

    def poll(self, handles: list[object], seconds: float) -> list[tuple[object, Status | LostActorError]]:
        """Wait for that long at most; what those that have something to say answer."""
        ...

    def stop(self, handle: object) -> None:
        """Tell its worker to end in good order."""
        ...

    def kill(self, handle: object) -> None: ...


@dataclass(slots=True, eq=False)
class Slot:
    """A place for one worker."""

    name: str
    node: str | None
    """None = wherever Ray finds room."""
    early: bool
    """There when the run began: its first worker tells whether the call is right."""
    handle: object | None = None
    since: float = 0.0
    due: float = 0.0
    """When the next worker is to be started."""
    losses: int = 0
    """In a row, without a commit between."""
    answered: bool = False
    up: bool = False
    was_up: bool = False
    last: Ended | Erred | None = None
    given_up: bool = False


@dataclass(slots=True)
class Supervisor:
    cluster: Cluster
    resources: Resources
    store_uuid: str
    """Of the store to be written; "" until one is made."""
    say: Callable[[FromDriver], None]
    clock: Callable[[], float] = time.monotonic
    slots: list[Slot] = field(default_factory=list, init=False)
    _result: Ended | Erred | None = field(default=None, init=False)
    _last_error: Erred | None = field(default=None, init=False)
    _known: set[str] = field(default_factory=set, init=False)
    _need: Need = field(default=Need(cpus=1, gpus=0), init=False)
    _empty_since: float | None = field(default=None, init=False)
    _told_strength: Strength | None = field(default=None, init=False)

    def begin(self) -> None:
        """Raises `UsageError` when no node takes a worker, unless a number of them was asked for."""
        nodes = self.cluster.nodes()
        self._need = need_of(self.resources, nodes)
        if self.resources.actors is None:
            refuse_too_small(nodes, self._need)
            self._meet(nodes, early=True)
        else:
            self.slots = [Slot(name=f"worker {i}", node=None, early=True) for i in range(self.resources.actors)]
        there, workers = counted(len(nodes), "node"), counted(len(self.slots), "worker")
        self.say(Said(text=f"Ray has {there}; starting {workers} with {self._need} each"))

    def run(self, stopped: Callable[[], bool], poll_seconds: float = 1.0) -> Ended | Erred:
        """Until nothing is left to do, the run has failed, or `stopped`. Leaves no worker behind."""
        while self._result is None and not stopped():
            self.turn(poll_seconds)
        result = self._result or Erred(kind="terminated", message="told to end")
        self.end_all(at_once=not isinstance(result, Ended))
        return result

    def turn(self, poll_seconds: float) -> None:
        """One look at nodes and workers."""
        if self.resources.actors is None:
            nodes = self.cluster.nodes()
            self._forget({n.id for n in nodes})
            self._meet(nodes, early=False)
        self._start_due()
        for slot, answer in self._poll(poll_seconds):
            if isinstance(answer, Status):
                self._hear(slot, answer)
            else:
                self._lost(slot, str(answer))
        self._tell_strength()
        self._judge()

    def end_all(self, *, at_once: bool) -> None:
        """Workers that found nothing left end by themselves, the others are told to; who does not is killed."""
        told, end = at_once, self.clock() + ENDING_SECONDS
        if told:
            self._stop_all()
        while self._living():
            left = end - self.clock()
            if left < ENDING_SECONDS / 2 and not told:
                told = True
                self._stop_all()
            if left < 0:
                break
            for slot, answer in self._poll(0.2):
                if not isinstance(answer, Status) or answer.exit_code is not None:
                    self._drop(slot)
        for slot in self._living():
            self.cluster.kill(slot.handle)

    def _stop_all(self) -> None:
        for slot in self._living():
            self.cluster.stop(slot.handle)

    def _living(self) -> list[Slot]:
        return [slot for slot in self.slots if slot.handle is not None]

    def _poll(self, seconds: float) -> list[tuple[Slot, Status | LostActorError]]:
        slots = {id(slot.handle): slot for slot in self._living()}
        answers = self.cluster.poll([slot.handle for slot in slots.values()], seconds)
        return [(slots[id(handle)], answer) for handle, answer in answers]

    def _meet(self, nodes: Iterable[Node], *, early: bool) -> None:
        for node in nodes:
            if node.id in self._known:
                continue
            self._known.add(node.id)
            n = capacity(node, self._need)
            self.slots += [
                Slot(name=f"worker{'' if n == 1 else f' {i}'} on {node.name}", node=node.id, early=early)
                for i in range(n)
            ]
            if not early:
                self.say(Said(text=f"node {node.name} has joined: {counted(n, 'worker')} to start on it"))

    def _forget(self, living: set[str]) -> None:
        for slot in [s for s in self.slots if s.node is not None and s.node not in living]:
            self._drop(slot)
            self.slots.remove(slot)
            self._known.discard(slot.node or "")
            self.say(Said(text=f"the node of {slot.name} is lost: others take over its shard", warning=True))

    def _start_due(self) -> None:
        now = self.clock()
        for slot in self.slots:
            if slot.handle is None and not slot.given_up and now >= slot.due:
                slot.handle = self.cluster.start(slot.node, self._need)
                slot.since, slot.answered, slot.up, slot.last = now, False, False, None
            elif slot.handle is not None and not slot.answered and now - slot.since > _QUIET_SECONDS:
                self.say(Said(text=f"{slot.name} still waits for Ray to give it {self._need}"))
                slot.since = now

    def _hear(self, slot: Slot, status: Status) -> None:
        if not slot.answered:
            slot.answered = True
            self.say(Said(text=f"{slot.name} runs: process {status.pid} on {status.host}"))
        for event in status.events:
            self._note(slot, event)
        if status.exit_code is None:
            return
        self._drop(slot)
        if isinstance(slot.last, Ended):
            self._result = self._result or slot.last
        elif slot.last is not None:
            self._failed(slot, slot.last)
        else:
            self._lost(slot, f"its process ended with exit code {status.exit_code}{_last_line(status.log)}")

    def _note(self, slot: Slot, event: FromWorker) -> None:
        match event:
            case Started():
                slot.up = slot.was_up = True
                self.say(Said(text=f"{slot.name} is at work: {event.engine}, up after {event.seconds:.0f} s"))
            case Staged():
                self._compare(slot, event.store_uuid)
            case Committed():
                slot.losses = 0
            case Troubled():
                self.say(Said(text=f"{slot.name} {event.text}", warning=True))
            case Ended():
                slot.last = event
                self._compare(slot, event.store_uuid)
            case Erred():
                slot.last = event

    def _compare(self, slot: Slot, store_uuid: str) -> None:
        """Two stores under one path are two file systems: what one of them gets would be missing in the other."""
        if not self.store_uuid:
            self.store_uuid = store_uuid
        if store_uuid and store_uuid != self.store_uuid:
            self._result = Erred(
                kind="usage",
                message=f"{slot.name} writes to store {store_uuid}, others to {self.store_uuid}",
                hint="--out must lie on a file system that all nodes share, at one path",
            )

    def _failed(self, slot: Slot, error: Erred) -> None:
        """A worker said why it ends."""
        error = Erred(kind=error.kind, message=f"{slot.name}: {error.message}", hint=error.hint)
        if error.kind == _NO_SPACE or (error.kind in _ENDS_ALL and slot.early and not slot.was_up):
            self._result = self._result or error
        elif error.kind in _ENDS_ALL:
            self._give_up(slot, error)  # the call is right, this node is not
        else:
            self._lost(slot, error.message.partition(": ")[2], error)

    def _lost(self, slot: Slot, reason: str, error: Erred | None = None) -> None:
        self._drop(slot)
        if slot.node is not None and slot.node not in (living := {n.id for n in self.cluster.nodes()}):
            self._forget(living)
            return
        slot.losses += 1
        error = error or Erred(
            kind="incomplete",
            message=f"{slot.name}: {reason}",
            hint="what was committed is kept: run the same command with --resume",
        )
        if slot.losses >= MAX_LOSSES:
            self._give_up(slot, error)
            return
        seconds = wait_seconds(slot.losses)
        slot.due = self.clock() + seconds
        self._last_error = error
        self.say(Said(text=f"lost {slot.name}: {reason}; a new one starts in {seconds:.0f} s", warning=True))

    def _give_up(self, slot: Slot, error: Erred) -> None:
        slot.given_up, self._last_error = True, error
        self.say(Said(text=f"giving up {error.message}; the others go on", warning=True))

    def _drop(self, slot: Slot) -> None:
        if slot.handle is not None:
            self.cluster.kill(slot.handle)
        slot.handle, slot.up = None, False

    def _tell_strength(self) -> None:
        living = self._living()
        working = sum(slot.up for slot in living)
        strength = Strength(working=working, starting=len(living) - working)
        if strength != self._told_strength:
            self.say(strength)
        self._told_strength = strength

    def _judge(self) -> None:
        """Whether there is still somebody to work, or reason to hope for."""
        if self._result is not None:
            return
        if any(not slot.given_up for slot in self.slots):
            self._empty_since = None
            return
        if self.slots and self._last_error is not None:
            self._result = self._last_error
            return
        if self._empty_since is None:
            self._empty_since = self.clock()
            self.say(
                Said(
                    text="no node is left; waiting for one to join, at most"
                    f" {self.resources.patience_seconds:.0f} s (--ray-patience)",
                    warning=True,
                )
            )
        elif self.clock() - self._empty_since > self.resources.patience_seconds:
            self._result = Erred(
                kind="incomplete",
                message="every node of the Ray cluster is lost",
                hint="what was committed is kept: run the same command with --resume",
            )


def _last_line(log: str) -> str:
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return f": {lines[-1][:500]}" if lines else ""
