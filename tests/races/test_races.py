"""No process harms another one on the same store, whoever goes on before which call (all: python -m tests.races)."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.harness import in_memory
from tests.races.harness import Harness, Scenario, run_all
from tests.races.scenarios import SCENARIOS
from tests.races.turns import Drawn, Switches, Turns

SINGLE, DOUBLE, DRAWN = 9, 3, 4


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="hsstore-races-", dir=in_memory(tmp_path)) as directory:
        yield Path(directory)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.name)
def test_whoever_goes_on_all_end_well_and_nothing_is_left(scenario: Scenario, box: Path) -> None:
    harness = Harness(scenario, box)
    tally = run_all(harness, harness.sample(SINGLE, 0) + harness.double(DOUBLE, 0) + harness.drawn(DRAWN, 0))
    assert not tally.broken, "\n".join(map(str, tally.broken[:3]))
    assert tally.tried == SINGLE + DOUBLE + DRAWN
    assert all(harness.of(actor) for actor in range(len(scenario.actors)))


def test_actors_take_turns_where_they_are_told_to(tmp_path: Path) -> None:
    """The judge itself: an interleaving that is not the wanted one would pass for it."""
    seen: list[str] = []

    def act(name: str) -> None:
        for n in range(3):
            os.stat(tmp_path)
            seen.append(f"{name}{n}")

    turns = Turns(tmp_path, Switches((2, 1)), [lambda: act("a"), lambda: act("b")])
    assert turns.run() == [(None, None), (None, None)]
    assert seen == ["a0", "a1", "b0", "a2", "b1", "b2"]
    assert [step.actor for step in turns.steps] == [0, 0, 1, 0, 1, 1]


def test_what_is_drawn_is_drawn_again(tmp_path: Path) -> None:
    def act() -> None:
        for _ in range(40):
            os.stat(tmp_path)

    def order(seed: int) -> list[int]:
        turns = Turns(tmp_path, Drawn(seed, chance=0.3), [act, act, act])
        turns.run()
        return [step.actor for step in turns.steps]

    assert order(1) == order(1) != order(2)
    assert set(order(1)) == {0, 1, 2}


def test_a_look_before_a_leap_is_found(box: Path) -> None:
    """The judge itself: a file that another one removes between look and use must break."""

    def careless(at: Path) -> None:
        if (at / "there").exists():
            (at / "there").unlink()

    def all_well(_: Path, ends: list[tuple[object, BaseException | None]]) -> None:
        for _, error in ends:
            if error is not None:
                raise error

    harness = Harness(
        Scenario(
            name="careless",
            prepare=lambda at: (at / "there").touch(),
            actors=(careless, careless),
            judge=all_well,
            state=lambda at: sorted(p.name for p in at.iterdir()),
        ),
        box,
    )
    tally = run_all(harness, harness.single())
    assert {broken.how.switches for broken in tally.broken} == {(1,)}
    assert "FileNotFoundError" in tally.broken[0].why
