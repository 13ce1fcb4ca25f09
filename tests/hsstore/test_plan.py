from __future__ import annotations

import itertools
import os
import signal
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hsstore import plan as plan_module
from hsstore.errors import NotFoundError, UsageError
from hsstore.index import Index
from hsstore.plan import WINDOW_BINS, Plan, PlanParameters, plan_id
from hsstore.records import Split

NO_SPLIT = Split(salt="", validation_fraction=0.0)


def make_index(lengths: list[int]) -> Index:
    n = len(lengths)
    zeros = np.zeros(n, np.uint64)
    return Index(
        uid=np.arange(2 * n, dtype=np.uint64).reshape(n, 2),
        source_index=np.arange(n, dtype=np.uint64),
        shard=zeros,
        row=zeros,
        n_tokens=np.array(lengths, np.uint64),
        flags=zeros,
    )


def make_plan(lengths: list[int], **parameters: object) -> Plan:
    return Plan(make_index(lengths), NO_SPLIT, "m" * 64, PlanParameters(**parameters))  # type: ignore[arg-type]


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 90), max_size=150),
    st.integers(2, 64),
    st.integers(0, 5),
    st.sampled_from(["truncate", "drop"]),
)
def test_every_usable_sample_exactly_once_within_the_budget(
    lengths: list[int], budget: int, epoch: int, overflow: str
) -> None:
    plan = make_plan(lengths, max_seq_len=budget, overflow=overflow)
    bins = plan.epoch(epoch)
    seen: dict[int, int] = {}
    for b in range(bins.n_batches):
        segments = bins.segments(b)
        assert 0 < sum(s.n_tokens for s in segments) <= budget
        for s in segments:
            assert s.sample not in seen
            seen[s.sample] = s.n_tokens
    kept = {i: min(n, budget) for i, n in enumerate(lengths) if n >= 2 and (n <= budget or overflow == "truncate")}
    assert seen == kept
    assert plan.n_dropped == len(lengths) - len(kept)
    assert plan.n_cut == sum(n > budget for n in lengths) * (overflow == "truncate")
    assert bins.n_tokens == plan.n_tokens == sum(kept.values())


@given(st.integers(1, 7))
def test_ranks_of_any_world_cover_every_bin_once(world: int) -> None:
    bins = make_plan([7] * 41, max_seq_len=32).epoch(0)
    steps = -(-bins.n_batches // world)
    taken = [step * world + rank for rank in range(world) for step in range(steps)]
    assert sorted(b for b in taken if b < bins.n_batches) == list(range(bins.n_batches))
    assert len(taken) - bins.n_batches < world, "empty bins only fill the last step"


def test_epochs_differ_and_repeat() -> None:
    lengths = np.random.default_rng(0).integers(2, 60, 300).tolist()
    first, again = make_plan(lengths, max_seq_len=64), make_plan(lengths, max_seq_len=64)
    same = [first.epoch(1).segments(b) == again.epoch(1).segments(b) for b in range(first.epoch(1).n_batches)]
    assert all(same)
    assert first.epoch(0).segments(0) != first.epoch(1).segments(0)


def test_bins_are_nearly_full_on_real_lengths() -> None:
    lengths = np.clip(np.random.default_rng(1).lognormal(6.5, 0.9, 8000), 2, 8000).astype(int).tolist()
    bins = make_plan(lengths, max_seq_len=4096).epoch(0)
    assert bins.n_tokens / (bins.n_batches * 4096) > 0.995


def test_neighbouring_bins_cost_alike() -> None:
    """The ranks of one step wait for the slowest: inside a window the cost only rises."""
    lengths = np.clip(np.random.default_rng(1).lognormal(5, 1, 4000), 2, 900).astype(int)
    bins = make_plan(lengths.tolist(), max_seq_len=1024).epoch(0)
    cost = np.array([sum(s.n_tokens**2 for s in bins.segments(b)) for b in range(bins.n_batches)])
    assert bins.n_batches > 2 * WINDOW_BINS
    for start in range(0, bins.n_batches, WINDOW_BINS):
        assert (np.diff(cost[start : start + WINDOW_BINS]) >= 0).all()
    shuffled = np.random.default_rng(0).permutation(cost)
    assert spread(cost) < 0.5 * spread(shuffled)


def spread(cost: np.ndarray) -> float:
    steps = cost[: len(cost) // 4 * 4].reshape(-1, 4)
    return float((steps.max(1) / steps.mean(1)).mean() - 1)


def test_vectors_never_change() -> None:
    """plan_id promises the same batches for ever: a change here needs a new ALGORITHM."""
    plan = make_plan([5, 30, 2, 17, 60, 33, 8, 9, 40, 12, 64, 3, 22, 1, 70], max_seq_len=64, seed=3)
    bins = [[(s.sample, s.stop) for s in plan.epoch(1).segments(b)] for b in range(plan.epoch(1).n_batches)]
    assert bins == BINS
    assert plan.plan_id == PLAN_ID


def test_plan_id_depends_on_everything_that_decides_a_batch() -> None:
    ids = {
        plan_id("a" * 64, PlanParameters()),
        plan_id("b" * 64, PlanParameters()),
        plan_id("a" * 64, PlanParameters(seed=1)),
        plan_id("a" * 64, PlanParameters(max_seq_len=2048)),
        plan_id("a" * 64, PlanParameters(split="all")),
        plan_id("a" * 64, PlanParameters(overflow="drop")),
    }
    assert len(ids) == 6


def test_what_does_not_exist_is_not_found() -> None:
    plan = make_plan([5, 6], max_seq_len=16)
    for batch in (-1, 1):
        with pytest.raises(NotFoundError):
            plan.epoch(0).segments(batch)
    with pytest.raises(NotFoundError):
        plan.epoch(-1)


@pytest.mark.parametrize(
    "bad", [{"max_seq_len": 1}, {"max_seq_len": 2**21}, {"seed": -1}, {"split": "test"}, {"overflow": "wrap"}]
)
def test_impossible_parameters_are_refused(bad: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        make_plan([5], **bad)


def test_an_empty_split_has_no_batches() -> None:
    plan = make_plan([5, 6], split="validation")
    assert plan.epoch(0).n_batches == 0
    assert plan.epoch(0).n_tokens == 0


def best_fit_in_words(lengths: list[int], capacity: int, most_open: int) -> list[int]:
    """The rule of the design, read aloud: of the open bins that take an item the one with the least room, of several
    the oldest; the fullest is closed when there are too many."""
    room: dict[int, int] = {}
    out, n_bins = [], 0
    for length in lengths:
        fitting = [(free, b) for b, free in room.items() if free >= length]
        if fitting:
            free, b = min(fitting)
            del room[b]
        else:
            if len(room) == most_open:
                del room[min(room, key=lambda b: (room[b], b))]
            free, b, n_bins = capacity, n_bins, n_bins + 1
        if free > length:
            room[b] = free - length
        out.append(b)
    return out


@given(st.lists(st.integers(1, 50), max_size=300), st.integers(1, 6), st.integers(1, 9))
def test_best_fit_is_the_rule_of_the_design(lengths: list[int], most_open: int, piece: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_module, "OPEN_BINS", most_open)
        patch.setattr(plan_module, "_PIECE", piece)
        bin_of, n_bins = plan_module.best_fit(np.array(lengths, np.int64), 50)
    expected = best_fit_in_words(lengths, 50, most_open)
    assert bin_of.tolist() == expected
    assert n_bins == len(set(expected))


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 2**20)), min_size=1, max_size=200), st.integers(1, 5))
def test_balance_sorts_windows_by_cost_and_keeps_every_bin_whole(items: list[tuple[int, int]], window: int) -> None:
    """The longest samples that are allowed included: their squares must not overflow into another order."""
    used = sorted({b for b, _ in items})
    bins = [[i for i, (b, _) in enumerate(items) if b == wanted] for wanted in used]
    lengths = np.array([n for _, n in items], np.int64)
    expected: list[list[int]] = []
    for start in range(0, len(bins), window):
        expected += sorted(bins[start : start + window], key=lambda b: sum(int(lengths[i]) ** 2 for i in b))
    members = np.array([i for b in bins for i in b], np.intp)
    offsets = np.cumsum([0, *map(len, bins)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_module, "WINDOW_BINS", window)
        members, offsets = plan_module.balance(members, offsets, lengths)
    assert [members[a:b].tolist() for a, b in itertools.pairwise(offsets)] == expected


def test_a_plan_of_many_samples_takes_little_memory() -> None:
    """No Python object for each sample: 10 M of them must fit beside a training run."""
    n = 200_000
    index = make_index(np.random.default_rng(0).integers(2, 4000, n).tolist())
    tracemalloc.start()
    try:
        plan = Plan(index, NO_SPLIT, "m" * 64, PlanParameters())
        plan.epoch(0)
        kept, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 40 * n
    assert peak < 120 * n


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning")
def test_a_forked_child_may_plan_while_its_parent_does() -> None:
    """A lock held by a thread that does not exist in the child would never be free there."""
    plan = make_plan([5] * 100, max_seq_len=16)
    with plan._lock:
        child = os.fork()
        if child == 0:
            signal.alarm(10)
            os._exit(0 if plan.epoch(0).n_batches == 34 else 1)
        _, status = os.waitpid(child, 0)
    assert status == 0


BINS: list[list[tuple[int, int]]] = [
    [(3, 17), (9, 12), (7, 9), (6, 8), (0, 5)],
    [(5, 33), (1, 30)],
    [(8, 40), (12, 22), (2, 2)],
    [(4, 60), (11, 3)],
    [(14, 64)],
    [(10, 64)],
]
PLAN_ID = "220a5ba63b080a278f1b731048d85b2fef3ccfb40fdbdca9db2314588ec51c91"
