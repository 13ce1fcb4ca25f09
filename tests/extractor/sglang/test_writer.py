"""The background writer: whole writes, bounded memory, few open files, and no error that nobody hears of."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from extractor.sglang_plugin.protocol import WriteError
from extractor.sglang_plugin.writer import OpenFiles, Rows, RowWriter, write_rows


def rows(path: Path, *, request: int = 1, offset: int = 0, n_bytes: int = 1000) -> Rows:
    data = np.random.default_rng(request).integers(1, 255, n_bytes, np.uint8)
    return Rows(request=request, path=str(path), offset=offset, data=data)


@pytest.fixture
def staged(tmp_path: Path) -> Path:
    path = tmp_path / "after_2"
    path.write_bytes(bytes(10_000))
    return path


@pytest.fixture
def files() -> Iterator[OpenFiles]:
    files = OpenFiles(limit=3)
    yield files
    files.close()


def open_descriptors(directory: Path) -> list[str]:
    links = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            continue
    return [link for link in links if link.startswith(str(directory))]


def test_rows_go_to_their_place(staged: Path, files: OpenFiles) -> None:
    part = rows(staged, offset=500)
    write_rows(files, part)
    assert staged.read_bytes() == bytes(500) + part.data.tobytes() + bytes(8500)


def test_a_short_write_is_continued(staged: Path, files: OpenFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """pwrite may take fewer bytes than it got; dropping the rest leaves zeros that look like states."""
    pwrite, calls = os.pwrite, 0

    def short(fd: int, data: memoryview, offset: int) -> int:
        nonlocal calls
        calls += 1
        return pwrite(fd, data[:300], offset)

    monkeypatch.setattr(os, "pwrite", short)
    part = rows(staged, offset=7)
    write_rows(files, part)
    assert calls == 4
    assert staged.read_bytes()[7:1007] == part.data.tobytes()


def test_rows_behind_the_end_of_the_file_are_refused(staged: Path, files: OpenFiles) -> None:
    """A shard file never grows: such rows have a wrong place."""
    with pytest.raises(OSError, match="behind the end") as caught:
        write_rows(files, rows(staged, offset=9_500))
    assert caught.value.errno == errno.EFBIG
    assert staged.stat().st_size == 10_000


def test_a_published_file_is_not_written_through_an_old_descriptor(staged: Path, files: OpenFiles) -> None:
    """Publishing links the file to its final name and unlinks the staged one; its bytes are committed then."""
    write_rows(files, rows(staged))
    final = staged.with_name("final")
    staged.rename(final)
    committed = final.read_bytes()
    with pytest.raises(FileNotFoundError):
        write_rows(files, rows(staged, request=2))
    staged.write_bytes(bytes(10_000))  # another attempt under the same name
    part = rows(staged, request=3)
    write_rows(files, part)
    assert final.read_bytes() == committed
    assert staged.read_bytes()[:1000] == part.data.tobytes()


def test_open_files_are_bounded_and_closed_when_staged_files_go(tmp_path: Path, files: OpenFiles) -> None:
    """Without it a long run ends at the limit of descriptors, and deleted shards keep their disk space."""
    paths = [tmp_path / str(i) for i in range(8)]
    for path in paths:
        path.write_bytes(bytes(1000))
        write_rows(files, rows(path))
        assert len(files) <= 3
    assert sorted(open_descriptors(tmp_path)) == [str(path) for path in paths[-3:]]
    paths[-1].unlink()
    files.sweep()
    assert open_descriptors(tmp_path) == [str(path) for path in paths[-3:-1]]
    files.close()
    assert open_descriptors(tmp_path) == []


def test_the_thread_writes_everything_before_it_closes(staged: Path) -> None:
    errors: list[WriteError] = []
    writer = RowWriter(errors.append)
    parts = [rows(staged, request=i, offset=i * 1000) for i in range(10)]
    for part in parts:
        writer.put(part)
    writer.close()
    assert errors == []
    assert staged.read_bytes() == b"".join(part.data.tobytes() for part in parts)
    assert open_descriptors(staged.parent) == []


@pytest.mark.parametrize(
    ("failure", "number"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), errno.ENOSPC),
        (OSError(errno.EIO, "Input/output error"), errno.EIO),
        (ValueError("a bug"), errno.EIO),
    ],
)
def test_a_failed_write_is_reported_and_the_thread_lives_on(staged: Path, failure: Exception, number: int) -> None:
    """A dead thread would stop the scheduler at a full queue, and the error would be lost."""
    errors: list[WriteError] = []

    def write(files: OpenFiles, part: Rows) -> None:
        if part.request == 1:
            raise failure
        write_rows(files, part)

    writer = RowWriter(errors.append, write=write)
    good = rows(staged, request=2, offset=2000)
    writer.put(rows(staged, request=1))
    writer.put(good)
    writer.close()
    (error,) = errors
    assert (error.request, error.path, error.errno) == (1, str(staged), number)
    assert error.reason
    assert staged.read_bytes()[2000:3000] == good.data.tobytes()


def test_put_waits_while_the_queue_is_full(staged: Path) -> None:
    """Without a bound a slow disk fills the memory of the GPU machine."""
    go = threading.Event()
    written: list[int] = []

    def write(files: OpenFiles, part: Rows) -> None:
        go.wait(300)
        written.append(part.request)

    writer = RowWriter(lambda error: None, max_queued_bytes=2000, write=write)
    writer.put(rows(staged, request=0))
    writer.put(rows(staged, request=1))
    third = threading.Thread(target=writer.put, args=(rows(staged, request=2),))
    third.start()
    time.sleep(0.1)
    assert third.is_alive()
    go.set()
    third.join(300)
    assert not third.is_alive()
    writer.close()
    assert written == [0, 1, 2]


def test_rows_larger_than_the_queue_pass_alone(staged: Path) -> None:
    writer = RowWriter(lambda error: None, max_queued_bytes=10, wait_seconds=300)
    part = rows(staged)
    writer.put(part)
    writer.close()
    assert staged.read_bytes()[:1000] == part.data.tobytes()


def test_put_does_not_wait_for_ever(staged: Path) -> None:
    """SGLang's watchdog would end the scheduler; an error in one receipt is better."""
    go = threading.Event()

    def write(files: OpenFiles, part: Rows) -> Any:
        go.wait(300)

    writer = RowWriter(lambda error: None, max_queued_bytes=1500, wait_seconds=0.05, write=write)
    writer.put(rows(staged))
    with pytest.raises(TimeoutError, match="took no rows"):
        writer.put(rows(staged))
    go.set()
    writer.close()
