"""Opening: fast where the derived files are proved, right in every case."""

from __future__ import annotations

import os
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest

from hsstore import index, manifest, paths, snapshot
from hsstore.errors import ConflictError, DamagedError, NotFoundError
from hsstore.quarantine import quarantine
from hsstore.snapshot import Snapshot
from hsstore.store import Store
from tests.stores import Sample, create, make_samples, make_store, stage


def state(root: Path) -> Snapshot:
    return snapshot.current(root, manifest.load_header(root))


def equal(a: Snapshot, b: Snapshot) -> None:
    assert (a.manifest_id, a.shards, a.n_bytes) == (b.manifest_id, b.shards, b.n_bytes)
    for name in index.COLUMNS:
        np.testing.assert_array_equal(getattr(a.index, name), getattr(b.index, name))


def compiled(root: Path) -> Snapshot:
    """The oracle: what the records say."""
    header = manifest.load_header(root)
    found = manifest.compile_manifest(header, manifest.load_records(root, header))
    return Snapshot(
        manifest_id=manifest.manifest_id(found),
        index=index.build(found),
        shards={s.shard: snapshot.ShardFiles(s.shard, s.n_rows, s.files) for s in found.shards},
        taken_from="records",
    )


def test_the_derived_files_give_what_the_records_give(store_path: Path) -> None:
    found = state(store_path)
    assert found.taken_from == "derived files"
    equal(found, compiled(store_path))


def test_opening_reads_no_record(store_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What makes it fast: the time must not grow with what the records hold."""
    monkeypatch.setattr(manifest, "load_record", lambda *_: pytest.fail("a record was read"))
    store = Store.open(store_path)
    assert store.totals.n_samples == 20
    assert store.sample(3, "hidden/final").nbytes > 0


DERIVED = ["manifest.json", "manifest.sha256", *(f"index/{name}.npy" for name in index.COLUMNS)]


@pytest.mark.parametrize("relative", DERIVED)
def test_any_flipped_byte_of_a_derived_file_changes_nothing(store_path: Path, relative: str) -> None:
    """Every 7th byte, each with another bit; the answer is always the records'."""
    expected, path = compiled(store_path), store_path / relative
    original = path.read_bytes()
    ways = {"derived files": 0, "records": 0}
    for at in range(0, len(original), max(7, len(original) // 60)):
        path.write_bytes(original[:at] + bytes([original[at] ^ 1 << at % 8]) + original[at + 1 :])
        found = state(store_path)
        ways[found.taken_from] += 1
        equal(found, expected)
    assert ways["records"] > 0
    assert relative == "manifest.sha256" or ways["derived files"] == 0


@pytest.mark.parametrize("relative", DERIVED)
@pytest.mark.parametrize("damage", ["missing", "empty", "cut", "directory"])
def test_any_lost_derived_file_changes_nothing(store_path: Path, relative: str, damage: str) -> None:
    expected, path = compiled(store_path), store_path / relative
    data = path.read_bytes()
    path.unlink()
    if damage == "directory":
        path.mkdir()
    elif damage != "missing":
        path.write_bytes(data[: len(data) // 2 if damage == "cut" else 0])
    found = state(store_path)
    assert found.taken_from == "records"
    equal(found, expected)


def copy_derived(source: Path, target: Path) -> None:
    for relative in DERIVED:
        shutil.copyfile(source / relative, target / relative)


def test_derived_files_of_another_store_are_not_believed(store_path: Path, tmp_path: Path) -> None:
    """All of them exchanged together fit each other, and even the shards' numbers; only store.json tells."""
    names = ("after_2", "after_3", "final")
    other = make_store(tmp_path / "other", make_samples([60, 50, 40, 50], seed=3, layers=names), shard_rows=128)
    assert list(other.state.shards) == list(state(store_path).shards)
    expected = compiled(store_path)
    copy_derived(other.root, store_path)
    found = state(store_path)
    assert found.taken_from == "records"
    equal(found, expected)


def test_a_manifest_that_knows_less_is_overtaken(tmp_path: Path, samples: list[Sample]) -> None:
    writer = create(tmp_path / "s", samples, shard_rows=256)
    assert len(writer.todo()) > 1
    for shard in writer.todo():
        assert stage(writer, shard, samples).commit() is not None
        found = state(writer.root)
        assert found.taken_from == "records"
        assert len(found.shards) == shard + 1
        writer.finish()
        again = state(writer.root)
        assert again.taken_from == "derived files"
        equal(again, found)
        equal(again, compiled(writer.root))


def test_a_manifest_that_knows_more_is_not_believed(tmp_path: Path, samples: list[Sample]) -> None:
    """A record that is gone is damage: opening what is left would silently be another store."""
    writer = create(tmp_path / "s", samples, shard_rows=256)
    for shard in writer.todo():
        assert stage(writer, shard, samples).commit() is not None
    writer.finish()
    paths.record(writer.root, 1).unlink()
    with pytest.raises(DamagedError, match=r"records/000001\.json is missing"):
        state(writer.root)
    (writer.root / paths.MANIFEST).write_bytes(b"{}")  # nothing is left that knows of it
    found = state(writer.root)
    assert found.taken_from == "records"
    assert 1 not in found.shards
    equal(found, compiled(writer.root))


def grown(root: Path, samples: list[Sample]) -> list[str]:
    """The manifest_ids of a store that grew by one shard at a time."""
    writer = create(root, samples, shard_rows=256)
    ids = []
    for shard in writer.todo():
        assert stage(writer, shard, samples).commit() is not None
        ids.append(writer.finish())
    return ids


def test_every_former_state_can_be_pinned(tmp_path: Path, samples: list[Sample]) -> None:
    ids = grown(tmp_path / "s", samples)
    assert len(set(ids)) == len(ids) >= 2
    n_before = 0
    for number, manifest_id in enumerate(ids):
        with Store.open(tmp_path / "s", manifest_id=manifest_id) as store:
            assert store.manifest_id == manifest.manifest_id(store.manifest) == manifest_id
            assert len(store.state.shards) == number + 1
            assert store.totals.n_samples > n_before
            n_before = store.totals.n_samples
            for i in range(len(store.index)):
                source = samples[int(store.index.source_index[i])]
                np.testing.assert_array_equal(store.input_ids(i), source.input_ids)
                np.testing.assert_array_equal(store.hidden(i, "final"), source.states["final"])


@pytest.mark.parametrize("how", ["unknown", "damaged", "foreign"])
def test_a_state_that_is_not_kept_is_refused(tmp_path: Path, samples: list[Sample], how: str) -> None:
    root = tmp_path / "s"
    first, last = grown(root, samples)[::-1][-1], grown(tmp_path / "other", make_samples([30, 40, 50], seed=5))[-1]
    kept = paths.kept_manifest(root, first)
    if how == "unknown":
        kept.unlink()
    elif how == "damaged":
        kept.unlink()
        kept.write_bytes(paths.kept_manifest(tmp_path / "other", last).read_bytes()[:-1])
    else:
        shutil.copyfile(paths.kept_manifest(tmp_path / "other", last), paths.kept_manifest(root, last))
        first = last
    with pytest.raises(DamagedError if how == "damaged" else ConflictError):
        Store.open(root, manifest_id=first)


@pytest.mark.parametrize("bad", ["", "../store", "0" * 64, "x" * 5000, "a/b", "\0"])
def test_what_is_no_manifest_id_is_refused(shared_store: Store, bad: str) -> None:
    with pytest.raises(ConflictError):
        Store.open(shared_store.root, manifest_id=bad)


def test_refresh_shows_new_commits_and_keeps_views(tmp_path: Path, samples: list[Sample]) -> None:
    writer = create(tmp_path / "s", samples, shard_rows=256)
    todo = writer.todo()
    stage(writer, todo[0], samples).commit()
    store = Store.open(tmp_path / "s")
    assert not store.refresh()
    view, rows, before = store.hidden(0, "final"), len(store.index), store.manifest_id
    copy = view.copy()
    stage(writer, todo[1], samples).commit()
    assert store.refresh()
    assert len(store.index) > rows
    assert store.manifest_id != before
    np.testing.assert_array_equal(view, copy)
    assert not store.refresh()
    writer.finish()
    assert not store.refresh(), "building the manifest commits nothing"
    equal(store.state, compiled(tmp_path / "s"))


def test_a_copy_in_another_process_sees_the_same_state(tmp_path: Path, samples: list[Sample]) -> None:
    """Pickled by a parent that opened between two commits, for which no manifest was ever built."""
    writer = create(tmp_path / "s", samples, shard_rows=256)
    todo = writer.todo()
    stage(writer, todo[0], samples).commit()
    store = Store.open(tmp_path / "s", backend="pread", max_maps=7)
    packed = pickle.dumps(store)
    stage(writer, todo[1], samples).commit()
    writer.finish()
    copy = pickle.loads(packed)  # noqa: S301
    equal(copy.state, store.state)
    assert copy._options == {"backend": "pread", "max_maps": 7}


def test_a_record_exchanged_under_an_open_store_is_refused(store_path: Path, tmp_path: Path) -> None:
    """Sound in itself, of the same store and shard: only the manifest says that it commits other files."""
    import dataclasses

    from hsstore.records import FileEntry, canonical, sealed

    store = Store.open(store_path)
    record, path = store.record(0), paths.record(store_path, 0)
    name, entry = next(iter(record.files.items()))
    other = FileEntry(bytes=entry.bytes, sha256="0" * 64, crc32c_blocks=entry.crc32c_blocks)
    os.chmod(path, 0o644)
    path.write_bytes(canonical(sealed(dataclasses.replace(record, files=record.files | {name: other}))))
    with pytest.raises(DamagedError, match="other files"):
        store.record(0)


def test_no_store_no_records(tmp_path: Path, store_path: Path) -> None:
    with pytest.raises(NotFoundError):
        Store.open(tmp_path / "none")
    shutil.rmtree(store_path / "records")
    with pytest.raises(DamagedError, match="records"):
        Store.open(store_path)


def test_a_quarantined_shard_is_not_there(tmp_path: Path, samples: list[Sample]) -> None:
    """At once, with the manifest that still names it; its record need not even be readable."""
    from hsstore.records import FORMAT, Tombstone, canonical, sealed

    grown(tmp_path / "s", samples)
    store = Store.open(tmp_path / "s")
    stone = Tombstone(
        format=FORMAT,
        store_uuid=store.header.uuid,
        shard=0,
        number=0,
        action="quarantine",
        reason="test",
        created="2026-01-01T00:00:00+00:00",
        writer={},
    )
    path = paths.tombstone(tmp_path / "s", 0, 0)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(canonical(sealed(stone)))
    paths.record(tmp_path / "s", 0).unlink()
    paths.record(tmp_path / "s", 0).write_bytes(b"{")
    found = state(tmp_path / "s")
    assert found.taken_from == "records"
    assert 0 not in found.shards
    assert not (found.index.shard == 0).any()
    assert store.refresh()
    assert 0 not in store.state.shards


def test_a_lost_record_is_not_passed_over(tmp_path: Path) -> None:
    """The manifest still names its shard: opening without it would be a smaller store that nobody asked for."""
    root = tmp_path / "s"
    make_store(root, make_samples([60, 20, 50, 40, 30]), shard_rows=64).close()
    record = root / "records" / "000001.json"
    data = record.read_bytes()
    record.unlink()
    for open_ in (Store.open, manifest.write):
        with pytest.raises(DamagedError, match=r"records/000001.json is missing.*hsstore quarantine .* --shard 1"):
            open_(root)
    record.write_bytes(data)
    assert len(Store.open(root).index) == 5
    record.unlink()
    quarantine(root, 1, "its record was lost")
    manifest.write(root)
    assert 1 not in Store.open(root).index.shard.tolist()


def test_a_store_that_grows_while_it_is_opened_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The names of the records are older than the manifest that is read after them."""
    root = tmp_path / "s"
    samples = make_samples([60, 20, 50, 40, 30])
    writer = create(root, samples, shard_rows=64)
    stage(writer, 0, samples).commit()
    real = snapshot.live_shards

    def then_more(*arguments: object) -> list[int]:
        found = real(*arguments)  # type: ignore[arg-type]
        if 1 in writer.todo():
            stage(writer, 1, samples).commit()
            writer.finish()
        return found

    monkeypatch.setattr(snapshot, "live_shards", then_more)
    assert set(Store.open(root).index.shard.tolist()) == {0}
