"""Damage a store many times, verify it in full each time, and print what was found.

    python -m tests.damage.run --count 10000 [--seed 0]

Ends with exit code 1 when anything was missed, misplaced or made up, or when a verification raised.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from hsstore.findings import Finding
from hsstore.verify import Options, Verifier
from tests.damage.kinds import KINDS
from tests.damage.world import World, tree


@dataclass
class Tally:
    """What a campaign did and saw."""

    done: Counter[str] = field(default_factory=Counter)
    """Damages by kind."""
    redrawn: Counter[str] = field(default_factory=Counter)
    """Draws that changed no byte (a zeroed sector of zeros) and were drawn again."""
    found: Counter[str] = field(default_factory=Counter)
    """Findings by kind of finding."""
    located: int = 0
    """Damages of shard files that were located to rows."""
    failures: list[str] = field(default_factory=list)

    def table(self) -> str:
        lines = [f"| {name.replace('_', ' ')} | {self.done[name]:,} |" for name in KINDS]
        total = f"| **all** | **{self.done.total():,}** |"
        return "\n".join(["| damage | times |", "|---|---|", *lines, total])


def verify(world: World) -> list[Finding]:
    return list(Verifier(world.root, "full", Options(jobs=2)).findings())


def campaign(directory: Path, count: int, seed: int) -> Tally:
    """`count` damages, every kind in turn, each on the sound store. The same seed does the same."""
    world, tally, kinds = World(directory), Tally(), list(KINDS)
    _must_be_sound(world)
    for number in range(count):
        name, rng = kinds[number % len(kinds)], Random(f"{seed} {number}")
        KINDS[name](world, rng)
        while tree(world.root) == world.sound:
            tally.redrawn[name] += 1
            world.mend()
            KINDS[name](world, rng)
        _judge(world, tally, f"{name} (--seed {seed}, number {number})")
        tally.done[name] += 1
        world.mend()
        if number % 500 == 499:
            _must_be_sound(world)
    _must_be_sound(world)
    return tally


def _judge(world: World, tally: Tally, what: str) -> None:
    try:
        findings = verify(world)
    except Exception:  # what a verification must never do is one of the things that are counted
        tally.failures.append(f"{what}: raised\n{traceback.format_exc()}")
        return
    tally.found.update(f.kind for f in findings if f.severity == "damage")
    tally.located += any(f.rows is not None for f in findings)
    tally.failures += [f"{what}: {wrong}" for wrong in world.misjudged(findings)]


def _must_be_sound(world: World) -> None:
    """The harness itself: mended is as before, and a sound store has no damage."""
    assert tree(world.root) == world.sound
    findings = verify(world)
    assert {f.kind for f in findings} == {"quarantined"}, findings


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        tally = campaign(Path(directory), options.count, options.seed)
    print(tally.table())
    kinds = ", ".join(f"{kind} {n:,}" for kind, n in tally.found.most_common())
    print(f"\n{tally.done.total():,} damages, {tally.located:,} of them located to rows; findings: {kinds}")
    print(f"redrawn because they changed nothing: {tally.redrawn.total():,}")
    print(f"missed, misplaced, made up or raised: {len(tally.failures)}")
    for failure in tally.failures[:20]:
        print(failure, file=sys.stderr)
    return 1 if tally.failures else 0


if __name__ == "__main__":
    sys.exit(main())
