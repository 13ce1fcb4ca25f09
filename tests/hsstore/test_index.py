from __future__ import annotations

import dataclasses
import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hsstore import index
from hsstore.errors import DamagedError, NotFoundError
from hsstore.records import ManifestShard, SampleEntry, Split
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


def shard(number: int, *samples: tuple[int, int]) -> ManifestShard:
    """A shard of samples given as (source_index, flags); the row tells the copies apart."""
    entries = tuple(SampleEntry(f"{s:032x}", s, 10 * number, 5, flags) for s, flags in samples)
    return ManifestShard(shard=number, n_rows=5, samples=entries, files={})


def test_a_sample_in_several_shards_is_taken_once_where_it_has_states() -> None:
    """A failed sample is redone under a new shard number, and a released shard comes back beside its replacement."""
    found = index.of_shards([shard(7, (2, 0), (3, 1)), shard(4, (1, 1), (2, 0)), shard(9, (3, 1), (1, 0), (4, 0))])
    rows = list(zip(found.source_index.tolist(), found.shard.tolist(), found.flags.tolist(), strict=True))
    assert rows == [(1, 9, 0), (2, 4, 0), (3, 7, 1), (4, 9, 0)]
    assert found.uid_hex(3) == f"{4:032x}"
    assert found.row.tolist() == [90, 40, 70, 90]


@given(st.lists(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 1)), max_size=9), max_size=9))
def test_the_best_copy_of_each_sample_is_found(shards: list[list[tuple[int, int]]]) -> None:
    found = index.of_shards([shard(n, *dict(samples).items()) for n, samples in enumerate(shards)])
    copies: dict[int, list[tuple[int, int]]] = {}
    for n, samples in enumerate(shards):
        for source_index, flags in dict(samples).items():
            copies.setdefault(source_index, []).append((flags, n))
    expected = [(s, min(copies[s])[1], min(copies[s])[0]) for s in sorted(copies)]
    assert list(zip(found.source_index.tolist(), found.shard.tolist(), found.flags.tolist(), strict=True)) == expected


def test_decode_is_the_inverse_of_encode(shared_store: Store) -> None:
    again = index.decode(index.encode(shared_store.index))
    for name in index.COLUMNS:
        np.testing.assert_array_equal(getattr(again, name), getattr(shared_store.index, name))


@pytest.mark.parametrize("bad", [b"", b"\x93NUMPY", b"{}", "shape", "dtype", "object"])
def test_columns_that_do_not_fit_together_are_damage(shared_store: Store, bad: bytes | str) -> None:
    files = index.encode(shared_store.index)
    wrong = {"shape": np.zeros(3, "<u8"), "dtype": shared_store.index.row.astype("<u4"), "object": np.array([{}])}
    data = bad
    if isinstance(bad, str):
        buffer = io.BytesIO()
        np.save(buffer, wrong[bad], allow_pickle=True)
        data = buffer.getvalue()
    with pytest.raises(DamagedError):
        index.decode(files | {"row.npy": data})
