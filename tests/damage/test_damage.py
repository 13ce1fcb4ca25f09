"""Damage of every kind, found and located; the long campaign is `python -m tests.damage.run --count 10000`."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from tests.damage.kinds import KINDS, flip_in_footer, flip_in_states, missing_file
from tests.damage.run import campaign, verify
from tests.damage.world import World, tree

COUNT = 7 * len(KINDS)


def test_damage_of_every_kind_is_found_and_located(tmp_path: Path) -> None:
    """None missed, misplaced or made up, no exception; every kind of damage and of finding occurred."""
    tally = campaign(tmp_path, COUNT, seed=0)
    assert tally.failures == []
    assert set(tally.done) == set(KINDS)
    assert min(tally.done.values()) >= 7
    assert tally.located > COUNT / 4
    expected = "block derived footer layout manifest metadata missing record size tombstone unknown"
    assert set(tally.found) >= set(expected.split())
    assert tally.redrawn.total() < COUNT / 4


def test_the_oracle_would_notice(tmp_path: Path) -> None:
    """What a verification overlooks, places one block too far or makes up is a failure of the campaign."""
    world = World(tmp_path)
    for damage in (flip_in_states, flip_in_footer, missing_file):
        damage(world, Random(3))
        found = verify(world)
        assert world.misjudged(found) == []
        assert any("not found" in wrong for wrong in world.misjudged([f for f in found if f.severity == "note"]))
        world.mend()
        assert any("not damaged" in wrong for wrong in world.misjudged(found)), "told of a sound store"
    flip_in_states(world, Random(4))
    (finding,) = [f for f in verify(world) if f.severity == "damage"]
    assert finding.rows is not None
    for shift in (-1, 1):
        rows = (finding.rows[0] + shift, finding.rows[1] + shift)
        moved = type(finding)(**{name: getattr(finding, name) for name in finding.__slots__} | {"rows": rows})
        assert any("rows" in wrong for wrong in world.misjudged([moved]))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("damage"))


@pytest.mark.parametrize("name", sorted(KINDS))
def test_every_kind_changes_something_and_is_mended(world: World, name: str) -> None:
    for number in range(50):
        KINDS[name](world, Random(number))
        changed = tree(world.root) != world.sound
        world.mend()
        assert tree(world.root) == world.sound
        if changed:
            return
    pytest.fail("fifty draws changed nothing")
