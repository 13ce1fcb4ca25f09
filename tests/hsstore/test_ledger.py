"""What was verified when: for these very files, over kills and concurrent runs, outside the store."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hsstore import ledger, manifest
from hsstore.ledger import FileLine, Ledger, RunLine, Verified
from hsstore.verify import Options, Part, Verifier

UUID = "3c8a2a58-2a6a-4f0e-9a2b-0123456789ab"
FILE = "arrays.zarr/hidden/final/c/0/0"


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state"


def line(n: int, ok: bool = True) -> FileLine:
    return FileLine(at=float(n), identity=(1, n, 3, 4), sha256=f"{n:032x}", ok=ok)


def verify(root: Path, state: Path, depth: object = "full", **options: object) -> Verifier:
    verifier = Verifier(root, depth, Options(state=state, **options))  # type: ignore[arg-type]
    for _ in verifier.findings():
        pass
    return verifier


def summary(root: Path, state: Path) -> Verified:
    header = manifest.load_header(root)
    return ledger.summary(root, header, manifest.load(root), state)


def all_lines(state: Path) -> list[dict[str, object]]:
    return [json.loads(text) for path in state.glob("*.jsonl") for text in path.read_bytes().splitlines()]


def test_full_is_noted_and_quick_is_not(store_path: Path, state: Path) -> None:
    assert summary(store_path, state) == Verified(shards=2, whole=0, oldest=None, damaged=0, last={})
    verify(store_path, state, "quick")
    found = summary(store_path, state)
    assert (found.whole, list(found.last)) == (0, ["quick"])
    verifier = verify(store_path, state)
    found = summary(store_path, state)
    assert (found.whole, found.damaged, set(found.last)) == (2, 0, {"quick", "full"})
    assert found.oldest is not None
    assert found.oldest <= found.last["full"].at
    assert found.last["full"].bytes_read == verifier.summary.bytes_read > 0
    assert not list(store_path.rglob("*.jsonl")), "nothing of it lies in the store"


def test_a_renamed_store_keeps_its_lines_a_copy_has_none(store_path: Path, state: Path, tmp_path: Path) -> None:
    verify(store_path, state)
    copy = Path(shutil.copytree(store_path, tmp_path / "copy"))  # with the times, as cp -a
    found = summary(copy, state)
    assert (found.whole, found.last) == (0, {}), "the copy was never read"
    store_path.rename(tmp_path / "renamed")
    assert summary(tmp_path / "renamed", state).whole == 2
    assert set(summary(tmp_path / "renamed", state).last) == {"full"}
    again = verify(tmp_path / "renamed", state, newer_than_s=3600.0)
    assert again.summary.files_skipped == again.summary.files
    assert verify(copy, state, newer_than_s=3600.0).summary.files_skipped == 0


def change(path: Path) -> None:
    path.chmod(0o644)
    path.write_bytes(path.read_bytes())


def replace(path: Path) -> None:
    data, status = path.read_bytes(), path.stat()
    keep = path.with_name("keep")
    path.rename(keep)  # so that the new file cannot get the old inode
    path.write_bytes(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    keep.unlink()


def exchange(path: Path) -> None:
    other = path.parent.parent / "1" / "0"
    scratch = path.with_name("scratch")
    path.rename(scratch)
    other.rename(path)
    scratch.rename(other)


@pytest.mark.parametrize(("act", "n_read"), [(change, 1), (replace, 1), (exchange, 2)])
def test_a_file_that_is_another_now_is_read_again(store_path: Path, state: Path, act: object, n_read: int) -> None:
    verify(store_path, state)
    act(store_path / FILE)  # type: ignore[operator]
    assert summary(store_path, state).whole == 2 - n_read
    again = verify(store_path, state, newer_than_s=3600.0)
    assert again.summary.files - again.summary.files_skipped == n_read
    assert again.summary.damage == (2 if act is exchange else 0)


def test_what_was_found_damaged_is_not_vouched_for_any_more(store_path: Path, state: Path) -> None:
    """The same inode, size and time, other bytes: as a disk does it. The last line about a file counts."""
    verify(store_path, state)
    path, status = store_path / FILE, (store_path / FILE).stat()
    original = path.read_bytes()
    for data, expected in ((original[:-1] + b"?", (1, 1)), (original, (2, 0))):
        path.chmod(0o644)
        path.write_bytes(data)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        verify(store_path, state)
        found = summary(store_path, state)
        assert (found.whole, found.damaged) == expected
        again = verify(store_path, state, newer_than_s=3600.0)
        assert again.summary.files - again.summary.files_skipped == expected[1], "damage is looked at again"


def test_quick_notes_damage_and_vouches_for_nothing(store_path: Path, state: Path) -> None:
    """A file that was whole last week and has a bad footer today is not vouched for; a repair finds it here."""
    verify(store_path, state)
    path, status = store_path / FILE, (store_path / FILE).stat()
    path.chmod(0o644)
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    before = len(all_lines(state))
    verify(store_path, state, "quick")
    found = summary(store_path, state)
    assert (found.whole, found.damaged) == (1, 1)
    assert len(all_lines(state)) == before + 2, "one file, one run"


def interrupt(root: Path, state: Path, n_files: int, depth: object = "full", **options: object) -> int:
    """Stop a verification, as Ctrl-C does, after some files. Returns how many it has noted."""
    before = sum(x["type"] == "file" for x in all_lines(state))
    verifier = Verifier(root, depth, Options(state=state, jobs=1, **options))  # type: ignore[arg-type]
    left = iter(range(n_files))

    def stop() -> None:
        if next(left, None) is None:
            raise KeyboardInterrupt

    verifier.on_progress = stop
    with pytest.raises(KeyboardInterrupt):
        for _ in verifier.findings():
            pass
    noted = sum(x["type"] == "file" for x in all_lines(state)) - before
    assert 0 < noted < verifier.summary.files
    return noted


def test_a_stopped_run_is_resumed(store_path: Path, state: Path) -> None:
    verify(store_path, state)  # an older one, which ended, is not what is resumed
    noted = interrupt(store_path, state, 3) + interrupt(store_path, state, 2, resume=True)
    last = verify(store_path, state, resume=True)
    assert last.summary.files_skipped == noted
    assert last.summary.files_whole == last.summary.files - noted > 0
    assert verify(store_path, state, resume=True).summary.files_skipped == 0, "it ended: a new one reads everything"


def test_parts_are_resumed_each_by_itself(store_path: Path, state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hsstore.depth.SMALL_FILE_BYTES", 0)  # else every part reads the small files
    depth, other = Part(n=1, total=2), Part(n=2, total=2)
    noted = interrupt(store_path, state, 2, depth)
    assert verify(store_path, state, other, resume=True).summary.files_skipped == 0
    assert verify(store_path, state, depth, resume=True).summary.files_skipped == noted
    assert summary(store_path, state).whole == 2


def test_a_store_that_only_has_its_name_in_common_is_not_resumed(store_path: Path, state: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(store_path, tmp_path / "copy"))
    interrupt(store_path, state, 5)
    assert verify(copy, state, resume=True).since is None


def test_a_line_that_a_kill_cut_is_skipped_and_never_completed(state: Path) -> None:
    book = Ledger(UUID, state)
    for n in range(3):
        book.add(line(n))
    book.flush()
    whole = book.path.read_bytes()
    for cut in range(len(whole)):
        book.path.write_bytes(whole[:cut])
        book.add(line(7))
        book.flush()
        history = book.read()
        kept = whole[:cut].count(b"\n") + (cut > 0 and whole[cut : cut + 1] == b"\n")
        assert [f.at for f in history.files.values()] == [*range(kept), 7.0], cut
        assert history.n_broken == (cut > 0 and whole[cut - 1 : cut] != b"\n" and whole[cut : cut + 1] != b"\n")


def test_garbage_in_a_ledger_is_counted_and_harmless(state: Path) -> None:
    book = Ledger(UUID, state)
    state.mkdir()
    book.path.write_bytes(b'\xff\n[]\n{"type":"other"}\n{}\n\n' + b"[" * 100_000 + b"\n")
    book.add(line(1))
    book.flush()
    history = book.read()
    assert (len(history.files), history.n_broken) == (1, 5)


def test_compaction_keeps_what_counts(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "_COMPACT_BYTES", 100)
    book = Ledger(UUID, state)
    for turn in range(4):
        for n in range(5):
            book.add(FileLine(at=10.0 * turn + n, identity=(1, n, 3, 4), sha256="a", ok=turn % 2 == 0))
        book.add(RunLine(at=10.0 * turn, depth="full", store=(1, 2), since=1.0, ended=turn % 2 == 1))
    book.flush()
    before = book.read()
    assert book.compact()
    after = book.read()
    assert (after.files, after.runs) == (before.files, before.runs)
    assert after.n_lines == 7 < before.n_lines
    assert not book.compact(), "nothing is overtaken any more"
    assert [p.name for p in state.iterdir()] == [book.path.name]


def test_concurrent_runs_and_compactions_lose_no_line(state: Path) -> None:
    """Each process appends its own lines, in many writes, while others replace the file under it."""
    code = (
        "import sys; from pathlib import Path; from hsstore import ledger; ledger._COMPACT_BYTES = 0\n"
        "me = int(sys.argv[2]); book = ledger.Ledger(sys.argv[3], Path(sys.argv[1]))\n"
        "for n in range(60):\n"
        "    for at in (1.0, 2.0, 3.0):\n"
        "        book.add(ledger.FileLine(at=at, identity=(me, n, 0, 0), sha256='', ok=True)); book.flush()\n"
        "    book.compact()\n"
    )
    running = [subprocess.Popen([sys.executable, "-c", code, str(state), str(me), UUID]) for me in range(4)]
    assert [process.wait() for process in running] == [0] * 4
    history = Ledger(UUID, state).read()
    assert history.n_broken == 0
    assert {key[0][:2]: f.at for key, f in history.files.items()} == {
        (me, n): 3.0 for me in range(4) for n in range(60)
    }


def test_a_uuid_is_no_path(state: Path) -> None:
    for uuid in ("../../etc/x", "/abs", "", "a\0b", UUID.upper()):
        assert Ledger(uuid, state).path.parent == state


@pytest.fixture
def unusable(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "file").write_text("no directory")
    yield tmp_path / "file" / "state"
    assert (tmp_path / "file").read_text() == "no directory"


def test_a_ledger_that_cannot_be_kept_is_one_warning(store_path: Path, unusable: Path) -> None:
    warnings: list[str] = []
    verifier = Verifier(store_path, "full", Options(state=unusable))
    verifier.on_warning = warnings.append
    assert list(verifier.findings()) == []
    assert verifier.summary.files_whole == verifier.summary.files
    (warning,) = warnings
    assert "HSSTORE_STATE_DIR" in warning
    found = summary(store_path, unusable)
    assert found.whole == 0
    assert ledger.describe(found, 0).startswith("unknown: ")


def test_a_full_disk_under_the_ledger_is_one_warning(
    store_path: Path, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    warnings: list[str] = []
    verifier = Verifier(store_path, "full", Options(state=state))
    verifier.on_warning = warnings.append
    assert list(verifier.findings()) == []
    assert len(warnings) == 1


def test_where_it_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HSSTORE_STATE_DIR", "/a")
    monkeypatch.setenv("XDG_STATE_HOME", "/b")
    monkeypatch.setenv("HOME", "/c")
    assert ledger.state_dir() == Path("/a")
    monkeypatch.delenv("HSSTORE_STATE_DIR")
    assert ledger.state_dir() == Path("/b/hsstore")
    monkeypatch.delenv("XDG_STATE_HOME")
    assert ledger.state_dir() == Path("/c/.local/state/hsstore")


def test_one_line_for_people() -> None:
    run = RunLine(at=1000.0, depth="quick", store=(1, 2), since=1000.0, ended=True)
    none = Verified(shards=3, whole=0, oldest=None, damaged=0, last={})
    assert ledger.describe(none, 2000) == "never on this machine"
    some = Verified(shards=1341, whole=1200, oldest=0.0, damaged=1, last={"quick": run})
    assert ledger.describe(some, 3 * 86400) == (
        "in full: 1,200 of 1,341 shards, oldest 3 days ago; 1 found DAMAGED; last: quick 2 days ago, sound"
    )
    assert [ledger.ago(s) for s in (-5, 59, 60, 7200, 86400)] == [
        "just now",
        "just now",
        "1 minute ago",
        "2 hours ago",
        "1 day ago",
    ]
