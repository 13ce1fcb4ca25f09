from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hsstore.errors import UsageError
from hsstore.layout import assign, choose_shape, layout_sha256, place, rows_in_use
from hsstore.records import SampleEntry

LENGTHS = st.lists(st.integers(1, 64), min_size=1, max_size=200)


@given(LENGTHS)
def test_samples_never_overlap_nor_cross_a_shard(lengths: list[int]) -> None:
    taken: dict[int, set[int]] = {}
    for length, spot in zip(lengths, place(lengths, 64), strict=True):
        rows = set(range(spot.row, spot.row + length))
        assert spot.row + length <= 64
        assert not rows & taken.setdefault(spot.shard, set())
        taken[spot.shard] |= rows
    assert sorted(taken) == list(range(len(taken)))


@given(LENGTHS)
def test_rows_of_a_shard_have_no_gap(lengths: list[int]) -> None:
    """A gap would be rows of a block that no sample owns and nobody could judge."""
    entries = [SampleEntry("0" * 32, i, 0, n) for i, n in enumerate(lengths)]
    for shard in assign(entries, 64):
        assert rows_in_use(shard) == sum(e.n_tokens for e in shard)
        assert [e.row for e in shard] == sorted(e.row for e in shard)


@given(LENGTHS)
def test_equal_input_gives_equal_layout(lengths: list[int]) -> None:
    entries = [SampleEntry(f"{i:032x}", i, 0, n) for i, n in enumerate(lengths)]
    shards = assign(entries, 64)
    assert assign(list(entries), 64) == shards
    assert layout_sha256(shards) == layout_sha256(assign(entries, 64))
    assert layout_sha256(shards) != layout_sha256(assign(entries, 128)) or len(shards) == 1


def test_waste_on_real_lengths_is_small() -> None:
    """0.1 % on log-normal conversation lengths; first fit in order would waste several times that."""
    import numpy as np

    lengths = np.clip(np.random.default_rng(1).lognormal(7.4, 0.8, 5000), 2, 16384).astype(int).tolist()
    spots = place(lengths, 65536)
    n_shards = 1 + max(s.shard for s in spots)
    assert sum(lengths) / ((n_shards - 16) * 65536) > 0.98


def test_a_sample_longer_than_a_shard_is_refused() -> None:
    with pytest.raises(UsageError, match="65 tokens"):
        place([3, 65], 64)


@pytest.mark.parametrize(("hidden_size", "expected"), [(7168, 65536), (576, 524288), (4096, 131072)])
def test_full_size_shards_are_half_to_one_gib(hidden_size: int, expected: int) -> None:
    shard_rows, chunk_rows = choose_shape(n_tokens=10**9, longest=8192, hidden_size=hidden_size)
    assert (shard_rows, chunk_rows) == (expected, 256)
    assert 2**29 < shard_rows * hidden_size * 2 <= 2**30


def test_small_data_gets_small_shards_that_hold_four_of_the_longest() -> None:
    assert choose_shape(n_tokens=8000, longest=300, hidden_size=576) == (2048, 256)
    with pytest.raises(UsageError, match="power of two"):
        choose_shape(n_tokens=10, longest=5, hidden_size=8, chunk_rows=100)
