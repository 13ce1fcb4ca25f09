from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hsstore import index
from hsstore.errors import NotFoundError
from hsstore.records import Split
from hsstore.store import Store
from tests.stores import Sample


def columns(n: int) -> index.Index:
    rng = np.random.default_rng(n)
    zeros = np.zeros(n, np.uint64)
    uid = rng.integers(0, 2**64, (n, 2), dtype=np.uint64)
    return index.Index(
        uid=uid, source_index=np.arange(n, dtype=np.uint64), shard=zeros, row=zeros, n_tokens=zeros + 5, flags=zeros
    )


def test_columns_on_disk_are_those_in_memory(shared_store: Store) -> None:
    for name in index.COLUMNS:
        on_disk = np.load(shared_store.root / "index" / f"{name}.npy", mmap_mode="r")
        np.testing.assert_array_equal(on_disk, getattr(shared_store.index, name))
        assert on_disk.dtype == np.uint64


def test_find_takes_source_index_uid_and_prefix(shared_store: Store, samples: list[Sample]) -> None:
    uid = samples[7].entry.uid
    for name in ("7", uid, uid[:8]):
        assert int(shared_store.index.source_index[shared_store.index.find(name)]) == 7


@pytest.mark.parametrize("bad", ["", "-1", "999", "abc", "../store.json", "f" * 32, "９", "1" * 400, "7\n"])
def test_find_refuses_everything_else(shared_store: Store, bad: str) -> None:
    with pytest.raises(NotFoundError):
        shared_store.index.find(bad)


@given(st.floats(0, 0.99), st.text(max_size=8))
def test_split_is_a_function_of_uid_and_salt(fraction: float, salt: str) -> None:
    """Order, growth and place must not move a sample to the other side."""
    whole, split = columns(500), Split(salt=salt, validation_fraction=fraction)
    sides = index.in_validation(whole, split)
    order = np.random.default_rng(0).permutation(500)[:200]
    part = dataclasses.replace(whole, uid=whole.uid[order], source_index=whole.source_index[:200])
    np.testing.assert_array_equal(index.in_validation(part, split), sides[order])


def test_split_has_about_the_share_asked_for() -> None:
    whole = columns(20000)
    share = index.in_validation(whole, Split(salt="hsstore", validation_fraction=0.05)).mean()
    other = index.in_validation(whole, Split(salt="other", validation_fraction=0.05))
    assert share == pytest.approx(0.05, abs=0.006)
    assert not np.array_equal(other, index.in_validation(whole, Split(salt="hsstore", validation_fraction=0.05)))


def test_split_vector_never_changes() -> None:
    """A store split last year must split alike today: these sides are part of format 1."""
    sides = index.in_validation(columns(64), Split(salt="hsstore", validation_fraction=0.25))
    assert "".join(str(int(x)) for x in sides) == SIDES


def test_members_partition_the_usable_samples() -> None:
    whole = columns(300)
    whole = dataclasses.replace(whole, flags=(np.arange(300) % 7 == 0).astype(np.uint64))
    split = Split(salt="s", validation_fraction=0.2)
    train, validation = index.members(whole, split, "train"), index.members(whole, split, "validation")
    assert sorted([*train, *validation]) == index.members(whole, split, "all").tolist()
    assert not set(train) & set(validation)
    assert all(i % 7 for i in train)


SIDES = "1000000000100000000001010100110000111001001100011110000001000001"
