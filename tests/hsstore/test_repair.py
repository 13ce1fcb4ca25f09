"""Repair heals whatever some replica has, fetches nothing else, and never makes a store worse."""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from hsstore import manifest, paths, quarantine, zarrmeta
from hsstore.cli import cli, run
from hsstore.digest import decode_blocks, encode_blocks
from hsstore.errors import ConflictError, NotFoundError, UsageError
from hsstore.places import open_place
from hsstore.records import ShardRecord, canonical, load_sealed, sealed
from hsstore.repair import Repair
from hsstore.repairlog import Event, Options, Summary
from hsstore.replicas import open_replica
from hsstore.store import Store
from hsstore.verify import Verifier
from tests.stores import Sample, create, make_samples, make_store, stage

FINAL = "arrays.zarr/hidden/final/c/0/0"
IDS = "arrays.zarr/tokens/input_ids/c/1"


@pytest.fixture
def replica(store_path: Path, tmp_path: Path) -> Path:
    """A copy of `store_path`, made before a test damages that."""
    return Path(shutil.copytree(store_path, tmp_path / "replica"))


@pytest.fixture
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is made durable: for properties that do not ask for it, many times over."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


def contents(root: Path) -> dict[str, bytes]:
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


def damage(root: Path, depth: str = "full") -> set[str]:
    return {f.file for f in Verifier(root, "full" if depth == "full" else "quick").findings() if f.severity == "damage"}


def heal(root: Path, *replicas: Path, **options: object) -> tuple[Summary, list[Event]]:
    """One repair, looking at every byte unless the test says otherwise."""
    events: list[Event] = []
    chosen = Options(**{"full": True, **options})
    return Repair(root, [open_place(r) for r in replicas], chosen, tell=events.append).run(), events


def of(events: list[Event], action: str) -> list[Event]:
    return [e for e in events if e.action == action]


def write(path: Path, data: bytes) -> None:
    """Put bytes into the very file that is there: what a failing disk does, and what repair must not."""
    if path.exists():
        path.chmod(0o644)
    path.write_bytes(data)


def flip(path: Path, at: int, mask: int = 1) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= mask
    write(path, bytes(data))


# What a disk, a person or another store may do to one file. Each takes the file, its bytes and a number to choose by.
def _flip(path: Path, data: bytes, n: int) -> None:
    flip(path, n % len(data), 1 << n % 8)


def _truncate(path: Path, data: bytes, n: int) -> None:
    write(path, data[: n % len(data)])


def _append(path: Path, data: bytes, n: int) -> None:
    write(path, data + data[: 1 + n % 64])


def _zeros(path: Path, data: bytes, n: int) -> None:
    write(path, bytes(len(data)))


def _garbage(path: Path, data: bytes, n: int) -> None:
    write(path, b"\xff\xfe not of this store" * (1 + n % 9))


def _missing(path: Path, data: bytes, n: int) -> None:
    path.unlink()


def _neighbour(path: Path, data: bytes, n: int) -> None:
    others = sorted(p for p in path.parents[n % 3].rglob(path.name) if p != path and p.is_file())
    write(path, others[n % len(others)].read_bytes() if others else b"")


HARM: dict[str, Callable[[Path, bytes, int], None]] = {
    f.__name__: f for f in (_flip, _truncate, _append, _zeros, _garbage, _missing, _neighbour)
}
WITNESSES = {"layouts/000000.json", "records/000000.json", "records/000001.json", "manifest.sha256"}


@settings(deadline=None, max_examples=50, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_disjoint_damages_of_two_replicas_heal(
    no_waiting: None, shared_store: Store, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Whatever happened to either, as long as one of the two has each file: bit-equal bytes, the same manifest_id."""
    whole = contents(shared_store.root)
    both = tmp_path_factory.mktemp("both")
    sides = [Path(shutil.copytree(shared_store.root, both / name)) for name in ("ours", "theirs")]
    chosen = data.draw(st.lists(st.sampled_from(sorted(whole)), min_size=1, max_size=7, unique=True))
    ours = set()
    for name in chosen:
        side, kind, n = (
            data.draw(st.integers(0, 1)),
            data.draw(st.sampled_from(sorted(HARM))),
            data.draw(st.integers(0)),
        )
        # An older manifest that is gone is no damage: no record says that there was one.
        kind = "_flip" if name.startswith("manifests/") else kind
        HARM[kind](sides[side] / name, whole[name], n)
        ours |= {name} if side == 0 else set()
    # With all of these gone nothing would say which store this was.
    assume("store.json" not in ours or not ours >= WITNESSES)
    try:
        summary, events = heal(sides[0], sides[1])
        assert contents(sides[0]) == whole, events
        assert (summary.remaining, summary.lost) == (0, 0)
        assert summary.manifest_id == shared_store.manifest_id
        assert heal(sides[0])[0] == Summary(manifest_id=shared_store.manifest_id), "a second run has nothing to do"
    finally:
        shutil.rmtree(both)


@settings(deadline=None, max_examples=25, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_blocks_that_are_bad_at_different_places_heal(
    no_waiting: None, shared_store: Store, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """One file broken here and in both replicas, never in the same block everywhere."""
    both = tmp_path_factory.mktemp("both")
    sides = [Path(shutil.copytree(shared_store.root, both / str(i))) for i in range(3)]
    record, header = shared_store.record(0), shared_store.header
    block_bytes = header.chunk_rows * header.array("hidden/final").row_bytes
    n_blocks = -(-record.n_rows // header.chunk_rows)
    bad: list[set[int]] = [data.draw(st.sets(st.integers(0, n_blocks - 1))) for _ in range(3)]
    assume(not bad[0] & bad[1] & bad[2])
    try:
        for side, blocks in zip(sides, bad, strict=True):
            for block in blocks:
                flip(side / FINAL, block * block_bytes + 3)
        summary, _ = heal(*sides)
        assert contents(sides[0]) == contents(shared_store.root)
        assert summary.blocks_fetched == len(bad[0])
        assert summary.replica_faults == len(bad[0] & bad[1])
        assert summary.bytes_fetched == (len(bad[0]) + len(bad[0] & bad[1])) * block_bytes
    finally:
        shutil.rmtree(both)


@settings(deadline=None, max_examples=25, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_whatever_is_broken_on_both_sides_nothing_gets_worse(
    no_waiting: None, shared_store: Store, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Any damage anywhere, also twice the same: what was sound stays so, and the count of what remains is true."""
    whole = contents(shared_store.root)
    both = tmp_path_factory.mktemp("both")
    sides = [Path(shutil.copytree(shared_store.root, both / name)) for name in ("ours", "theirs")]
    some = st.lists(st.sampled_from(sorted(whole)), min_size=1, max_size=6, unique=True)
    for side in sides:
        for name in data.draw(some):
            HARM[data.draw(st.sampled_from(sorted(HARM)))](side / name, whole[name], data.draw(st.integers(0)))
    before, theirs = contents(sides[0]), contents(sides[1])
    try:
        with contextlib.suppress(ConflictError, NotFoundError):  # no replica is left: refused before anything is done
            summary, events = heal(sides[0], sides[1])
            assert summary.remaining == len(damage(sides[0])), events
        after = contents(sides[0])
        derived = {n for n in whole if n.startswith(("manifest", "index/"))}
        for name in whole:
            sound = before.get(name) == whole[name]
            assert (
                after.get(name) == whole[name]
                or (not sound and after.get(name) == before.get(name))
                or (not sound and name in derived)
            ), f"{name} got worse: {events}"
        assert contents(sides[1]) == theirs, "a replica is only read"
    finally:
        shutil.rmtree(both)


def test_only_the_bad_block_is_fetched_and_nobody_s_map_changes(store_path: Path, replica: Path) -> None:
    """A reader that has the damaged file mapped keeps it: a sealed inode is never written to."""
    whole = contents(store_path)
    flip(store_path / FINAL, 300)
    torn = (store_path / FINAL).read_bytes()
    with open(store_path / FINAL, "rb") as held:
        summary, [event] = heal(store_path, replica)
        assert held.read() == torn
        assert not os.path.samestat(os.fstat(held.fileno()), (store_path / FINAL).stat())
    assert contents(store_path) == whole
    assert (store_path / FINAL).stat().st_mode & 0o777 == 0o444
    assert (summary.blocks_fetched, summary.bytes_fetched) == (1, 16 * 16)
    assert (event.action, event.file, event.blocks, event.replicas) == ("republished", FINAL, 1, (str(replica),))


def test_what_needs_no_replica_is_rebuilt_without_one(store_path: Path) -> None:
    """zarr.json follows from the header, manifest and index from the records, a footer from the record."""
    whole = contents(store_path)
    footer_at = len(whole[FINAL]) - 7
    flip(store_path / FINAL, footer_at)
    write(store_path / IDS, whole[IDS] + b"more")
    derived = [n for n in whole if n.endswith("zarr.json") or n.startswith(("manifest", "index/"))]
    assert len(derived) > 12
    for i, name in enumerate(derived):
        if i % 2:
            (store_path / name).unlink()
        else:
            flip(store_path / name, 20)
    summary, events = heal(store_path)
    assert contents(store_path) == whole
    assert summary.files_republished == 2
    assert summary.bytes_fetched == summary.remaining == 0
    assert {e.file for e in of(events, "rebuilt")} == set(derived)


def test_swapped_files_go_back(store_path: Path, replica: Path) -> None:
    whole = contents(store_path)
    a, b = store_path / FINAL, store_path / "arrays.zarr/hidden/after_2/c/0/0"
    a.rename(store_path / "x")
    b.rename(a)
    (store_path / "x").rename(b)
    assert heal(store_path, replica)[0].files_republished == 2
    assert contents(store_path) == whole


def test_what_nobody_has_is_told_with_rows_and_samples(store_path: Path, replica: Path) -> None:
    """A file stays as it is when one of its blocks cannot be had: nothing but the recorded bytes gets its name."""
    for root in (store_path, replica):
        flip(root / FINAL, 300)
    flip(store_path / FINAL, 2000)
    flip(store_path / IDS, 0)
    before = contents(store_path)
    summary, events = heal(store_path, replica)
    [lost] = of(events, "lost")
    assert (lost.file, lost.shard, lost.rows) == (FINAL, 0, (16, 31))
    samples = Store.open(store_path).record(0).samples
    assert set(lost.samples) == {s for s in samples if s.row <= 31 and s.row + s.n_tokens > 16}
    assert (summary.lost, summary.remaining, summary.files_republished) == (1, 1, 1)
    after = contents(store_path)
    assert {n for n in before if before[n] != after[n]} == {IDS}


def test_the_rest_is_quarantined_on_request(store_path: Path, replica: Path, samples: list[Sample]) -> None:
    """Then the store is sound without that shard, and its samples wait for the next extraction."""
    for root in (store_path, replica):
        flip(root / FINAL, 300)
    summary, events = heal(store_path, replica, quarantine_rest=True)
    [event] = of(events, "quarantined")
    assert (event.shard, summary.quarantined, summary.remaining) == (0, 1, 0)
    assert FINAL in event.detail
    assert damage(store_path) == set()
    header = manifest.load_header(store_path)
    assert set(manifest.quarantined(manifest.load_tombstones(store_path, header))) == {0}
    with Store.open(store_path) as store:
        assert {int(s) for s in store.index.shard} == {1}
        assert store.manifest_id == summary.manifest_id


def test_a_record_that_nobody_has_can_be_quarantined_too(store_path: Path) -> None:
    write(store_path / "records/000000.json", b"{}")
    summary, events = heal(store_path)
    assert (summary.lost, summary.remaining) == (1, 1)
    assert [e.shard for e in of(events, "lost")] == [0]
    summary, _ = heal(store_path, quarantine_rest=True)
    assert (summary.quarantined, summary.remaining) == (1, 0)
    assert damage(store_path) == set()


def test_a_dry_run_changes_nothing_and_says_what_it_would_do(store_path: Path, replica: Path) -> None:
    flip(store_path / FINAL, 300)
    (store_path / IDS).unlink()
    (store_path / "records/000001.json").rename(store_path / "records/000001.json.away")
    flip(store_path / "index/row.npy", 200)
    before = contents(store_path), contents(replica)
    summary, events = heal(store_path, replica, dry_run=True)
    assert (contents(store_path), contents(replica)) == before
    assert [e.file for e in of(events, "republished")] == [FINAL]
    assert [e.file for e in of(events, "restored")] == ["records/000001.json"]
    assert (summary.blocks_fetched, summary.bytes_fetched) == (1, 0)
    (store_path / "records/000001.json.away").rename(store_path / "records/000001.json")
    summary, events = heal(store_path, dry_run=True)
    assert {e.file for e in of(events, "lost")} == {FINAL, IDS}
    assert (summary.remaining, summary.files_republished) == (2, 0)
    assert not list((store_path / "staging").iterdir())


def test_another_store_is_refused_by_name(store_path: Path, tmp_path: Path, samples: list[Sample]) -> None:
    """The same samples extracted again are another store, however alike: their uuid differs."""
    make_store(tmp_path / "other", samples).close()
    flip(store_path / FINAL, 300)
    before = contents(store_path)
    with pytest.raises(ConflictError, match=f"{tmp_path / 'other'} is no replica"):
        heal(store_path, tmp_path / "other")
    with pytest.raises(NotFoundError, match="nowhere"):
        heal(store_path, tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(NotFoundError, match="is not a store"):
        heal(store_path, tmp_path / "empty")
    with pytest.raises(UsageError, match="is the store that is repaired"):
        open_replica(str(store_path / "records" / ".."), store_path, uuid=None, token=None)
    assert contents(store_path) == before


@pytest.mark.parametrize(
    "gone", ["records", "layouts", "index", "arrays.zarr/hidden/final", "arrays.zarr", "manifests"]
)
def test_whole_directories_come_back(store_path: Path, replica: Path, gone: str) -> None:
    whole = contents(store_path)
    shutil.rmtree(store_path / gone)
    if gone == "manifests":
        flip(store_path / "manifest.json", 5)
    heal(store_path, replica)
    assert contents(store_path) == whole


def test_a_refused_replica_does_not_keep_another_from_helping(
    store_path: Path, replica: Path, tmp_path: Path, samples: list[Sample]
) -> None:
    make_store(tmp_path / "other", samples).close()
    flip(store_path / FINAL, 300)
    summary, events = heal(store_path, tmp_path / "other", replica)
    assert [e.replicas for e in of(events, "refused")] == [(str(tmp_path / "other"),)]
    assert (summary.replicas_refused, summary.remaining) == (1, 0)
    assert damage(store_path) == set()


def diverge(root: Path, shard: int) -> None:
    """Make a shard of a copy one of other content, committed properly: the copy went its own way."""
    header = manifest.load_header(root)
    path = paths.record(root, shard)
    record = load_sealed(path, ShardRecord)
    files = dict(record.files)
    for spec in header.arrays:
        name = zarrmeta.chunk_path(spec, shard)
        if name.startswith("arrays.zarr/hidden"):
            other = encode_blocks(decode_blocks(files[name].crc32c_blocks) ^ 1)
            files[name] = replace(files[name], sha256="f" * 64, crc32c_blocks=other)
    write(path, canonical(sealed(replace(record, files=files, attempt="other"))))


def test_a_shard_of_other_content_is_refused_by_name(store_path: Path, replica: Path) -> None:
    """A copy of the store that was extracted further on its own has its own shards under the same numbers."""
    diverge(replica, 0)
    flip(store_path / FINAL, 300)
    flip(store_path / IDS, 3)
    summary, events = heal(store_path, replica)
    [refused] = of(events, "refused")
    assert str(replica) in refused.detail
    assert "other content in shard 0" in refused.detail
    assert {e.file for e in of(events, "lost")} == {FINAL}
    assert summary.files_republished == 1, "shard 1 is the same in both"


@pytest.mark.parametrize("sums", ["here", "gone"])
def test_a_record_of_other_content_is_not_taken(store_path: Path, replica: Path, sums: str) -> None:
    diverge(replica, 0)
    write(store_path / "records/000000.json", b"{}")
    if sums == "gone":
        (store_path / "manifest.sha256").unlink()
        (store_path / "manifest.json").unlink()
    summary, events = heal(store_path, replica)
    [lost] = of(events, "lost")
    assert lost.file == "records/000000.json"
    assert "other content" in lost.detail
    assert summary.documents_restored == 0
    assert (store_path / "records/000000.json").read_bytes() == b"{}"


def test_a_header_is_taken_only_where_something_here_knows_it(store_path: Path, replica: Path, tmp_path: Path) -> None:
    whole = contents(store_path)
    (store_path / "store.json").unlink()
    for name in ("layouts/000000.json", "records/000000.json", "records/000001.json"):
        write(store_path / name, b"")
    sums = (store_path / "manifest.sha256").read_bytes()
    (store_path / "manifest.sha256").unlink()
    summary, events = heal(store_path, replica)
    assert summary.remaining == 1
    assert "cannot be compared" in of(events, "lost")[0].detail
    (store_path / "manifest.sha256").write_bytes(sums)
    heal(store_path, replica)
    assert contents(store_path) == whole


def test_a_foreign_header_is_replaced(store_path: Path, replica: Path, tmp_path: Path, samples: list[Sample]) -> None:
    """The header of another store is whole, and yet every record here says that it is not this one's."""
    make_store(tmp_path / "other", samples).close()
    whole = contents(store_path)
    write(store_path / "store.json", (tmp_path / "other/store.json").read_bytes())
    heal(store_path, replica)
    assert contents(store_path) == whole


def test_a_tombstone_comes_back_before_the_manifest_is_rebuilt(store_path: Path, tmp_path: Path) -> None:
    """Without it the shard would silently be in use again."""
    quarantine.quarantine(store_path, 1, "a test says so")
    manifest.write(store_path)
    whole = contents(store_path)
    replica = Path(shutil.copytree(store_path, tmp_path / "replica"))
    (store_path / "tombstones/000001.0.json").unlink()
    flip(store_path / "index/row.npy", 200)
    summary, _ = heal(store_path)
    assert summary.remaining > 0
    assert (store_path / "manifest.json").read_bytes() == whole["manifest.json"]
    heal(store_path, replica)
    assert contents(store_path) == whole
    flip(store_path / "tombstones/000001.0.json", 9)
    heal(store_path, replica)
    assert contents(store_path) == whole


def test_an_open_shard_is_not_damage(tmp_path: Path, samples: list[Sample]) -> None:
    """A replica that is further must not decide what this store commits: `hsstore copy` brings more shards."""
    make_store(tmp_path / "whole", samples).close()
    shutil.copytree(tmp_path / "whole", tmp_path / "part")
    part = tmp_path / "part"
    # A manifest that has the shard would say that its record was lost.
    for path in [*part.rglob("c/1"), part / "records/000001.json", part / "manifest.json", part / "manifest.sha256"]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    manifest.write(part)
    before = contents(part)
    summary, events = heal(part, tmp_path / "whole")
    assert events == []
    assert (summary.remaining, contents(part)) == (0, before)


def test_a_lost_record_is_known_by_the_files_of_its_shard(store_path: Path, replica: Path) -> None:
    whole = contents(store_path)
    for name in ("records/000001.json", "manifest.json", "manifest.sha256"):
        (store_path / name).unlink()
    summary, _ = heal(store_path, replica)
    assert summary.documents_restored == 1
    assert contents(store_path) == whole


def test_the_staged_name_of_a_committed_shard_is_as_good(
    tmp_path: Path, samples: list[Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Committed and not published: good blocks are taken from staging, and the file appears under its final name."""
    writer = create(tmp_path / "s", samples)
    for shard in writer.todo():
        stage(writer, shard, samples).commit()
    writer.finish()
    replica = Path(shutil.copytree(tmp_path / "s", tmp_path / "replica"))
    record = manifest.load_record(tmp_path / "s", writer.header, 0)
    staged = paths.staging(tmp_path / "s", 0, record.attempt)
    staged.mkdir()
    shutil.move(tmp_path / "s" / FINAL, staged / "hidden.final")
    flip(staged / "hidden.final", 300)
    summary, _ = heal(tmp_path / "s", replica)
    assert (summary.blocks_fetched, summary.files_republished) == (1, 1)
    assert (tmp_path / "s" / FINAL).read_bytes() == (replica / FINAL).read_bytes()


def test_a_medium_that_gives_errors_is_a_bad_block(
    store_path: Path, replica: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, real, failed = contents(store_path), os.pread, []
    dying = (store_path / FINAL).stat()

    def pread(fd: int, n: int, offset: int) -> bytes:
        if os.path.samestat(os.fstat(fd), dying) and offset <= 600 < offset + n:
            failed.append(offset)
            raise OSError(errno.EIO, "Input/output error")
        return real(fd, n, offset)

    monkeypatch.setattr(os, "pread", pread)
    summary, _ = heal(store_path, replica, full=False, suspects=frozenset({FINAL}))
    assert failed
    assert summary.blocks_fetched == 1
    assert contents(store_path) == whole


@pytest.mark.parametrize("name", [FINAL, "records/000000.json", "index/row.npy", "store.json"])
def test_a_directory_in_the_way_is_told_and_left(store_path: Path, replica: Path, name: str) -> None:
    """Nothing that somebody may have put there is removed."""
    (store_path / name).unlink()
    (store_path / name).mkdir()
    (store_path / name / "precious").write_text("mine")
    summary, _ = heal(store_path, replica)
    assert summary.remaining > 0
    assert (store_path / name / "precious").read_text() == "mine"


def test_unknown_files_are_left_and_told(store_path: Path, replica: Path) -> None:
    (store_path / "notes.txt").write_text("mine")
    summary, events = heal(store_path, replica)
    assert [(e.action, e.file) for e in events] == [("left", "notes.txt")]
    assert summary.remaining == 1


def test_a_full_disk_leaves_the_damaged_file(store_path: Path, replica: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flip(store_path / FINAL, 300)
    before = contents(store_path)

    def full(fd: int, data: memoryview, offset: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("hsstore.durable.pwrite_all", full)
        assert run(["repair", str(store_path), "--from", str(replica), "--full"]) == 4
    assert contents(store_path) == before, "also nothing in staging/"
    assert run(["repair", str(store_path), "--from", str(replica), "--full"]) == 0


def test_a_kept_manifest_is_known_by_its_name(store_path: Path, replica: Path) -> None:
    older = store_path / "manifests" / f"{'0' * 64}.json"
    write(older, b"not that")
    [kept] = (replica / "manifests").iterdir()
    flip(store_path / "manifests" / kept.name, 5)
    _, events = heal(store_path, replica)
    assert (store_path / "manifests" / kept.name).read_bytes() == kept.read_bytes()
    assert [e.file for e in of(events, "left")] == [f"manifests/{older.name}"]


# What a kill may interrupt: every call of repair that changes something on the disk.
STEPS = ("pwrite", "fsync", "rename", "link", "unlink", "mkdir", "rmdir", "chmod", "replace")


def killed_at(step: int, body: Callable[[], None]) -> bool:
    """Run `body` in a child that is killed before its n-th change of the disk. False when it came to its end."""
    pid = os.fork()
    if pid == 0:
        count = 0

        def dying(real: Callable[..., object]) -> Callable[..., object]:
            def call(*args: object, **kwargs: object) -> object:
                nonlocal count
                count += 1
                if count == step:
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(*args, **kwargs)

            return call

        for name in STEPS:
            setattr(os, name, dying(getattr(os, name)))
        with contextlib.suppress(BaseException):
            body()
            os._exit(0)
        os._exit(1)
    status = os.waitpid(pid, 0)[1]
    assert os.WIFSIGNALED(status) or os.waitstatus_to_exitcode(status) == 0
    return os.WIFSIGNALED(status)


def test_killed_at_any_step_the_store_is_no_worse(store_path: Path, replica: Path, tmp_path: Path) -> None:
    """kill -9 before every single change of the disk: nothing sound breaks, and the next run completes."""
    whole = contents(store_path)
    flip(store_path / FINAL, 300)
    (store_path / IDS).unlink()
    write(store_path / "records/000001.json", b"")
    flip(store_path / "index/row.npy", 200)
    before, kills, step = {n for n in whole if contents(store_path).get(n) != whole[n]}, 0, 1
    while True:
        ours = Path(shutil.copytree(store_path, tmp_path / "ours"))
        if not killed_at(step, functools.partial(heal, ours, replica)):
            break
        kills += 1
        now = contents(ours)
        assert {n for n in whole if now.get(n) != whole[n]} <= before, f"step {step} broke something"
        summary, _ = heal(ours, replica)
        assert summary.remaining == 0
        left = contents(ours)
        assert {n: left[n] for n in whole} == whole
        assert all(n.startswith("staging/repair.") or n.endswith(".tmp") for n in left.keys() - whole.keys())
        shutil.rmtree(ours)
        step += 1
    assert kills > 30


def test_two_repairs_at_once_do_no_harm(store_path: Path, replica: Path) -> None:
    whole = contents(store_path)
    for name in (FINAL, IDS):
        flip(store_path / name, 30)
    write(store_path / "records/000000.json", b"")
    children = []
    for _ in range(4):
        pid = os.fork()
        if pid == 0:
            with contextlib.suppress(BaseException):
                os._exit(heal(store_path, replica)[0].lost)
            os._exit(99)
        children.append(pid)
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children] == [0] * 4
    assert contents(store_path) == whole


# The command.


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """A store whose hidden files are too large for a quick verification to read their blocks."""
    make_store(tmp_path / "large", make_samples([700, 900], hidden_size=256), chunk_rows=256).close()
    shutil.copytree(tmp_path / "large", tmp_path / "replica")
    return tmp_path / "large"


def test_findings_of_an_earlier_verification_are_not_looked_for_again(large: Path, tmp_path: Path) -> None:
    """5 TB are read once: what `verify --full --json` printed is enough, and quick alone does not see it."""
    whole = contents(large)
    flip(large / FINAL, 300_000)
    runner, replica = CliRunner(env={"HSSTORE_STATE_DIR": str(tmp_path / "elsewhere")}), str(tmp_path / "replica")
    found = runner.invoke(cli, ["verify", "manifest", str(large), "--full", "--json"]).stdout
    shutil.rmtree(tmp_path / "elsewhere")
    result = runner.invoke(cli, ["repair", str(large), "--from", replica, "--json"])
    assert json.loads(result.stdout.splitlines()[-1])["files_examined"] == 0, "quick does not see it"
    args = ["repair", str(large), "--from", replica, "--json", "--findings", "-"]
    result = runner.invoke(cli, args, input=found)
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout.splitlines()[-1])
    assert (summary["type"], summary["files_examined"], summary["bytes_fetched"]) == ("summary", 1, 256 * 512)
    assert contents(large) == whole


def test_what_a_verification_noted_on_this_machine_is_known(large: Path, tmp_path: Path) -> None:
    """The ledger remembers which files were found damaged: `verify --full`, then plain `repair`."""
    whole = contents(large)
    flip(large / FINAL, 300_000)
    runner = CliRunner(env={"HSSTORE_STATE_DIR": str(tmp_path / "state")})
    assert runner.invoke(cli, ["verify", "manifest", str(large), "--full"]).exit_code == 1  # raised, `run` maps it to 3
    result = runner.invoke(cli, ["repair", str(large), "--from", str(tmp_path / "replica"), "--json"])
    assert json.loads(result.stdout.splitlines()[-1])["files_examined"] == 1
    assert contents(large) == whole


@pytest.mark.parametrize(
    "text", ["no json", "[]", '{"type": "finding"}', '{"type": "finding", "severity": "damage", "file": 3}', "[" * 9999]
)
def test_findings_that_are_none_are_refused(
    store_path: Path, tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "f").write_text('{"type": "summary"}\n\n' + text)
    assert run(["repair", str(store_path), "--findings", str(tmp_path / "f")]) == 2
    assert "line 3 of" in capsys.readouterr().err


def test_findings_of_another_store_are_counted(
    store_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["arrays.zarr/hidden/after_9/c/0/0", "arrays.zarr/hidden/final/c/77/0", "x", "index/row.npy", FINAL]
    lines = [json.dumps({"type": "finding", "severity": "damage", "file": n}) for n in names]
    (tmp_path / "f").write_text("\n".join(lines))
    assert run(["repair", str(store_path), "--findings", str(tmp_path / "f")]) == 0
    assert "3 files in the findings are none of this store's" in capsys.readouterr().err


def test_the_command_names_the_next_one(store_path: Path, replica: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for root in (store_path, replica):
        flip(root / FINAL, 300)
    assert run(["repair", str(store_path), "--from", str(replica), "--full"]) == 3
    printed = capsys.readouterr()
    assert f"lost: {FINAL}, rows 16-31: no replica has block 1 to 1; samples" in printed.out
    assert f"hsstore quarantine {store_path} --shard 0 --reason" in printed.err
    assert "--resume" in printed.err
    assert run(["repair", str(store_path), "--from", str(replica), "--full", "--quarantine-rest"]) == 0
    assert "1 shards quarantined" in capsys.readouterr().out


def test_bad_arguments_are_one_sentence(store_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, code in (
        (["repair", str(tmp_path / "none")], 10),
        (["repair", str(tmp_path)], 10),
        (["repair", str(store_path), "--from", str(tmp_path / "none")], 10),
        (["repair", str(store_path), "--from", "ftp://x"], 2),
        (["repair", str(store_path), "--from", str(store_path)], 2),
        (["repair", str(store_path), "--token", "a b"], 2),
        (["repair", str(store_path), "--token-file", str(tmp_path / "t")], 10),
        (["repair", str(store_path), "--findings", str(tmp_path / "f")], 10),
    ):
        assert run(arguments) == code, arguments
        assert "Traceback" not in capsys.readouterr().err
