"""Which bins a step takes: every bin once, for any number of ranks, also when that number changes half-way."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.schedule import Cursor, learning_rate, steps_left, walk

START = Cursor(epoch=0, bins_consumed=0)
EPOCHS = st.lists(st.integers(0, 23), min_size=1, max_size=4)
WORLDS = st.integers(1, 5)


@given(batches=EPOCHS, world=WORLDS)
def test_every_bin_is_taken_exactly_once_and_in_order(batches: list[int], world: int) -> None:
    """A bin left out is data never trained on; one taken twice is data weighed double. Neither shows in a loss."""
    steps = list(walk(batches, START, 0, world))
    taken = [(s.epoch, b) for s in steps for b in s.bins if b is not None]
    assert taken == [(e, b) for e, n in enumerate(batches) for b in range(n)]
    assert [s.step for s in steps] == list(range(len(steps)))
    assert len(steps) == steps_left(batches, START, world)
    assert all(len(s.bins) == world for s in steps)


@given(batches=EPOCHS, world=WORLDS)
def test_only_the_last_step_of_an_epoch_has_empty_bins(batches: list[int], world: int) -> None:
    for s in walk(batches, START, 0, world):
        assert s.n_empty == 0 or s.ends_epoch
        assert s.bins[0] is not None
        assert s.ends_epoch == (s.after == Cursor(epoch=s.epoch + 1, bins_consumed=0))


@given(batches=EPOCHS, world=WORLDS, later=WORLDS, cut=st.integers(0, 30))
def test_going_on_with_another_number_of_ranks_loses_and_repeats_nothing(
    batches: list[int], world: int, later: int, cut: int
) -> None:
    before = list(walk(batches, START, 0, world))[:cut]
    cursor = before[-1].after if before else START
    after = list(walk(batches, cursor, len(before), later))
    taken = [(s.epoch, b) for s in before + after for b in s.bins if b is not None]
    assert taken == [(e, b) for e, n in enumerate(batches) for b in range(n)]
    assert len(after) == steps_left(batches, cursor, later)


def test_resumed_with_as_many_ranks_it_takes_the_same_steps() -> None:
    whole = list(walk([7, 7], START, 0, 2))
    for cut in range(1, len(whole)):
        assert list(walk([7, 7], whole[cut - 1].after, cut, 2)) == whole[cut:]


def test_the_rate_rises_to_its_peak_and_falls_to_nothing() -> None:
    rates = [learning_rate(s, peak=1.0, warmup_steps=4, total_steps=104, schedule="cosine") for s in range(104)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4] == 1.0
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert rates[54] == pytest.approx(0.5)
    assert 0 < rates[-1] < 0.001


def test_a_constant_schedule_does_not_know_the_end() -> None:
    rates = [learning_rate(9, peak=0.1, warmup_steps=0, total_steps=n, schedule="constant") for n in (10, 1000)]
    assert rates == [0.1, 0.1]
