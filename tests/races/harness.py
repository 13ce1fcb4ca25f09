"""Tries the interleavings of a scenario and says which did not hold.

Systematic ones: for every call of the first actor, the others run to their ends before it; and, drawn, the second one
only so many calls. Drawn ones: who goes on is drawn before every call. After each: every actor ended as it may, nothing
is damaged, nothing is left over, and what lies there is what the actors make one after the other. Leaves to `scenarios`
what is done.
"""

from __future__ import annotations

import random
import shutil
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

from hsstore.leases import Leases
from tests.faults.harness import copy_tree, descriptors
from tests.races.turns import Drawn, Policy, Step, Switches, Turns

End = tuple[object, BaseException | None]
"""What an actor returned, and what it raised."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Several actors in a directory of their own (the box)."""

    name: str
    prepare: Callable[[Path], object]
    """Builds the state before; once."""
    actors: Sequence[Callable[[Path], object]]
    """What each of them does."""
    judge: Callable[[Path, list[End]], None]
    """Asserts how they may have ended and what must lie there."""
    state: Callable[[Path], object]
    """What must be the same after every interleaving."""
    overtakes: bool = True
    """Whether it may also be tried with leases that keep nobody away."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interleaving:
    """One way in which actors take turns."""

    switches: tuple[int, ...] | None = None
    """As in `Switches`; None: drawn."""
    seed: int = 0
    leases: bool = True
    """Whether a lease keeps others away; False: each takes those of all others for dead, as after a long stop."""

    def policy(self) -> Policy:
        if self.switches is not None:
            return Switches(self.switches)
        return Drawn(self.seed, chance=(0.02, 0.1, 0.3)[self.seed % 3])

    def __str__(self) -> str:
        how = f"drawn by {self.seed}" if self.switches is None else f"after {self.switches} calls"
        return how + ("" if self.leases else ", leases of others taken for dead")


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken:
    """An interleaving after which something did not hold."""

    scenario: str
    how: Interleaving
    before: Step | None
    """The call before which the first switch was."""
    why: str

    def __str__(self) -> str:
        where = f" (before {self.before})" if self.before else ""
        return f"{self.scenario}: {self.how}{where}:\n{self.why}"


@dataclass(slots=True)
class Tally:
    """What was tried; `broken` is what a run must leave empty."""

    tried: int = 0
    broken: list[Broken] = field(default_factory=list)


class Harness:
    """One scenario, its state before, and what its actors end with one after the other."""

    def __init__(self, scenario: Scenario, directory: Path) -> None:
        self.scenario = scenario
        self._template, self.box = directory / "template", directory / "box"
        self._template.mkdir(parents=True)
        scenario.prepare(self._template)
        self.tally = Tally()
        self.steps = self._play(Interleaving(switches=()))
        self.expected = scenario.state(self.box)

    def _play(self, how: Interleaving) -> list[Step]:
        shutil.rmtree(self.box, ignore_errors=True)
        copy_tree(self._template, self.box)
        before = descriptors()
        works = [lambda act=act: act(self.box) for act in self.scenario.actors]
        turns = Turns(self.box, how.policy(), works)
        if how.leases:
            ends = turns.run()
        else:
            with patch.object(Leases, "_has_ended", lambda *_, **__: True):
                ends = turns.run()
        self.scenario.judge(self.box, ends)
        leaked = descriptors() - before
        assert not leaked, f"descriptors left open: {dict(leaked)}"
        return turns.steps

    def of(self, actor: int) -> list[Step]:
        """The calls of an actor when they run one after the other."""
        return [step for step in self.steps if step.actor == actor]

    @property
    def _ways(self) -> tuple[bool, ...]:
        return (True, False) if self.scenario.overtakes else (True,)

    def single(self) -> list[Interleaving]:
        """Every call of the first actor, with and without regard for leases."""
        n = len(self.of(0))
        return [Interleaving(switches=(k,), leases=leases) for leases in self._ways for k in range(n)]

    def double(self, n: int, seed: int) -> list[Interleaving]:
        """A drawn call of the first actor and one of the second."""
        drawn, first, second = random.Random(f"{seed} {self.scenario.name}"), len(self.of(0)), len(self.of(1))
        return [
            Interleaving(switches=(drawn.randrange(first), drawn.randrange(second)), leases=drawn.choice(self._ways))
            for _ in range(n)
        ]

    def drawn(self, n: int, seed: int) -> list[Interleaving]:
        return [Interleaving(seed=seed * 1_000_000 + k) for k in range(n)]

    def sample(self, n: int, seed: int) -> list[Interleaving]:
        """At most `n` of the single ones: each place of the code first, as far as they reach, the rest drawn."""
        every = self.single()
        drawn = random.Random(f"{seed} {self.scenario.name}").sample(every, len(every))
        calls = self.of(0)
        seen: set[tuple[str, str]] = set()
        first, rest = [], []
        for how in drawn:
            assert how.switches
            at = (calls[how.switches[0]].place, calls[how.switches[0]].name)
            (rest if at in seen else first).append(how)
            seen.add(at)
        return (first + rest)[:n]

    def attempt(self, how: Interleaving) -> None:
        """Play it and add to the tally what did not hold."""
        self.tally.tried += 1
        try:
            self._play(how)
            found = self.scenario.state(self.box)
            assert found == self.expected, f"ends as {found}, expected {self.expected}"
        except Exception:
            text = traceback.format_exc(limit=-8)
            step = self.of(0)[how.switches[0]] if how.switches else None
            self.tally.broken.append(Broken(scenario=self.scenario.name, how=how, before=step, why=text))


def run_all(harness: Harness, every: Sequence[Interleaving]) -> Tally:
    for how in every:
        harness.attempt(how)
    return harness.tally
