"""Reading what may be anything: past the page cache, at a rate, from media that give errors, while writers write."""

from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from hsstore import checks, cli, reading
from hsstore.errors import HsstoreError, IncompleteError
from hsstore.findings import Finding
from hsstore.known import Known
from hsstore.parallel import unordered
from hsstore.reading import RateLimit, Reading
from hsstore.verify import Options, Verifier
from tests.stores import Sample, create, stage

Step = Callable[[Known], Iterator[Finding]]
FILE = "arrays.zarr/hidden/final/c/0/0"
BLOCK = 16 * 8 * 2  # bytes of a block of the store that the fixtures make


def findings(root: Path, **options: object) -> list[Finding]:
    return list(Verifier(root, "full", Options(**options)).findings())  # type: ignore[arg-type]


class Medium:
    """Calls of the operating system on one file, failed or changed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
        self.patch, self.identity = monkeypatch, path.stat()

    def has(self, fd: int) -> bool:
        return os.path.samestat(os.fstat(fd), self.identity)

    def on_read(self, act: Callable[[memoryview, int], int | None]) -> None:
        """`act(buffer, offset)` instead of a read of that file; None lets the read go on."""
        real = os.preadv

        def preadv(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            done = act(buffers[0], offset) if self.has(fd) else None
            return real(fd, buffers, offset) if done is None else done

        self.patch.setattr(os, "preadv", preadv)


def test_blocks_that_the_medium_refuses_are_named(store_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """EIO in one block: those rows are lost, all others are vouched for."""

    def bad_sector(buffer: memoryview, offset: int) -> int | None:
        if offset <= 2 * BLOCK < offset + len(buffer):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return None

    Medium(monkeypatch, store_path / FILE).on_read(bad_sector)
    (found,) = findings(store_path)
    assert (found.kind, found.file, found.rows) == ("read", FILE, (32, 47))
    assert "error" in found.detail
    assert found.samples


def test_a_medium_of_two_minds_is_damage(store_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A first reading with a wrong bit and a second without: nothing to restore, but nothing to trust."""
    wrong = iter([True])

    def flaky(buffer: memoryview, offset: int) -> int | None:
        if next(wrong, False):
            buffer[:] = bytes(len(buffer))
            return len(buffer)
        return None

    Medium(monkeypatch, store_path / FILE).on_read(flaky)
    (found,) = findings(store_path)
    assert (found.kind, found.file) == ("read", FILE)
    assert "twice" in found.detail


def test_short_reads_are_no_damage(store_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, n = os.preadv, [0]

    def one_byte(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        n[0] += 1
        return real(fd, [buffers[0][: 1 + n[0] % 7]], offset)

    monkeypatch.setattr(os, "preadv", one_byte)
    assert findings(store_path, jobs=1) == []
    assert n[0] > 1000


@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO, errno.ESTALE, errno.ELOOP])
def test_a_file_that_cannot_be_opened_is_damage(store_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    real = os.open

    def refused(path: str, *rest: int, **more: int) -> int:
        if str(path).endswith(FILE):
            raise OSError(code, os.strerror(code), path)
        return real(path, *rest, **more)

    monkeypatch.setattr(os, "open", refused)
    (found,) = findings(store_path)
    assert (found.kind, found.file) == ("read", FILE)


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENOMEM])
def test_what_is_our_own_trouble_is_no_damage(store_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """Too many open files say nothing about the store: the run ends instead of calling it damaged."""
    real = os.open

    def refused(path: str, *rest: int, **more: int) -> int:
        if str(path).endswith(FILE):
            raise OSError(code, os.strerror(code), path)
        return real(path, *rest, **more)

    monkeypatch.setattr(os, "open", refused)
    with pytest.raises(HsstoreError):
        findings(store_path)


@pytest.mark.parametrize("directory", ["records", "layouts", "arrays.zarr/hidden/final/c", "staging", ""])
def test_a_directory_that_cannot_be_listed_is_damage(
    store_path: Path, monkeypatch: pytest.MonkeyPatch, directory: str
) -> None:
    real, unreadable = os.scandir, str(store_path / directory).rstrip("/")

    def refused(path: str) -> object:
        if str(path).rstrip("/") == unreadable:
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return real(path)

    def no_names(path: str | Path = ".") -> list[str]:
        with os.scandir(path) as entries:
            return [e.name for e in entries]

    monkeypatch.setattr(os, "scandir", refused)
    monkeypatch.setattr(os, "listdir", no_names)
    assert [f for f in findings(store_path) if f.severity == "damage"]


@pytest.mark.parametrize("make", ["fifo", "directory", "dangling", "loop", "device", "socket"])
@pytest.mark.parametrize("name", [FILE, "arrays.zarr/tokens/input_ids/c/1", "arrays.zarr/zarr.json", "index/row.npy"])
def test_what_is_no_plain_file_is_damage_and_never_waits(store_path: Path, make: str, name: str) -> None:
    path = store_path / name
    path.unlink()
    if make == "fifo":
        os.mkfifo(path)
    elif make == "directory":
        path.mkdir()
    elif make == "socket":
        os.mknod(path, 0o140644)
    else:
        path.symlink_to({"dangling": "nowhere", "loop": path.name, "device": "/dev/zero"}[make])
    assert name in {f.file for f in findings(store_path) if f.severity == "damage"}


@pytest.mark.parametrize(
    "name", ["store.json", "layouts/000000.json", "records/000001.json", "manifest.json", "index/row.npy", FILE]
)
def test_a_hole_of_a_terabyte_is_damage_and_not_read(store_path: Path, name: str) -> None:
    path = store_path / name
    path.chmod(0o644)
    os.truncate(path, 1 << 40)
    verifier = Verifier(store_path, "full")
    assert name in {f.file for f in verifier.findings() if f.severity == "damage"}
    assert verifier.summary.bytes_read < 1 << 20


def test_a_store_under_a_name_of_any_bytes_is_told_in_one_line_of_json(
    store_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff\n"))
    store_path.rename(root)
    for name in ("store.json", "records/000001.json", "layouts/000000.json", FILE):
        original = (root / name).read_bytes()
        (root / name).unlink()
        (root / name).write_bytes(b"?")
        assert cli.run(["verify", "manifest", str(root), "--full", "--json"]) == 3
        lines = [json.loads(text) for text in capsys.readouterr().out.splitlines()]
        assert [x["type"] for x in lines][-1] == "summary"
        assert name in {x.get("file") for x in lines}
        (root / name).write_bytes(original)


def test_a_link_to_the_very_file_is_as_good(store_path: Path, tmp_path: Path) -> None:
    """Hub caches and annexes keep files elsewhere and link to them; readers follow links too."""
    (store_path / FILE).rename(tmp_path / "blob")
    (store_path / FILE).symlink_to(tmp_path / "blob")
    assert findings(store_path) == []


@pytest.mark.parametrize("cached", [False, True])
def test_the_page_cache_is_asked_to_forget_before_and_after(
    store_path: Path, monkeypatch: pytest.MonkeyPatch, cached: bool
) -> None:
    size, calls = (store_path / FILE).stat().st_size, []
    medium = Medium(monkeypatch, store_path / FILE)
    monkeypatch.setattr(
        os,
        "posix_fadvise",
        lambda fd, start, n, advice: calls.append((start, n, advice)) if medium.has(fd) else None,
    )
    medium.on_read(lambda buffer, offset: calls.append((offset, len(buffer), "read")))
    assert findings(store_path, cached=cached) == []
    dropped = (0, size, os.POSIX_FADV_DONTNEED)
    assert calls == ([(0, size, "read")] if cached else [dropped, (0, size, "read"), dropped])


def test_a_large_file_leaves_the_page_cache_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most about one window of it is kept, whatever its size."""
    monkeypatch.setattr(reading, "_DROP_BYTES", 4 << 20)
    (tmp_path / "f").write_bytes(bytes(10 << 20))
    dropped, kept = [], []
    monkeypatch.setattr(
        os, "posix_fadvise", lambda fd, start, n, a: dropped.append((start, n)) if a == os.POSIX_FADV_DONTNEED else None
    )
    with Reading().open(str(tmp_path / "f")) as file:
        at = 0
        for piece in file.pieces(0, file.size):
            at += len(piece)
            kept.append(at - (sum(n for _, n in dropped[1:])))
    assert max(kept) <= (4 << 20) + reading.PIECE_BYTES
    assert dropped == [(0, 10 << 20), (0, 4 << 20), (4 << 20, 4 << 20), (8 << 20, 2 << 20)]


def test_a_rate_limit_is_for_all_threads_together() -> None:
    now = [100.0]
    limit = RateLimit(1000, clock=lambda: now[0])
    assert [limit.reserve(500) for _ in range(4)] == [0, 0.5, 1.0, 1.5]
    now[0] += 60
    assert limit.reserve(10) == 0, "time that nobody used is no credit"
    assert limit.reserve(10) == pytest.approx(0.01)


def test_verification_keeps_to_its_rate(store_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every byte that is read has waited for its turn."""
    reserved: list[int] = []
    monkeypatch.setattr(RateLimit, "reserve", lambda _, n: reserved.append(n) or 0.0)
    verifier = Verifier(store_path, "full", Options(bytes_per_second=1000))
    assert list(verifier.findings()) == []
    assert sum(reserved) == verifier.summary.bytes_read > 10_000


def test_a_reading_that_is_stopped_waits_no_longer(store_path: Path) -> None:
    """The second piece would have to wait for a year."""
    used = Reading(rate=RateLimit(1e-3))
    with used.open(str(store_path / FILE)) as file:
        assert len(file.read(0, 100)) == 100
        threading.Timer(0.05, used.stop.set).start()
        with pytest.raises(IncompleteError):
            file.read(0, 100)


def test_who_stops_listening_stops_the_threads(store_path: Path) -> None:
    verifier = Verifier(store_path, "full", Options(jobs=3, bytes_per_second=1))
    (store_path / "foreign").write_bytes(b"?")
    stream = verifier.findings()
    assert next(stream).kind == "unknown"
    stream.close()  # type: ignore[attr-defined]
    assert not [t.name for t in threading.enumerate() if t.name.startswith("hsstore")]


def test_unordered_gives_every_result_once_and_raises_the_first_error() -> None:
    stop = threading.Event()
    assert sorted(unordered(lambda n: n * n, range(100), jobs=7, stop=stop)) == [n * n for n in range(100)]
    assert stop.is_set()
    stop = threading.Event()

    def work(n: int) -> int:
        if n == 5:
            raise HsstoreError("five")
        stop.wait(5 * (n > 50))
        return n

    with pytest.raises(HsstoreError, match="five"):
        list(unordered(work, range(10**6), jobs=3, stop=stop))


@pytest.mark.parametrize("step", checks.STEPS)
@pytest.mark.parametrize("finish", [False, True])
def test_a_store_that_is_written_meanwhile_is_not_damaged(
    tmp_path: Path, samples: list[Sample], monkeypatch: pytest.MonkeyPatch, step: Step, finish: bool
) -> None:
    """A shard is committed, and a manifest built, in the middle of a verification: at most a note says so."""
    writer = create(tmp_path / "s", samples)
    todo = writer.todo()
    stage(writer, todo[0], samples).commit()
    writer.finish()
    left = list(todo[1:])

    def meanwhile(known: Known) -> object:
        if left:
            stage(writer, left.pop(), samples).commit()
            if finish:
                writer.finish()
        return step(known)

    monkeypatch.setattr(checks, "STEPS", [meanwhile if s is step else s for s in checks.STEPS])
    assert [str(f) for f in findings(tmp_path / "s") if f.severity == "damage"] == []
    assert len(left) < len(todo) - 1
