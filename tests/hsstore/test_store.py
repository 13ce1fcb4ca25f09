from __future__ import annotations

import multiprocessing
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore
import zarr

from hsstore import zarrmeta
from hsstore.errors import DamagedError
from hsstore.store import Store
from tests.stores import Sample, create, stage


def test_plain_zarr_reads_the_same_values(shared_store: Store) -> None:
    group = zarr.open_group(shared_store.root / "arrays.zarr", mode="r")
    for spec in shared_store.header.arrays:
        array = group[spec.name]
        assert isinstance(array, zarr.Array)
        assert array.attrs["hsstore"] == {"logical_dtype": spec.logical_dtype}
        compare_all(shared_store, spec.name, lambda rows, array=array: np.asarray(array[rows]))  # type: ignore[misc]


def test_tensorstore_reads_the_same_values(shared_store: Store) -> None:
    for spec in shared_store.header.arrays:
        where = {"driver": "file", "path": str(shared_store.root / "arrays.zarr" / spec.name)}
        array = tensorstore.open({"driver": "zarr3", "kvstore": where}).result()
        compare_all(shared_store, spec.name, lambda rows, array=array: array[rows].read().result())  # type: ignore[misc]


def compare_all(store: Store, name: str, read: Any) -> None:
    n = 0
    for i in range(len(store.index)):
        first = int(store.index.shard[i]) * store.header.shard_rows + int(store.index.row[i])
        rows = read(slice(first, first + int(store.index.n_tokens[i])))
        assert rows.tobytes() == store.sample(i, name).tobytes()
        n += len(rows)
    assert n == store.manifest.n_tokens


def test_shard_files_are_raw_arrays_with_a_footer(shared_store: Store) -> None:
    """np.memmap is the reader of last resort: whatever happens to this project, the states stay readable."""
    spec = shared_store.header.array("hidden/final")
    path = shared_store.root / zarrmeta.chunk_path(spec, 0)
    record, header = shared_store.record(0), shared_store.header
    footer_bytes = 16 * (header.shard_rows // header.chunk_rows) + 4
    assert path.stat().st_size == zarrmeta.data_bytes(spec, record.n_rows, header.chunk_rows) + footer_bytes
    raw = np.memmap(path, np.uint16, "r")[: record.n_rows * header.capture.hidden_size]
    assert raw.tobytes() == shared_store.rows("hidden/final", 0, 0, record.n_rows).tobytes()


def test_rows_are_views_of_the_map(shared_store: Store) -> None:
    first, second = shared_store.hidden(0, "final"), shared_store.hidden(0, "final")
    assert np.shares_memory(first, second)
    assert not first.flags.writeable


def test_live_maps_are_capped_and_old_views_stay_valid(store_path: Path) -> None:
    store = Store(store_path, max_maps=2)
    views = [store.sample(0, spec.name) for spec in store.header.arrays]
    copies = [view.tobytes() for view in views]
    assert len(store._reader._maps) == 2
    store.close()
    assert [view.tobytes() for view in views] == copies


@pytest.mark.parametrize("new_size", [0, 100])
def test_a_truncated_file_is_an_error_not_a_sigbus(store_path: Path, new_size: int) -> None:
    store = Store.open(store_path)
    path = store_path / "arrays.zarr/hidden/final/c/0/0"
    os.chmod(path, 0o644)
    os.truncate(path, new_size)
    with pytest.raises(DamagedError, match=rf"has {new_size} bytes"):
        store.rows("hidden/final", 0, 0, 1)
    path.unlink()
    with pytest.raises(DamagedError, match="missing"):
        store.rows("hidden/final", 0, 0, 1)


def test_a_damaged_record_is_refused_where_it_is_needed(store_path: Path) -> None:
    """Its place among the others is known from the manifest; its checksums are its own."""
    record = store_path / "records/000000.json"
    os.chmod(record, 0o644)
    record.write_bytes(record.read_bytes().replace(b'"rms":', b'"rmz":', 1))
    store = Store.open(store_path)
    assert store.state.taken_from == "derived files"
    with pytest.raises(DamagedError, match=r"000000\.json"):
        store.block_crcs("hidden/final", 0)
    (store_path / "manifest.json").unlink()
    with pytest.raises(DamagedError, match=r"000000\.json"):
        Store.open(store_path)


def _read_all(store: Store) -> str:
    return "".join(store.sample(i, "hidden/final").hex() for i in range(len(store.index)))


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning")
def test_reading_in_child_processes(shared_store: Store, method: str) -> None:
    """DataLoader workers inherit (fork) or unpickle (spawn) the store of their parent."""
    expected = _read_all(shared_store)
    with multiprocessing.get_context(method).Pool(2) as pool:
        assert pool.map(_read_all, [shared_store] * 2) == [expected] * 2


def test_a_store_pickles_as_its_path(shared_store: Store) -> None:
    copy = pickle.loads(pickle.dumps(shared_store))  # noqa: S301
    assert copy.manifest_id == shared_store.manifest_id


def test_an_open_store_keeps_to_what_it_saw(tmp_path: Path, samples: list[Sample]) -> None:
    writer = create(tmp_path / "s", samples)
    before = Store.open(tmp_path / "s")
    stage(writer, 0, samples).commit()
    after = Store.open(tmp_path / "s")
    assert (len(before.index), before.manifest_id == after.manifest_id) == (0, False)
    assert len(after.index) > 0


def test_token_counts_are_over_trained_tokens(shared_store: Store, samples: list[Sample]) -> None:
    counts = shared_store.token_counts("all")
    expected = np.zeros(1000, np.int64)
    for s in samples:
        np.add.at(expected, s.input_ids[s.loss_mask != 0], 1)
    np.testing.assert_array_equal(counts, expected)
    both = shared_store.token_counts("train") + shared_store.token_counts("validation")
    np.testing.assert_array_equal(both, expected)
