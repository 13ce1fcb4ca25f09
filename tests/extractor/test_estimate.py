"""Sizes before the work: whole blocks, a margin, only what is still to be done."""

from __future__ import annotations

from pathlib import Path

import pytest

from extractor import estimate
from hsstore.errors import NoSpaceError, UsageError
from hsstore.records import SampleEntry


def entries(*lengths: int) -> list[SampleEntry]:
    return [SampleEntry("0" * 32, i, 0, n) for i, n in enumerate(lengths)]


def test_sizes_of_the_origin_run() -> None:
    """4 states of width 7,168 are 57,344 bytes a token; ids and mask add 5."""
    assert estimate.bytes_per_token(("after_2", "after_30", "after_58", "final"), 7168) == 57_344 + 5


def test_whole_blocks_of_the_shards_that_are_left() -> None:
    shape = estimate.shape_of(entries(300, 200, 500), 8, 512)
    assert [len(s) for s in shape.shards.values()] == [2, 1]
    assert estimate.shard_bytes(shape, [0, 1], 10) == (512 + 512) * 10
    assert estimate.shard_bytes(shape, [1], 10) == 512 * 10
    assert estimate.needed_bytes(shape, [], 10) == 0
    assert estimate.needed_bytes(shape, [0], 10) > 512 * 10


def test_free_space_of_a_place_that_does_not_exist_yet(tmp_path: Path) -> None:
    assert estimate.free_bytes(tmp_path / "a" / "b") > 0
    estimate.refuse_if_full(tmp_path / "a", 1)
    with pytest.raises(NoSpaceError, match="need"):
        estimate.refuse_if_full(tmp_path / "a", 1 << 60)


def test_shard_rows_are_judged_before_a_verifier_is_loaded() -> None:
    with pytest.raises(UsageError, match="power of two and a multiple of 256, found 1000"):
        estimate.shape_of(entries(300), 8, 1000)
