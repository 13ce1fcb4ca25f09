"""Runs a scenario once under the recorder and judges what crashes may leave of it."""

from __future__ import annotations

import dataclasses
import os
import random
import shutil
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

from hsstore import manifest, zarrmeta
from tests.crash.model import State, crash_states
from tests.crash.recorder import Node, Op, Recorder
from tests.crash.scenarios import Scenario, as_process


@dataclass(slots=True)
class Trace:
    """What a scenario did."""

    initial: dict[int, Node]
    ops: list[Op]
    final: dict[str, bytes | None]
    """What really lay there at the end, by path; None for a directory."""
    ends: tuple[str, str]
    """manifest_id when the next run comes before, and when it comes after."""

    def kinds(self) -> Counter[str]:
        return Counter(op.kind for op in self.ops)


@dataclass(slots=True)
class Verdict:
    """Of all states of one scenario."""

    states: int = 0
    points: int = 0
    violations: list[str] = field(default_factory=list)


@contextmanager
def scratch() -> Iterator[Path]:
    """An empty directory, in memory where there is such a place: thousands of stores are made in it."""
    memory = Path("/dev/shm")
    where = memory if memory.is_dir() and os.access(memory, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="hsstore-crash-", dir=where) as directory:
        yield Path(directory).resolve()


def record(scenario: Scenario) -> Trace:
    """Do it once, watched."""
    with scratch() as directory:
        before, base = directory / "before", directory / "base"
        before.mkdir()
        base.mkdir()
        scenario.prepare(before)
        scenario.recover(before)
        scenario.prepare(base)
        recorder = Recorder(base)
        with recorder.watching(), as_process(0):
            scenario.act(base, recorder)
        acked = {op.item for op in recorder.ops if op.kind == "ack"}
        assert acked.issuperset(scenario.acks), f"{scenario.name} acknowledged {acked}"
        final = {p.relative_to(base).as_posix(): p.read_bytes() if p.is_file() else None for p in base.rglob("*")}
        scenario.recover(base)
        ends = (manifest.write(before / scenario.store), manifest.write(base / scenario.store))
        return Trace(initial=recorder.initial, ops=recorder.ops, final=final, ends=ends)


@contextmanager
def _quick_documents() -> Iterator[None]:
    """The zarr.json of a few layouts are spelled thousands of times, which was a quarter of the whole run."""
    known: dict[str, bytes] = {}
    real = zarrmeta._pretty

    def pretty(document: object) -> bytes:
        key = repr(document)
        if key not in known:
            known[key] = real(document)
        return known[key]

    with mock.patch.object(zarrmeta, "_pretty", pretty):
        yield


def judge(scenario: Scenario, trace: Trace, *, seed: int, per_point: int, budget: int, first: bool = False) -> Verdict:
    """Judge up to `budget` states, spread over all points; with `first`, stop at the first violation."""
    rng = random.Random(f"{scenario.name}/{seed}")
    states = crash_states(trace.initial, trace.ops, rng, per_point=per_point)
    verdict = Verdict(points=len(trace.ops) + 1)
    with scratch() as directory, _quick_documents():
        for number, state in enumerate(_spread(states, budget, rng)):
            base = directory / f"{number}"
            state.make(base)
            verdict.states += 1
            for problem in _problems(scenario, trace, base, state):
                verdict.violations.append(problem)
            shutil.rmtree(base)
            if first and verdict.violations:
                break
    return verdict


def _spread(states: list[State], budget: int, rng: random.Random) -> list[State]:
    """The worst state of every point, then the next one of every point, until the budget is spent. The last point comes
    first: there everything was promised, and what nobody made durable is pending still."""
    rank: Counter[int] = Counter()
    last = max(state.point for state in states)
    keyed = []
    for state in states:
        keyed.append((rank[state.point], rng.random() * (state.point != last), state))
        rank[state.point] += 1
    return [state for _, _, state in sorted(keyed, key=lambda k: k[:2])[:budget]]


def _problems(scenario: Scenario, trace: Trace, base: Path, state: State) -> list[str]:
    try:
        found = list(scenario.judge(base, state.acked, trace.ends))
    except Exception as error:  # whatever it is, a store that a crash left must not do that
        last = traceback.extract_tb(error.__traceback__)[-1]
        found = [f"{type(error).__name__}: {error} ({Path(last.filename).name}:{last.lineno})"]
    return [f"{scenario.name}, crash after step {state.point} ({state.story}): {problem}" for problem in found]


def without(trace: Trace, number: int) -> Trace:
    """The same run with its fsync number `number` left out."""
    places = [i for i, op in enumerate(trace.ops) if op.kind == "fsync"]
    left = places[number]
    return dataclasses.replace(trace, ops=[op for i, op in enumerate(trace.ops) if i != left])
