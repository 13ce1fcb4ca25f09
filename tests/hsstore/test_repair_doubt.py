"""A document that is whole and wrong is restored or left, and what speaks against it is never rebuilt from it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from hsstore import manifest, zarrmeta
from hsstore.cli import run
from hsstore.digest import decode_blocks, encode_blocks
from hsstore.places import open_place
from hsstore.records import LayoutRecord, ShardRecord, StoreHeader, canonical, load_sealed, sealed
from hsstore.repair import Repair
from hsstore.repairlog import Event, Options, Summary
from hsstore.verify import Verifier

FINAL = "arrays.zarr/hidden/final/c/0/0"


@pytest.fixture
def replica(store_path: Path, tmp_path: Path) -> Path:
    """A copy of `store_path`, made before a test damages that."""
    return Path(shutil.copytree(store_path, tmp_path / "replica"))


def contents(root: Path) -> dict[str, bytes]:
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


def heal(root: Path, *replicas: Path, dry_run: bool = False) -> tuple[Summary, list[Event]]:
    events: list[Event] = []
    repair = Repair(root, [open_place(r) for r in replicas], Options(dry_run=dry_run), tell=events.append)
    return repair.run(), events


def put(path: Path, data: bytes) -> None:
    path.unlink()
    path.write_bytes(data)


def _other_crcs(root: Path) -> str:
    path = root / "records/000000.json"
    record = load_sealed(path, ShardRecord)
    entry = record.files[FINAL]
    entry = replace(entry, crc32c_blocks=encode_blocks(decode_blocks(entry.crc32c_blocks) ^ 1))
    put(path, canonical(sealed(replace(record, files={**record.files, FINAL: entry}))))
    return "records/000000.json"


def _no_samples(root: Path) -> str:
    path = root / "records/000001.json"
    put(path, canonical(sealed(replace(load_sealed(path, ShardRecord), samples=()))))
    return "records/000001.json"


def _header(**changes: int) -> Callable[[Path], str]:
    def tamper(root: Path) -> str:
        put(root / "store.json", canonical(sealed(replace(load_sealed(root / "store.json", StoreHeader), **changes))))
        return "store.json"

    return tamper


def _first_shard(root: Path) -> str:
    path = root / "layouts/000000.json"
    put(path, canonical(sealed(replace(load_sealed(path, LayoutRecord), first_shard=7))))
    return "layouts/000000.json"


TAMPERED = {
    "crc32c": _other_crcs,
    "samples": _no_samples,
    "rows 0": _header(shard_rows=0),
    "rows 2^62": _header(shard_rows=1 << 62),
    "chunk 0": _header(chunk_rows=0),
    "rows doubled": _header(shard_rows=128),
    "first shard": _first_shard,
}


@pytest.mark.parametrize("kind", TAMPERED)
def test_a_document_with_other_contents_is_evidence_of_itself_only(store_path: Path, replica: Path, kind: str) -> None:
    """Without a replica nothing changes, with one the listed document comes back; a dry run says which."""
    whole = contents(store_path)
    name = TAMPERED[kind](store_path)
    tampered = contents(store_path)
    assert {n for n in whole if whole[n] != tampered[n]} == {name}
    assert heal(store_path, dry_run=True)[0].remaining > 0
    summary, events = heal(store_path)
    assert summary.remaining > 0
    assert name in {e.file for e in events if e.action == "lost"}
    assert contents(store_path) == tampered, events
    summary, events = heal(store_path, replica, dry_run=True)
    assert (summary.remaining, summary.documents_restored, summary.derived_rebuilt) == (0, 1, 0), events
    assert contents(store_path) == tampered
    summary, events = heal(store_path, replica)
    assert contents(store_path) == whole, events
    assert (summary.remaining, summary.documents_restored, summary.derived_rebuilt) == (0, 1, 0), events


def test_a_list_that_is_damaged_itself_is_no_evidence(store_path: Path) -> None:
    """A flipped digit beside a document's name, or the list of another store: both are rebuilt without a replica."""
    whole = contents(store_path)
    lines = whole["manifest.sha256"].decode().splitlines(keepends=True)
    at = next(i for i, line in enumerate(lines) if line.endswith("  store.json\n"))
    flipped = [*lines[:at], ("0" if lines[at][0] != "0" else "1") + lines[at][1:], *lines[at + 1 :]]
    foreign = [f"{'0123456789abcdef' * 4}{line[64:]}" for line in lines]
    for damaged in (flipped, foreign):
        put(store_path / "manifest.sha256", "".join(damaged).encode())
        assert heal(store_path)[0].remaining == 0
        assert contents(store_path) == whole


@pytest.mark.parametrize(
    ("source", "stray"), [("records/000000", "records/000099"), ("layouts/000000", "layouts/000001")]
)
def test_a_stray_document_is_named_with_the_command_that_removes_it(
    store_path: Path, replica: Path, capsys: pytest.CaptureFixture[str], source: str, stray: str
) -> None:
    """It is no lost shard: there is nothing to quarantine."""
    whole = contents(store_path)
    path = store_path / f"{stray}.json"
    shutil.copyfile(store_path / f"{source}.json", path)
    for options in (["--dry-run"], []):
        assert run(["repair", str(store_path), "--from", str(replica), *options]) == 3
        printed = capsys.readouterr()
        assert f"left: {stray}.json" in printed.out
        assert f"`rm {path}`" in printed.out
        assert "quarantine" not in printed.out + printed.err
    path.unlink()
    assert run(["repair", str(store_path)]) == 0
    assert contents(store_path) == whole


def _is_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _is_gone(path: Path) -> None:
    shutil.rmtree(path)


def _is_file(path: Path) -> None:
    shutil.rmtree(path)
    path.write_bytes(b"mine")


@pytest.mark.parametrize(
    ("name", "harm", "remains"),
    [
        *((name, _is_directory, True) for name in (FINAL, "records/000000.json", "store.json", "layouts/000000.json")),
        *((name, _is_directory, True) for name in ("manifest.json", "index/uid.npy", "arrays.zarr/zarr.json")),
        ("arrays.zarr/hidden/final/c", _is_file, True),
        ("records", _is_gone, False),
        ("layouts", _is_gone, False),
        ("index", _is_gone, False),
    ],
)
def test_a_dry_run_ends_as_the_real_one(
    store_path: Path, replica: Path, name: str, harm: Callable[[Path], None], remains: bool
) -> None:
    """What is in the way of a file is looked for; it is `left`, since a replica has the file."""
    harm(store_path / name)
    before = contents(store_path)
    dry, promised = heal(store_path, replica, dry_run=True)
    assert contents(store_path) == before
    real, done = heal(store_path, replica)
    assert (dry.remaining > 0) is (real.remaining > 0) is remains, (promised, done)
    if remains and harm is _is_directory:
        assert {e.action for e in promised if e.file == name} == {e.action for e in done if e.file == name} == {"left"}
    assert not list(store_path.rglob(".*.tmp"))
    assert remains or not [f for f in Verifier(store_path, "full").findings() if f.severity == "damage"]


def test_a_shard_that_no_layout_has_is_not_compiled_into_the_manifest(store_path: Path) -> None:
    """A record with the right number and hash, which nothing else knows."""
    whole = contents(store_path)
    header = manifest.load_header(store_path)
    record = manifest.load_record(store_path, header, 1)
    files = {zarrmeta.chunk_path(s, 99): record.files[zarrmeta.chunk_path(s, 1)] for s in header.arrays}
    path = store_path / "records/000099.json"
    path.write_bytes(canonical(sealed(replace(record, shard=99, files=files))))
    summary, events = heal(store_path)
    assert summary.remaining > 0
    assert [e.action for e in events if e.file == "records/000099.json"] == ["left"]
    path.unlink()
    assert contents(store_path) == whole
