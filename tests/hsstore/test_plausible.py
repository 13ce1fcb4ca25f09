"""Documents with a right hash that make no sense are damage with a reason; nothing that computes with them fails."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hsstore import manifest, paths, plausible
from hsstore.cli import run
from hsstore.errors import DamagedError
from hsstore.records import FileEntry, LayoutRecord, SampleEntry, ShardPlan, ShardRecord, StoreHeader, canonical, sealed
from hsstore.store import Store
from hsstore.verify import Verifier


def rewrite(path: Path, change: Callable[[Any], Any], load: Callable[[], Any]) -> None:
    document = sealed(change(load()))
    path.chmod(0o644)
    path.write_bytes(canonical(document))


def first_file(**changes: object) -> Callable[[ShardRecord], ShardRecord]:
    def change(record: ShardRecord) -> ShardRecord:
        name, entry = next(iter(record.files.items()))
        changed: FileEntry = dataclasses.replace(entry, **changes)  # type: ignore[arg-type]
        return dataclasses.replace(record, files=record.files | {name: changed})

    return change


def first_sample(**changes: object) -> Callable[[ShardRecord], ShardRecord]:
    def change(record: ShardRecord) -> ShardRecord:
        sample: SampleEntry = msgspec.structs.replace(record.samples[0], **changes)
        return dataclasses.replace(record, samples=(sample, *record.samples[1:]))

    return change


def of(**changes: object) -> Callable[[Any], Any]:
    return lambda document: dataclasses.replace(document, **changes)


def capture(**changes: object) -> Callable[[StoreHeader], StoreHeader]:
    return lambda header: dataclasses.replace(header, capture=dataclasses.replace(header.capture, **changes))  # type: ignore[arg-type]


RECORDS = [
    of(n_rows=0),
    of(n_rows=-5),
    of(n_rows=1 << 62),
    of(n_rows=1),
    of(attempt="../../other"),
    of(attempt=""),
    first_file(bytes=0),
    first_file(bytes=-1),
    first_file(sha256=""),
    first_file(sha256="A" * 64),
    first_file(crc32c_blocks="not base64!"),
    first_file(crc32c_blocks="AAA="),
    first_file(crc32c_blocks=""),
    first_sample(uid="x" * 32),
    first_sample(uid=""),
    first_sample(source_index=-1),
    first_sample(source_index=1 << 70),
    first_sample(row=-1),
    first_sample(row=1),
    first_sample(n_tokens=0),
    first_sample(n_tokens=1 << 64),
    first_sample(flags=-1),
]
HEADERS = [
    of(shard_rows=0),
    of(shard_rows=-16),
    of(shard_rows=1 << 60),
    of(chunk_rows=0),
    of(chunk_rows=7),
    of(arrays=()),
    capture(layers=("../../../etc/passwd", "final")),
    capture(layers=("after_2", "after_2", "final")),
    capture(layers=("after_2", "final")),
    capture(hidden_size=0),
    capture(hidden_size=1 << 80),
    capture(vocab_size=-1),
]
LAYOUTS = [
    of(first_shard=-1),
    of(first_shard=1 << 70),
    of(first_source_index=-3),
    of(n_samples=-1),
    of(n_tokens=1 << 90),
    of(shards=(ShardPlan(n_samples=-1, n_rows=5),)),
]


@pytest.mark.parametrize("number", range(len(RECORDS)))
def test_a_record_that_no_shard_can_have(store_path: Path, number: int) -> None:
    header = manifest.load_header(store_path)
    rewrite(paths.record(store_path, 0), RECORDS[number], lambda: manifest.load_record(store_path, header, 0))
    (found,) = [f for f in Verifier(store_path, "full").findings() if f.severity == "damage"]
    assert (found.kind, found.file, found.shard) == ("record", "records/000000.json", 0)
    assert "its rows cannot be judged" in found.detail


@pytest.mark.parametrize("number", range(len(HEADERS)))
def test_a_header_that_no_store_can_have(store_path: Path, number: int) -> None:
    rewrite(store_path / paths.HEADER, HEADERS[number], lambda: manifest.load_header(store_path))
    (found,) = [f for f in Verifier(store_path, "full").findings() if f.severity == "damage"]
    assert (found.kind, found.file) == ("record", "store.json")


@pytest.mark.parametrize("number", range(len(LAYOUTS)))
def test_a_layout_that_cannot_be(store_path: Path, number: int) -> None:
    header = manifest.load_header(store_path)
    rewrite(paths.layout(store_path, 0), LAYOUTS[number], lambda: manifest.load_layout(store_path, header, 0))
    found = [f for f in Verifier(store_path, "full").findings() if f.severity == "damage"]
    assert ("layout", "layouts/000000.json") in {(f.kind, f.file) for f in found}


def test_what_our_writer_writes_makes_sense(shared_store: Store) -> None:
    header = shared_store.header
    assert plausible.header(header) == ""
    layouts: list[LayoutRecord] = manifest.load_layouts(shared_store.root, header)
    assert [plausible.layout_record(x) for x in layouts] == [""]
    records = manifest.load_records(shared_store.root, header)
    assert [plausible.record(r, header) for r in records] == [""] * len(records)


@pytest.mark.parametrize(
    "change", [first_file(crc32c_blocks="!!!"), first_file(crc32c_blocks="AAAA"), of(n_rows=10**30)]
)
def test_a_reader_refuses_a_record_that_makes_no_sense(store_path: Path, change: Callable[[Any], Any]) -> None:
    """As damage that names the record, whoever asks for its checksums."""
    header = manifest.load_header(store_path)
    rewrite(paths.record(store_path, 0), change, lambda: manifest.load_record(store_path, header, 0))
    with Store.open(store_path) as store, pytest.raises(DamagedError, match=r"records/000000\.json"):
        store.block_crcs("hidden/final", 0)
    assert run(["subset", str(store_path), str(store_path.with_name("part")), "--limit", "3"]) == 3


@pytest.mark.parametrize("row_shape", [(10**18,), (-64,)])
def test_a_reader_refuses_arrays_that_make_no_sense(store_path: Path, row_shape: tuple[int, ...]) -> None:
    def change(header: StoreHeader) -> StoreHeader:
        first = dataclasses.replace(header.arrays[0], row_shape=row_shape)
        return dataclasses.replace(header, arrays=(first, *header.arrays[1:]))

    rewrite(store_path / paths.HEADER, change, lambda: manifest.load_header(store_path))
    with pytest.raises(DamagedError, match=r"store\.json has other arrays"):
        Store.open(store_path)


def test_a_reader_refuses_blocks_of_no_rows(store_path: Path) -> None:
    rewrite(store_path / paths.HEADER, of(chunk_rows=0), lambda: manifest.load_header(store_path))
    assert run(["subset", str(store_path), str(store_path.with_name("part")), "--limit", "3"]) == 3
    assert run(["info", str(store_path)]) == 3
