from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hsstore import console, copying, durable, manifest, paths, zarrmeta
from hsstore.cli import run
from hsstore.copying import Copy, Event
from hsstore.errors import ConflictError, DamagedError, HsstoreError, NoSpaceError, NotFoundError, UsageError
from hsstore.places import LocalPlace, Piece, open_place
from hsstore.reading import RateLimit
from hsstore.records import Tombstone, canonical, sealed
from hsstore.store import Store
from hsstore.verify import Verifier
from hsstore.writer import StoreWriter
from tests.hsstore.conftest import LENGTHS
from tests.stores import Sample, create, input_summary, make_samples, make_store, stage


@pytest.fixture
def source(samples: list[Sample], tmp_path: Path) -> Path:
    """A complete store of 12 shards of 4 files."""
    make_store(tmp_path / "source", samples, shard_rows=64).close()
    assert len(os.listdir(tmp_path / "source" / paths.RECORDS)) >= 8
    return tmp_path / "source"


@pytest.fixture(autouse=True)
def loud() -> Iterator[None]:
    yield
    console.set_quiet(False)


def copy(source: object, destination: object, **options: Any) -> tuple[Copy, list[Event]]:
    work = Copy(open_place(str(source)), open_place(str(destination)), **options)
    return work, list(work.events())


def contents(root: Path) -> dict[str, bytes]:
    """Every file but what is in staging/, by path."""
    files = (p for p in root.rglob("*") if p.is_file() and p.relative_to(root).parts[0] != paths.STAGING)
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in files}


def damage_of(root: Path) -> list[str]:
    return [str(f) for f in Verifier(root, "full").findings() if f.severity == "damage"]


def shard_files(root: Path, shard: int) -> list[Path]:
    header = manifest.load_header(root)
    return [root / zarrmeta.chunk_path(spec, shard) for spec in header.arrays]


def change(path: Path, data: bytes) -> None:
    """Change a sealed file in place."""
    path.chmod(0o644)
    path.write_bytes(data)


def tombstone(root: Path, shard: int, number: int = 0, action: Any = "quarantine") -> None:
    header = manifest.load_header(root)
    stone = Tombstone(
        format=1,
        store_uuid=header.uuid,
        shard=shard,
        number=number,
        action=action,
        reason="test",
        created="",
        writer={},
    )
    durable.make_dirs(root / paths.TOMBSTONES)
    assert durable.write_new(paths.tombstone(root, shard, number), canonical(sealed(stone)))


@pytest.mark.parametrize("way", ["{tmp}/out", "memory://{id}/a", "memory://{id}"])
def test_there_and_back_is_the_same_store_to_the_byte(source: Path, tmp_path: Path, way: str) -> None:
    """Records keep their bytes, so the manifest_id is the same wherever the store lies; sealed files are read-only."""
    middle = way.format(tmp=tmp_path, id=uuid.uuid4())
    there, events = copy(source, middle)
    assert {e.kind for e in events} == {"copied"}
    back, _ = copy(middle, tmp_path / "back", jobs=4)
    for work in (there, back):
        summary = work.summary
        assert summary.manifest_id == summary.source_manifest_id == manifest.manifest_id(manifest.load(source))
        assert summary.copied == summary.shards >= 8
        assert summary.bytes == work.done_bytes == work.total_bytes > 0
    assert contents(tmp_path / "back") == contents(source)
    assert os.listdir(tmp_path / "back" / paths.STAGING) == []
    assert damage_of(tmp_path / "back") == []
    for path in shard_files(tmp_path / "back", 3):
        assert stat.S_IMODE(path.stat().st_mode) == 0o444


def test_the_states_are_those_of_the_samples(source: Path, samples: list[Sample], tmp_path: Path) -> None:
    copy(source, tmp_path / "out")
    with Store.open(tmp_path / "out") as store:
        for i, sample in enumerate(samples):
            assert (store.hidden(i, "final") == sample.states["final"]).all()


def test_what_is_committed_is_not_read_again(source: Path, tmp_path: Path) -> None:
    """A second run needs nothing of the source but its records."""
    copy(source, tmp_path / "out")
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "out").rglob("*")}
    shutil.rmtree(source / "arrays.zarr")
    work, events = copy(source, tmp_path / "out")
    assert (work.summary.copied, work.summary.already_there, events) == (0, work.summary.shards, [])
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "out").rglob("*") if p.name != paths.STAGING} == {
        p: t for p, t in before.items() if p.name != paths.STAGING
    }


class Stopped(Exception):
    pass


def stop_after(n: int, work: Copy) -> None:
    """Leave a copy after n shards, as Ctrl-C does."""
    events = work.events()
    for _ in range(n):
        next(events)
    with pytest.raises(Stopped):
        events.throw(Stopped())  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", ["local", "memory"])
def test_a_stopped_copy_is_a_store_and_is_resumed(source: Path, tmp_path: Path, kind: str) -> None:
    destination = str(tmp_path / "out") if kind == "local" else f"memory://{uuid.uuid4()}/x"
    stop_after(3, Copy(open_place(source), open_place(destination), jobs=1))
    if kind == "local":
        with Store.open(destination) as store:
            assert len(store.manifest.shards) >= 3
        assert damage_of(Path(destination)) == []
    work, _ = copy(destination, tmp_path / "partial")
    n = work.summary.copied
    assert 3 <= n < 8
    work, _ = copy(source, destination)
    assert work.summary.already_there == n
    assert work.summary.manifest_id == work.summary.source_manifest_id
    work, _ = copy(destination, tmp_path / "partial")
    assert work.summary.already_there == n
    assert contents(tmp_path / "partial") | kept(source) == contents(source) | kept(tmp_path / "partial")


def kept(root: Path) -> dict[str, bytes]:
    """Manifests of older states: a copy that stopped has one of its own."""
    return {path: data for path, data in contents(root).items() if path.startswith(f"{paths.MANIFESTS}/")}


def test_whole_staged_files_are_taken_over_and_others_replaced(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are hashed again: a staged file that is not what the record says is copied anew."""
    out = tmp_path / "out"
    written: list[str] = []
    real = LocalPlace.write_temporary

    def counted(self: LocalPlace, path: str, pieces: Any, n_bytes: int) -> Path:
        if len(written) == 2:
            raise Stopped
        temporary = real(self, path, pieces, n_bytes)
        written.append(path)
        return temporary

    monkeypatch.setattr(LocalPlace, "write_temporary", counted)
    with pytest.raises(Stopped):
        copy(source, out, jobs=1)
    assert sorted(p.relative_to(out).as_posix() for p in (out / paths.STAGING).rglob("hidden*")) == sorted(written)
    change(out / written[1], (out / written[1]).read_bytes()[::-1])
    (out / written[0]).with_name(".hidden.after_2.0123456789abcdef.tmp").write_bytes(b"half of a file")
    first, written = written, []
    monkeypatch.setattr(LocalPlace, "write_temporary", lambda *a: written.append(a[1]) or real(*a))
    work, _ = copy(source, out, jobs=1)
    assert first[0] not in written
    assert first[1] in written
    assert work.summary.manifest_id == work.summary.source_manifest_id
    assert damage_of(out) == []
    assert os.listdir(out / paths.STAGING) == []


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    change(path, bytes(data))


DAMAGES = {
    "SHA-256 differs": flipped,
    "bytes, its record says": lambda path: change(path, path.read_bytes()[:-1]),
    "missing": lambda path: path.unlink(),
    "no plain file": lambda path: (path.unlink(), path.mkdir()),
}


@pytest.mark.parametrize("words", DAMAGES)
@pytest.mark.parametrize("kind", ["local", "memory"])
def test_a_damaged_file_is_named_and_only_its_shard_left_out(
    source: Path, tmp_path: Path, kind: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit 3; and once the source is repaired the same command brings the rest."""
    victim = shard_files(source, 2)[1]
    good = victim.read_bytes()
    DAMAGES[words](victim)
    destination = str(tmp_path / "out") if kind == "local" else f"memory://{uuid.uuid4()}/x"
    assert run(["copy", str(source), destination]) == 3
    printed = capsys.readouterr()
    assert f"damaged: shard 2: {victim.relative_to(source)}" in printed.out
    assert words in printed.out
    assert "DIFFERENT" in printed.out
    assert "1 damaged, not copied" in printed.err
    work, _ = copy(destination, tmp_path / "check")
    assert work.summary.copied == len(os.listdir(source / paths.RECORDS)) - 1
    assert damage_of(tmp_path / "check") == []
    if victim.is_dir():
        victim.rmdir()
    change(victim, good) if victim.exists() else victim.write_bytes(good)
    assert run(["copy", str(source), destination]) == 0
    work, _ = copy(destination, tmp_path / "check")
    assert work.summary.manifest_id == manifest.manifest_id(manifest.load(source))


def test_a_damaged_record_is_named(source: Path, tmp_path: Path) -> None:
    flipped(paths.record(source, 4))
    work, events = copy(source, tmp_path / "out")
    assert [(e.shard, work.summary.damaged) for e in events if e.kind == "damaged"] == [(4, 1)]
    assert work.summary.copied == work.summary.shards - 1
    assert damage_of(tmp_path / "out") == []


def instead(path: Path, kind: str) -> None:
    """Something that is no plain file, or nothing, in the place of a file."""
    path.unlink()
    if kind == "directory":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "loop":
        path.symlink_to(path.name)
    elif kind == "endless":
        path.symlink_to("/dev/zero")


@pytest.mark.parametrize("kind", ["nothing", "directory", "fifo", "loop", "endless"])
def test_a_record_that_is_lost_is_named(source: Path, tmp_path: Path, kind: str) -> None:
    """The manifest names its shard: that it has no record is damage, whatever lies there, and the others arrive."""
    instead(paths.record(source, 4), kind)
    work, events = copy(source, tmp_path / "out")
    assert [(e.shard, work.summary.damaged) for e in events if e.kind == "damaged"] == [(4, 1)]
    assert work.summary.copied == work.summary.shards - 1
    assert run(["copy", str(source), str(tmp_path / "out"), "--json"]) == 3
    assert damage_of(tmp_path / "out") == []


@pytest.mark.parametrize("witness", ["both", paths.MANIFEST, paths.MANIFEST_SUMS, "none"])
def test_records_that_are_gone_altogether(source: Path, tmp_path: Path, witness: str) -> None:
    """An empty store with exit 0 would be the worst of all copies."""
    n_shards = len(os.listdir(source / paths.RECORDS))
    shutil.rmtree(source / paths.RECORDS)
    for name in (paths.MANIFEST, paths.MANIFEST_SUMS):
        if witness not in ("both", name):
            (source / name).unlink()
    _, events = copy(source, tmp_path / "out")
    named = [e.shard for e in events if e.kind == "damaged"]
    assert named == ([None] if witness == "none" else list(range(n_shards)))


@pytest.mark.parametrize("kind", ["directory", "fifo", "loop", "garbage"])
def test_a_tombstone_that_cannot_be_read_costs_its_shard(source: Path, tmp_path: Path, kind: str) -> None:
    """Whether the shard may be used is not known, so it stays behind; of the others it says nothing."""
    tombstone(source, 5)
    path = paths.tombstone(source, 5, 0)
    if kind == "garbage":
        flipped(path)
    else:
        instead(path, kind)
    work, events = copy(source, tmp_path / "out")
    assert [e.shard for e in events if e.kind == "damaged"] == [5]
    assert work.summary.copied == work.summary.shards - 1
    assert damage_of(tmp_path / "out") == []


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.EACCES])
def test_a_file_that_the_system_refuses_costs_its_shard(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    refused, real = shard_files(source, 2)[0], os.open

    def opened(path: Any, *arguments: Any, **options: Any) -> int:
        if str(path) == str(refused):
            raise OSError(code, os.strerror(code), str(path))
        return real(path, *arguments, **options)

    monkeypatch.setattr(os, "open", opened)
    instead(shard_files(source, 3)[0], "loop")
    work, events = copy(source, tmp_path / "out")
    assert sorted(e.shard or 0 for e in events if e.kind == "damaged") == [2, 3]
    assert work.summary.copied == work.summary.shards - 2
    assert damage_of(tmp_path / "out") == []


def test_too_few_descriptors_are_no_damage(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused, real = shard_files(source, 2)[0], os.open

    def opened(path: Any, *arguments: Any, **options: Any) -> int:
        if str(path) == str(refused):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return real(path, *arguments, **options)

    monkeypatch.setattr(os, "open", opened)
    with pytest.raises(HsstoreError, match="too many open files"):
        copy(source, tmp_path / "out")


def test_documents_that_make_no_sense_are_damage(source: Path, tmp_path: Path) -> None:
    """Their hashes are right: copied along, they would be trusted at the destination."""
    header = manifest.load_header(source)
    record = manifest.load_record(source, header, 3)
    change(paths.record(source, 3), canonical(sealed(dataclasses.replace(record, n_rows=10**30))))
    _, events = copy(source, tmp_path / "out")
    (found,) = [e for e in events if e.kind == "damaged"]
    assert found.shard == 3
    assert "rows, a shard of this store holds" in found.detail
    change(source / paths.HEADER, canonical(sealed(dataclasses.replace(header, chunk_rows=0))))
    with pytest.raises(DamagedError, match="in blocks of 0"):
        copy(source, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_a_source_that_cannot_be_trusted_at_all(source: Path, tmp_path: Path) -> None:
    flipped(paths.layout(source, 0))
    with pytest.raises(DamagedError, match=r"layouts/000000\.json"):
        copy(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(NotFoundError):
        copy(tmp_path / "nothing", tmp_path / "out")


def test_a_destination_that_gives_back_other_bytes(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that loses what it acknowledged shows at once, before the shard is committed."""
    real, out = LocalPlace.stream, tmp_path / "out"

    def lossy(self: LocalPlace, path: str, *arguments: Any, fresh: bool = False) -> Iterator[Piece]:
        for piece in real(self, path, *arguments, fresh=fresh):
            yield bytes(len(piece)) if fresh and "after_3" in path else piece

    monkeypatch.setattr(LocalPlace, "stream", lossy)
    with pytest.raises(DamagedError, match="does not read back as it was written"):
        copy(source, out)
    monkeypatch.undo()
    assert os.listdir(out / paths.RECORDS) == []
    assert damage_of(out) == []
    assert list(out.rglob("*.tmp")) == []
    work, _ = copy(source, out)
    assert work.summary.manifest_id == work.summary.source_manifest_id


def test_the_destination_is_read_past_the_page_cache(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    advice: list[int] = []
    real = os.posix_fadvise
    monkeypatch.setattr(os, "posix_fadvise", lambda *a: advice.append(a[3]) or real(*a))
    work, _ = copy(source, tmp_path / "out")
    n_files = 5 * work.summary.copied
    assert advice.count(os.POSIX_FADV_DONTNEED) == n_files


@pytest.mark.parametrize("kind", ["local", "memory"])
def test_another_store_is_never_mixed_in(source: Path, tmp_path: Path, kind: str) -> None:
    """Another uuid, a directory of something else: refused before a byte is written."""
    other = make_store(tmp_path / "other", make_samples([5, 6, 7], layers=("after_2", "final"))).root
    destination = str(other) if kind == "local" else f"memory://{uuid.uuid4()}/x"
    if kind == "memory":
        copy(other, destination)
    before = contents(other)
    with pytest.raises(ConflictError, match="is another store"):
        copy(source, destination)
    assert contents(other) == before
    plain = str(tmp_path / "plain") if kind == "local" else f"memory://{uuid.uuid4()}/x"
    place = open_place(plain)
    place.put("notes.txt", lambda: [b"mine"], 4)
    with pytest.raises(ConflictError, match="not empty and not a store"):
        copy(source, plain)
    assert place.names("") == ["notes.txt"]


def test_places_in_one_another(source: Path, tmp_path: Path) -> None:
    for destination in (source, source / "inside", source.parent, f"file://{source}"):
        with pytest.raises(UsageError, match="lie in one another"):
            copy(source, destination)
    with pytest.raises(UsageError, match="both source and destination"):
        copy("memory://x/y/", "memory://x/y")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConflictError):
        copy(source, tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


def test_an_empty_directory_is_filled_in_place(source: Path, small_disk: Path) -> None:
    """The root of a disk cannot be exchanged for another directory, and what is allowed there is not ours to change."""
    small_disk.chmod(0o2770)
    before = small_disk.stat()
    work, _ = copy(source, small_disk)
    assert work.summary.manifest_id == work.summary.source_manifest_id
    assert (small_disk.stat().st_ino, small_disk.stat().st_mode) == (before.st_ino, before.st_mode)
    assert contents(small_disk) == contents(source)


def test_a_stop_while_an_empty_directory_is_filled(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until store.json is there it is no store; the next run goes on, and nobody else's files are taken for that."""
    out, real, written = tmp_path / "out", LocalPlace.write_new, []

    def stopping(self: LocalPlace, path: str, data: bytes) -> bool:
        if len(written) == stop_at:
            raise Stopped
        written.append(path)
        return real(self, path, data)

    for stop_at in range(8):
        written.clear()
        out.mkdir()
        monkeypatch.setattr(LocalPlace, "write_new", stopping)
        with pytest.raises(Stopped):
            copy(source, out)
        monkeypatch.undo()
        assert not (out / paths.HEADER).exists()
        if stop_at == 7:
            (out / "notes.txt").write_text("mine")
            with pytest.raises(ConflictError, match="not empty and not a store"):
                copy(source, out)
            (out / "notes.txt").unlink()
        work, _ = copy(source, out)
        assert work.summary.manifest_id == work.summary.source_manifest_id
        assert damage_of(out) == []
        shutil.rmtree(out)


def test_replicas_that_went_different_ways(samples: list[Sample], tmp_path: Path) -> None:
    """Equal contents by another attempt are equal; other contents under one number are a conflict, not a mixture."""
    a, b = tmp_path / "a", tmp_path / "b"
    writer = create(a, samples, shard_rows=64)
    copy(a, b)
    twin = StoreWriter.open(b)
    assert stage(writer, 0, samples).commit()
    assert stage(twin, 0, samples).commit()
    assert paths.record(a, 0).read_bytes() != paths.record(b, 0).read_bytes()
    work, _ = copy(a, b)
    assert work.summary.already_there == 1
    assert work.summary.manifest_id == work.summary.source_manifest_id
    other = make_samples(LENGTHS, layers=("after_2", "after_3", "final"))
    for sample in other:
        sample.states["final"][:] += 1
    assert stage(writer, 1, samples).commit()
    assert stage(twin, 1, other).commit()
    with pytest.raises(ConflictError, match=r"other contents in 1 shards \(1\)"):
        copy(a, b)
    assert damage_of(b) == []


def test_a_store_that_grows_meanwhile(samples: list[Sample], tmp_path: Path) -> None:
    """The state at the start is copied, what came later is announced and comes with the next run."""
    writer = create(tmp_path / "a", samples, shard_rows=64)
    todo = writer.todo()
    for shard in todo[:4]:
        assert stage(writer, shard, samples).commit()
    work = Copy(open_place(tmp_path / "a"), open_place(tmp_path / "b"))
    events = work.events()
    seen = [next(events)]
    for shard in todo[4:6]:
        assert stage(writer, shard, samples).commit()
    seen += events
    assert [e.detail for e in seen if e.kind == "note"] == [
        "2 shards were committed at the source meanwhile; the same command copies them"
    ]
    assert work.summary.copied == 4
    assert work.summary.manifest_id == work.summary.source_manifest_id
    work, events = copy(tmp_path / "a", tmp_path / "b")  # type: ignore[assignment]
    assert (work.summary.copied, list(events)) == (2, [e for e in events if e.kind == "copied"])
    twin = StoreWriter.open(tmp_path / "b")
    assert twin.todo() == todo[6:]


def test_a_further_layout_travels(source: Path, samples: list[Sample], tmp_path: Path) -> None:
    """Growth of the source after a first copy: its layout, the Zarr shapes that follow, and its shards."""
    copy(source, tmp_path / "out")
    writer = StoreWriter.open(source)
    offset = writer.next_source_index()
    more = [
        type(s.entry)(s.entry.uid, s.entry.source_index + offset, 0, s.entry.n_tokens)
        for s in make_samples([9, 40, 17], seed=5, layers=("after_2", "after_3", "final"))
    ]
    writer.add_layout(more, input_summary(3), offset=offset)
    work, _ = copy(source, tmp_path / "out")
    assert work.summary.copied == 0
    header = manifest.load_header(tmp_path / "out")
    assert len(manifest.load_layouts(tmp_path / "out", header)) == 2
    writer.finish()
    assert {k: v for k, v in contents(tmp_path / "out").items() if "zarr.json" in k or "layouts/" in k} == {
        k: v for k, v in contents(source).items() if "zarr.json" in k or "layouts/" in k
    }
    assert damage_of(tmp_path / "out") == []


@pytest.mark.parametrize("kind", ["local", "memory"])
def test_tombstones_travel_and_quarantined_shards_do_not(source: Path, tmp_path: Path, kind: str) -> None:
    """Its files may be damaged and nobody may use them; released again, it is copied like any other."""
    destination = str(tmp_path / "out") if kind == "local" else f"memory://{uuid.uuid4()}/x"
    tombstone(source, 5)
    flipped(shard_files(source, 5)[0])
    work, events = copy(source, destination)
    assert work.summary.damaged == 0
    assert ["1 quarantined shard is left out" in e.detail for e in events if e.kind == "note"] == [True]
    assert work.summary.manifest_id == work.summary.source_manifest_id
    assert 5 not in [e.shard for e in events]
    flipped(shard_files(source, 5)[0])
    tombstone(source, 5, 1, "release")
    work, events = copy(source, destination)
    assert [e.shard for e in events if e.kind == "copied"] == [5]
    copy(destination, tmp_path / "check")
    assert contents(tmp_path / "check").keys() >= {"tombstones/000005.0.json", "tombstones/000005.1.json"}
    assert damage_of(tmp_path / "check") == []


def test_what_the_destination_quarantined_stays_so(source: Path, tmp_path: Path) -> None:
    copy(source, tmp_path / "out")
    tombstone(tmp_path / "out", 3)
    work, events = copy(source, tmp_path / "out")
    assert [(e.shard, "quarantined at the destination" in e.detail) for e in events if e.kind == "note"] == [(3, True)]
    assert work.summary.copied == 0


def test_older_manifests_travel(source: Path, tmp_path: Path) -> None:
    """Trainers have pinned the store by them. One that is not what its name says is damage, and stays behind."""
    old = b'{"an": "older one"}'
    name = f"{hashlib.sha256(old).hexdigest()}.json"
    (source / paths.MANIFESTS / name).write_bytes(old)
    (source / paths.MANIFESTS / f"{'0' * 64}.json").write_bytes(old)
    work, events = copy(source, tmp_path / "out")
    assert (tmp_path / "out" / paths.MANIFESTS / name).read_bytes() == old
    assert [f"{'0' * 64}" in e.detail for e in events if e.kind == "damaged"] == [True]
    assert work.summary.damaged == 1
    assert f"{'0' * 64}.json" not in os.listdir(tmp_path / "out" / paths.MANIFESTS)


def test_an_unpublished_shard_is_copied(samples: list[Sample], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Committed is committed, whatever name its files still have."""
    writer = create(tmp_path / "a", samples, shard_rows=64)
    with monkeypatch.context() as patched:
        patched.setattr("hsstore.staged.publish", lambda *_: None)
        assert stage(writer, 0, samples).commit()
    assert not shard_files(tmp_path / "a", 0)[0].exists()
    work, _ = copy(tmp_path / "a", tmp_path / "b")
    assert work.summary.copied == 1
    assert damage_of(tmp_path / "b") == []
    assert all(p.exists() for p in shard_files(tmp_path / "b", 0))


def test_a_plain_copy_that_was_cut_off_is_completed(source: Path, tmp_path: Path) -> None:
    """Files that came whole without their record are taken over, others are never written over."""
    out = tmp_path / "out"
    shutil.copytree(source, out)
    paths.record(out, 1).unlink()
    paths.record(out, 2).unlink()
    shard_files(out, 2)[0].unlink()
    before = [p.stat().st_ino for p in shard_files(out, 1)]
    work, _ = copy(source, out)
    assert work.summary.copied == 2
    assert [p.stat().st_ino for p in shard_files(out, 1)] == before
    assert damage_of(out) == []
    paths.record(out, 1).unlink()
    flipped(shard_files(out, 1)[0])
    with pytest.raises(DamagedError, match="no record names it"):
        copy(source, out)


def test_a_committed_shard_without_its_files_is_said(source: Path, tmp_path: Path) -> None:
    """A plain copy that brought the record and not all files: what is there is not read again, but it is looked at."""
    copy(source, tmp_path / "out")
    shard_files(tmp_path / "out", 1)[2].unlink()
    work, events = copy(source, tmp_path / "out")
    assert [(e.shard, "missing" in e.detail, "hsstore repair" in e.detail) for e in events] == [(1, True, True)]
    assert work.summary.damaged == 1


def test_what_others_brought_is_made_durable_before_it_is_rested_on(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`cp` syncs nothing: after our word that the copy is complete a power cut must not take back what it brought."""
    out, synced = tmp_path / "out", set()
    shutil.copytree(source, out)
    paths.record(out, 1).unlink()
    derived = (paths.STAGING, paths.INDEX, paths.MANIFESTS, paths.MANIFEST, paths.MANIFEST_SUMS)
    brought = {str(p) for p in out.rglob("*") if p.relative_to(out).parts[0] not in derived}
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: synced.add(os.readlink(f"/proc/self/fd/{fd}")) or real(fd))
    copy(source, out)
    assert len(brought) > 60
    assert brought - synced == set()
    assert str(out.parent) in synced


def test_two_copies_at_once_share_the_work(source: Path, tmp_path: Path) -> None:
    """By leases; both end well and with the same manifest."""
    results: list[Copy | BaseException] = []

    def one() -> None:
        try:
            results.append(copy(source, tmp_path / "out", jobs=2)[0])
        except BaseException as error:
            results.append(error)

    threads = [threading.Thread(target=one) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    done = [r for r in results if isinstance(r, Copy)]
    assert len(done) == 3, results
    assert {w.summary.manifest_id for w in done} == {manifest.manifest_id(manifest.load(source))}
    assert damage_of(tmp_path / "out") == []
    assert os.listdir(tmp_path / "out" / paths.STAGING) == []


def test_a_lease_that_was_lost_does_no_harm(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy that was stopped beyond its lease finds its shard committed and its staging gone: it goes on."""
    real, out, raced = LocalPlace.write_temporary, tmp_path / "out", []

    def overtaken(self: LocalPlace, path: str, pieces: Any, n_bytes: int) -> Path:
        if not raced:
            raced.append(path)
            for lease in (out / paths.STAGING).glob("*.lease"):
                lease.unlink()
            copy(source, out)
        return real(self, path, pieces, n_bytes)

    monkeypatch.setattr(LocalPlace, "write_temporary", overtaken)
    work, _ = copy(source, out, jobs=1)
    assert raced
    assert work.summary.manifest_id == work.summary.source_manifest_id
    assert damage_of(out) == []


@pytest.mark.parametrize("when", ["written", "read again"])
def test_a_copy_whose_half_file_was_swept_starts_that_shard_again(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Another one took its lease for dead and cleaned up, but has not committed: no damage, no error."""
    real, out, swept = LocalPlace.write_temporary, tmp_path / "out", []

    def sweeping(self: LocalPlace, path: str, pieces: Any, n_bytes: int) -> Path:
        temporary = real(self, path, pieces, n_bytes)
        if not swept and "after_3" in path:
            swept.append(temporary)
            if when == "written":
                temporary.unlink()
        return temporary

    def chmod(path: Any, mode: int) -> None:
        if when == "read again" and path in swept:
            path.unlink()
        real_chmod(path, mode)

    real_chmod = os.chmod
    monkeypatch.setattr(LocalPlace, "write_temporary", sweeping)
    monkeypatch.setattr(os, "chmod", chmod)
    work, _ = copy(source, out)
    assert swept
    assert work.summary.copied == work.summary.shards
    assert damage_of(out) == []


@pytest.mark.parametrize("looked_at", ["directory", "file"])
def test_a_copy_whose_staged_shard_goes_while_its_size_is_looked_at(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, looked_at: str
) -> None:
    """Another one commits and publishes it at that moment: what is gone takes no room, and the copy goes on."""
    out, gone = tmp_path / "out", []
    with monkeypatch.context() as patched:
        patched.setattr(os, "chmod", lambda *_: (_ for _ in ()).throw(Stopped()))  # one file is staged, not yet named
        with pytest.raises(Stopped):
            copy(source, out, jobs=1)
    (staged,) = (p for p in (out / paths.STAGING).iterdir() if p.is_dir())
    real_list, real_stat = os.listdir, os.stat

    def listdir(path: Any) -> list[str]:
        if not gone and path == staged and looked_at == "directory":
            gone.append(path)
            shutil.rmtree(path)
        return real_list(path)

    def stat_of(path: Any, **options: Any) -> os.stat_result:
        if not gone and isinstance(path, Path) and path.parent == staged and looked_at == "file":
            gone.append(path)
            shutil.rmtree(path.parent)
        return real_stat(path, **options)

    monkeypatch.setattr(os, "listdir", listdir)
    monkeypatch.setattr(os, "stat", stat_of)
    work, _ = copy(source, out, jobs=1)
    assert gone
    assert work.summary.copied == work.summary.shards
    assert damage_of(out) == []


def test_a_destination_that_is_removed_meanwhile(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that go again and again are an error in the end, not a loop."""
    real = LocalPlace.write_temporary

    def gone(self: LocalPlace, path: str, pieces: Any, n_bytes: int) -> Path:
        temporary = real(self, path, pieces, n_bytes)
        temporary.unlink()
        return temporary

    monkeypatch.setattr(LocalPlace, "write_temporary", gone)
    assert run(["copy", str(source), str(tmp_path / "out")]) == NotFoundError.exit_code


def test_the_rate_holds_for_every_byte_that_is_read(source: Path, tmp_path: Path) -> None:
    """Once at the source, once at the destination."""

    class Counting(RateLimit):
        n_bytes = 0

        def reserve(self, n_bytes: int) -> float:
            self.n_bytes += n_bytes
            return 0.0

    rate = Counting(1.0)
    work, _ = copy(source, tmp_path / "out", rate=rate, jobs=1)
    assert rate.n_bytes == 2 * work.summary.bytes


@pytest.mark.parametrize("at", [0, 1, 7, 30])
def test_a_disk_that_fills_up(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """NoSpace with exit 4, nothing half committed, and the same command completes once there is room."""
    real, calls, out = os.pwrite, [0], tmp_path / "out"

    def full(fd: int, data: Any, offset: int) -> int:
        calls[0] += 1
        if calls[0] > at:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", full)
    assert run(["copy", str(source), str(out), "--jobs", "1"]) == NoSpaceError.exit_code
    monkeypatch.undo()
    assert list(out.rglob("*.tmp")) == []
    assert damage_of(out) == []
    assert run(["copy", str(source), str(out)]) == 0
    assert contents(out) == contents(source)


def test_a_disk_that_is_too_small_is_refused_at_once(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Small:
        f_bavail, f_frsize = 10, 512

    monkeypatch.setattr(os, "statvfs", lambda _: Small())
    with pytest.raises(NoSpaceError, match="5,120 bytes free, the copy needs"):
        copy(source, tmp_path / "out")
    assert not (tmp_path / "out").exists(), "nothing is begun"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 1 MB."""
    at = tmp_path / "disk"
    at.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", at], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"no file system of its own may be mounted here: {made.stderr.strip()}")
    yield at
    subprocess.run(["umount", at], check=True)


def test_a_real_disk_that_fills_up(source: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another program takes the room while the copy runs."""
    out, ballast = small_disk / "out", small_disk / "ballast"
    ballast.write_bytes(b"")
    events = Copy(open_place(source), open_place(out), jobs=1).events()
    next(events)
    fill(ballast)
    with pytest.raises(OSError, match="No space left") as caught:
        list(events)
    assert caught.value.errno == errno.ENOSPC
    ballast.unlink()
    assert damage_of(out) == []
    assert run(["copy", str(source), str(out)]) == 0
    assert contents(out) == contents(source)


def fill(path: Path) -> None:
    room = os.statvfs(path)
    with contextlib.suppress(OSError), open(path, "wb", buffering=0) as file:  # the copy may take some of it meanwhile
        file.write(bytes(room.f_blocks * room.f_frsize))


@pytest.fixture
def in_memory(tmp_path: Path) -> Iterator[Path]:
    """A directory in memory where there is one: a killed process loses nothing that a disk would have to keep."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else tmp_path) as at:
        yield Path(at)


def test_a_copy_killed_at_any_step(in_memory: Path) -> None:
    """SIGKILL before every other write, fsync, link, rename, chmod, unlink, mkdir of a copy: whatever lies there opens
    and is sound, and the next run completes from it."""
    source = in_memory / "source"
    make_store(source, make_samples([40, 30, 50], layers=("after_2", "final")), shard_rows=64).close()
    done = subprocess.run(
        [sys.executable, "-m", "tests.hsstore.killed_copy", str(source), str(in_memory), "2"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stdout + done.stderr
    counts = json.loads(done.stdout)
    print(counts)
    assert counts["kills"] >= 100
    assert counts["without_store"] > 0
    assert counts["in_a_row"] >= 3
    assert counts["states"] >= 10, "kills all fell on one state"


def test_the_command_line(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "out")
    assert run(["copy", str(source), out, "--json", "--rate-limit", "1GB/s", "--jobs", "3"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    n = len(os.listdir(source / paths.RECORDS))
    assert [x["type"] for x in lines] == ["copied"] * n + ["summary"]
    assert sorted(x["shard"] for x in lines[:-1]) == list(range(n))
    assert lines[-1]["equal"]
    assert lines[-1]["manifest_id"] == lines[-1]["source_manifest_id"]
    assert run(["copy", str(source), out]) == 0
    assert lines[-1]["manifest_id"] in capsys.readouterr().out
    assert run(["copy", str(source), out, "--rate-limit", "fast"]) == 2
    assert run(["copy", str(source), "gopher://x"]) == 2
    assert run(["copy", str(tmp_path / "nothing"), out]) == 10


def test_ctrl_c_says_how_to_go_on(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(copying, "landing_at", interrupted)
    assert run(["copy", str(source), str(tmp_path / "out")]) == 130
    assert "to resume, run the same command again" in capsys.readouterr().err


@pytest.mark.parametrize("verb", [["verify", "manifest"], ["info"], ["ls"], ["manifest", "build"]])
def test_a_url_where_a_directory_is_wanted(verb: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*verb, "s3://bucket/a/store"]) == 2
    assert "`hsstore copy s3://bucket/a/store DIRECTORY`" in capsys.readouterr().err
