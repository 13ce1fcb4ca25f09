"""Every damage is found, by the depth that promises it, at the place where it is; nothing sound is called damaged."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hsstore.errors import NotFoundError
from hsstore.findings import Finding
from hsstore.store import Store
from hsstore.verify import Depth, Verifier
from tests.stores import Sample, create, stage


def findings(root: Path, depth: Depth = "full") -> list[Finding]:
    return list(Verifier(root, depth).findings())


def damage(root: Path, depth: Depth = "full") -> list[Finding]:
    return [f for f in findings(root, depth) if f.severity == "damage"]


def all_files(root: Path) -> list[Path]:
    return sorted(p for p in root.rglob("*") if p.is_file())


def writable(path: Path) -> Path:
    os.chmod(path, 0o644)
    return path


@pytest.mark.parametrize("depth", ["quick", "full"])
def test_a_sound_store_has_no_findings(shared_store: Store, depth: Depth) -> None:
    verifier = Verifier(shared_store.root, depth)
    assert list(verifier.findings()) == []
    assert verifier.summary.manifest_id == shared_store.manifest_id
    assert verifier.summary.files == len(shared_store.manifest.shards) * len(shared_store.header.arrays)


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_one_flipped_bit_anywhere_is_found_and_located(store_path: Path, data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(all_files(store_path)))
    original = path.read_bytes()
    at, bit = data.draw(st.integers(0, len(original) - 1)), data.draw(st.integers(0, 7))
    flipped = bytearray(original)
    flipped[at] ^= 1 << bit
    writable(path).write_bytes(flipped)
    try:
        check_located(store_path, path.relative_to(store_path).as_posix(), at)
    finally:
        path.write_bytes(original)


def check_located(root: Path, relative: str, at: int) -> None:
    found = damage(root)
    assert [f for f in found if f.file == relative], f"byte {at} of {relative}: {found}"
    if "/c/" not in relative:
        return
    assert len(found) == 1, "one bit, one place"
    name = relative.removeprefix("arrays.zarr/").split("/c/")[0]
    header = Store.open(root).header
    row = at // header.array(name).row_bytes
    (finding,) = found
    if finding.kind == "block":
        assert finding.rows is not None
        assert finding.rows[0] <= row
        assert finding.rows[1] - finding.rows[0] < header.chunk_rows
        expected = [s for s in Store.open(root).record(finding.shard or 0).samples if s.row <= row < s.row + s.n_tokens]
        assert set(expected) <= set(finding.samples)
    else:
        assert finding.kind == "footer"


def test_every_byte_of_one_file_is_covered(store_path: Path) -> None:
    """Exhaustive where the property test samples: no byte of a file is outside blocks and footer."""
    path = writable(store_path / "arrays.zarr/tokens/loss_mask/c/0")
    original = path.read_bytes()
    for at in range(len(original)):
        flipped = bytearray(original)
        flipped[at] ^= 1
        path.write_bytes(flipped)
        assert len(damage(store_path, "quick")) == 1, at


@pytest.mark.parametrize("name", ["tokens/input_ids/c/0", "hidden/after_2/c/0/0", "hidden/final/c/1/0"])
def test_quick_finds_a_truncated_file(store_path: Path, name: str) -> None:
    path = writable(store_path / "arrays.zarr" / name)
    os.truncate(path, path.stat().st_size - 1)
    (found,) = damage(store_path, "quick")
    assert (found.kind, found.file) == ("size", f"arrays.zarr/{name}")
    os.truncate(path, 40)
    (found,) = damage(store_path, "quick")
    assert found.rows is not None
    assert found.samples


def test_quick_finds_every_missing_file(store_path: Path, tmp_path: Path) -> None:
    for path in all_files(store_path):
        if path.parent.name == "manifests":
            kept = path.read_bytes()
            path.unlink()  # kept for readers that pin a state; nothing else needs it: a note
            assert [f.file for f in Verifier(store_path).findings()] == [f"manifests/{path.name}"]
            path.write_bytes(kept)
            continue
        shutil.move(path, tmp_path / "away")
        relative = path.relative_to(store_path).as_posix()
        found = damage(store_path, "quick")
        assert found, relative
        assert any(relative in str(f) or Path(relative).parent.as_posix() in f.file for f in found), relative
        shutil.move(tmp_path / "away", path)
    assert damage(store_path, "quick") == []


def test_quick_finds_exchanged_files(store_path: Path, tmp_path: Path) -> None:
    """Equal sizes and sound footers: only the contents tell."""
    arrays = store_path / "arrays.zarr"
    pairs = [
        (arrays / "hidden/after_2/c/0/0", arrays / "hidden/final/c/0/0"),
        (store_path / "records/000000.json", store_path / "records/000001.json"),
        (arrays / "hidden/final/c/0/0", arrays / "hidden/final/c/1/0"),
    ]
    for a, b in pairs:
        exchange(a, b, tmp_path)
        names = {f.file for f in damage(store_path, "quick")}
        assert {a.relative_to(store_path).as_posix(), b.relative_to(store_path).as_posix()} <= names
        exchange(a, b, tmp_path)
    assert damage(store_path) == []


def exchange(a: Path, b: Path, scratch: Path) -> None:
    a.rename(scratch / "a")
    b.rename(a)
    (scratch / "a").rename(b)


def test_quick_finds_exchanged_large_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, samples: list[Sample]
) -> None:
    """Files that quick does not read whole, with blocks that are small enough: first, middle and last block decide."""
    monkeypatch.setattr("hsstore.depth.SMALL_FILE_BYTES", 0)
    writer = create(tmp_path / "s", samples)
    for shard in writer.todo():
        stage(writer, shard, samples).commit()
    exchange(tmp_path / "s/arrays.zarr/hidden/after_2/c/0/0", tmp_path / "s/arrays.zarr/hidden/final/c/0/0", tmp_path)
    assert {f.file for f in damage(tmp_path / "s", "quick")} == {
        "arrays.zarr/hidden/after_2/c/0/0",
        "arrays.zarr/hidden/final/c/0/0",
    }


@pytest.mark.parametrize(
    "name",
    ["extra.txt", "records/notes.json", "records/7.json", "arrays.zarr/hidden/final/c/9/0", "index/more.npy"],
)
def test_quick_finds_a_foreign_file(store_path: Path, name: str) -> None:
    (store_path / name).parent.mkdir(parents=True, exist_ok=True)
    (store_path / name).write_bytes(b"?")
    assert [(f.kind, f.file) for f in damage(store_path, "quick")] == [("unknown", name)]


def test_a_record_of_another_store_is_damage(store_path: Path, tmp_path: Path, samples: list[Sample]) -> None:
    other = create(tmp_path / "other", samples)
    stage(other, 0, samples).commit()
    writable(store_path / "records/000000.json").write_bytes((tmp_path / "other/records/000000.json").read_bytes())
    assert any("belongs to store" in f.detail for f in damage(store_path, "quick"))


def test_open_shards_and_abandoned_attempts_are_notes(tmp_path: Path, samples: list[Sample]) -> None:
    writer = create(tmp_path / "s", samples)
    stage(writer, 0, samples).commit()
    staged = stage(writer, 1, samples)
    kinds = {f.kind: f for f in findings(tmp_path / "s")}
    assert not damage(tmp_path / "s")
    assert set(kinds) == {"open", "stale", "staging"}
    assert staged.attempt in kinds["staging"].file


def test_a_manifest_overtaken_by_new_records_is_a_note(tmp_path: Path, samples: list[Sample]) -> None:
    writer = create(tmp_path / "s", samples)
    stage(writer, 0, samples).commit()
    writer.finish()
    stage(writer, 1, samples).commit()
    assert [f.kind for f in findings(tmp_path / "s")] == ["stale"]
    path = tmp_path / "s" / "manifest.json"
    path.write_bytes(path.read_bytes().replace(b"after_2", b"after_9"))
    assert [f.file for f in damage(tmp_path / "s")] == ["manifest.json"], "stale and flipped is damage"
    path.write_bytes(path.read_bytes().replace(b"after_9", b"after_2"))
    for name in ("index/row.npy", "manifest.sha256"):
        path = tmp_path / "s" / name
        data = path.read_bytes()
        for at in range(0, len(data), 7):
            path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
            assert damage(tmp_path / "s"), at
        path.write_bytes(data)
    assert not damage(tmp_path / "s")


def test_a_vanished_record_is_damage_not_an_open_shard(store_path: Path) -> None:
    (store_path / "records/000001.json").unlink()
    assert [(f.kind, f.file) for f in damage(store_path, "quick")] == [("missing", "records/000001.json")]


def test_verify_changes_nothing(store_path: Path) -> None:
    writable(store_path / "arrays.zarr/hidden/final/c/0/0").write_bytes(b"torn")
    before = {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in all_files(store_path)}
    findings(store_path)
    assert {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in all_files(store_path)} == before


def test_what_is_no_store_is_not_found(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(NotFoundError):
            findings(path)


def test_garbage_in_every_file_never_raises(store_path: Path) -> None:
    for path in all_files(store_path):
        original = writable(path).read_bytes()
        for garbage in (b"", b"\xff\xfe", b"{}", b"[]", b'{"format":1}', original + b"x"):
            path.write_bytes(garbage)
            assert damage(store_path, "quick"), (path, garbage)
        path.write_bytes(original)
    assert damage(store_path) == []


@pytest.mark.parametrize("name", ["store.json", "layouts/000000.json", "records/000001.json", "manifest.json"])
def test_what_is_no_plain_file_or_endlessly_deep_is_damage(store_path: Path, name: str) -> None:
    """A FIFO would wait for ever, deep JSON end the decoder; a directory raises another error than a missing file."""
    path = store_path / name
    original = path.read_bytes()
    path.unlink()
    os.mkfifo(path)
    assert damage(store_path, "quick"), "fifo"
    path.unlink()
    path.mkdir()
    assert damage(store_path, "quick"), "directory"
    path.rmdir()
    path.write_bytes(b"[" * 200_000)
    assert damage(store_path, "quick"), "deep"
    path.write_bytes(original)
    assert damage(store_path) == []


def test_records_as_a_file_is_damage(store_path: Path) -> None:
    shutil.rmtree(store_path / "records")
    (store_path / "records").write_bytes(b"")
    assert ("record", "records") in {(f.kind, f.file) for f in damage(store_path, "quick")}


def test_names_of_any_bytes_are_one_printable_line(store_path: Path) -> None:
    (store_path / os.fsdecode(b"arrays.zarr/\xff\xfe\n.x")).write_bytes(b"?")
    (found,) = damage(store_path, "quick")
    assert found.file == "arrays.zarr/\\xff\\xfe\\n.x"
    assert "\n" not in str(found)


def test_a_link_to_a_directory_is_foreign(store_path: Path) -> None:
    (store_path / "arrays.zarr/loop").symlink_to("..")
    assert [f.file for f in damage(store_path, "quick")] == ["arrays.zarr/loop"]


def test_a_lost_footer_blames_no_rows(store_path: Path) -> None:
    path = writable(store_path / "arrays.zarr/hidden/final/c/0/0")
    os.truncate(path, path.stat().st_size - 1)
    (found,) = damage(store_path, "quick")
    assert (found.kind, found.rows, found.samples) == ("size", None, ())


@pytest.mark.parametrize("step", range(9))
def test_a_build_killed_at_any_step_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, samples: list[Sample], step: int
) -> None:
    """Derived files of two builds lie side by side then; each is whole, and the next build ends it."""
    writer = create(tmp_path / "s", samples)
    for shard in writer.todo():
        stage(writer, shard, samples).commit()
        left = iter(range(step))
        real = os.rename

        def killed(source: Path, target: Path, left: Iterator[int] = left, real: Callable[..., None] = real) -> None:
            if next(left, None) is None:
                raise SystemExit  # nothing after this line happens in a killed process
            real(source, target)

        with monkeypatch.context() as patch, contextlib.suppress(SystemExit):
            patch.setattr(os, "rename", killed)
            patch.setattr(Path, "unlink", lambda *_, **__: None)
            writer.finish()
        assert damage(tmp_path / "s") == []
    writer.finish()
    assert [f.kind for f in findings(tmp_path / "s") if f.kind != "staging"] == []
