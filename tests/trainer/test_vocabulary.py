"""The laws of the vocabulary maps, for any counts."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hsstore.errors import ConflictError, UsageError
from trainer.vocabulary import build_vocabulary, from_selected


@st.composite
def counts_and_size(draw: st.DrawFn) -> tuple[np.ndarray, int]:
    # Few distinct values, so that ties and never seen ids are the rule.
    counts = draw(st.lists(st.integers(0, 4), min_size=1, max_size=60))
    return np.array(counts, dtype=np.int64), draw(st.integers(1, len(counts)))


@given(counts_and_size())
def test_laws(case):
    """Any engine maps a draft id by `i + d2t[i]` and never looks at t2d: both must say the same set, in order."""
    counts, size = case
    vocabulary = build_vocabulary(counts, size)
    vocabulary.check()
    assert vocabulary.t2d.dtype == np.bool_
    assert vocabulary.d2t.dtype == np.int64
    assert int(vocabulary.t2d.sum()) == vocabulary.draft_size == size
    assert np.array_equal(np.flatnonzero(vocabulary.t2d), vocabulary.selected)
    assert (np.diff(vocabulary.d2t) >= 0).all()
    assert vocabulary.d2t[-1] + size - 1 < len(counts)


@given(counts_and_size())
def test_selects_by_count_then_by_lower_id(case):
    """Against the definition, spelled as a sort of pairs; unseen ids fill up from the lowest."""
    counts, size = case
    expected = sorted(sorted(range(len(counts)), key=lambda i: (-counts[i], i))[:size])
    vocabulary = build_vocabulary(counts, size)
    assert vocabulary.selected.tolist() == expected
    assert vocabulary.cover == pytest.approx(counts[expected].sum() / counts.sum() if counts.sum() else 0.0)


@given(counts_and_size(), st.integers(0, 10_000))
def test_digest_follows_the_maps(case, other):
    counts, size = case
    vocabulary = build_vocabulary(counts, size)
    assert build_vocabulary(counts * 3, size).digest == vocabulary.digest, "the same order is the same vocabulary"
    changed = np.random.default_rng(other).permutation(counts)
    again = build_vocabulary(changed, size)
    assert (again.digest == vocabulary.digest) == np.array_equal(again.d2t, vocabulary.d2t)


def test_digest_knows_the_verifier_vocabulary():
    assert from_selected(np.arange(4), 10, cover=1.0).digest != from_selected(np.arange(4), 11, cover=1.0).digest


@pytest.mark.parametrize("size", [None, 7])
def test_the_whole_vocabulary(size):
    vocabulary = build_vocabulary(np.array([0, 5, 0, 1, 1, 0, 9]), size)
    assert vocabulary.full
    assert vocabulary.t2d.all()
    assert not vocabulary.d2t.any()
    assert vocabulary.cover == 1.0


def test_a_known_case():
    """5 ids: two counted, the tie at one token goes to id 1, and ids 0 and 2 fill up."""
    vocabulary = build_vocabulary(np.array([0, 1, 0, 0, 7, 1]), 5)
    assert vocabulary.selected.tolist() == [0, 1, 2, 4, 5]
    assert vocabulary.d2t.tolist() == [0, 0, 0, 1, 1]
    assert build_vocabulary(np.array([0, 1, 0, 0, 7, 1]), 2).selected.tolist() == [1, 4]


@pytest.mark.parametrize("size", [0, -1, 7])
def test_sizes_that_do_not_fit(size):
    with pytest.raises(UsageError, match="does not fit the verifier's 6 tokens"):
        build_vocabulary(np.ones(6, dtype=np.int64), size)


@pytest.mark.parametrize("counts", [np.zeros((2, 2)), np.zeros(0), np.array([1, -1])])
def test_counts_that_are_none(counts):
    with pytest.raises(UsageError, match="token counts"):
        build_vocabulary(counts.astype(np.int64), 1)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"t2d": np.ones(10, dtype=np.bool_)}, "t2d selects 10 ids"),
        ({"d2t": np.array([1, 0, 3], dtype=np.int64)}, "d2t falls at draft id 1"),
        ({"d2t": np.array([1, 2, 8], dtype=np.int64)}, "outside the verifier's vocabulary"),
        ({"d2t": np.array([1, 2, 4], dtype=np.int64)}, "which t2d leaves out"),
        ({"digest": "0" * 64}, "digest"),
    ],
)
def test_each_broken_law_is_named(change, words):
    """A stale map trains without an error and serves nonsense."""
    vocabulary = from_selected(np.array([1, 3, 5]), 10, cover=1.0)
    with pytest.raises(ConflictError, match=words):
        dataclasses.replace(vocabulary, **change).check()
