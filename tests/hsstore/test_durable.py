from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from hsstore import durable


def test_write_new_never_overwrites(tmp_path: Path) -> None:
    path = tmp_path / "record"
    assert durable.write_new(path, b"first")
    assert not durable.write_new(path, b"second")
    assert path.read_bytes() == b"first"
    assert os.listdir(tmp_path) == ["record"]


def test_without_hard_links_rename_takes_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """exFAT, some FUSE and some network mounts have no link(2)."""

    def no_link(*_: Any, **__: Any) -> None:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", no_link)
    path = tmp_path / "record"
    assert durable.write_new(path, b"first")
    assert not durable.write_new(path, b"second")
    assert path.read_bytes() == b"first"
    assert os.listdir(tmp_path) == ["record"]


def test_a_failed_fsync_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: int) -> None:
        raise OSError(errno.EIO, "lost")

    monkeypatch.setattr(os, "fsync", broken)
    for write in (durable.write_new, durable.replace):
        with pytest.raises(OSError, match="lost"):
            write(tmp_path / "record", b"data")
    assert os.listdir(tmp_path) == []


def test_replace_changes_whole_files(tmp_path: Path) -> None:
    durable.replace(tmp_path / "m", b"a")
    durable.replace(tmp_path / "m", b"bb")
    assert (tmp_path / "m").read_bytes() == b"bb"
    assert os.listdir(tmp_path) == ["m"]


def test_pwrite_all_survives_short_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = os.pwrite, []

    def short(fd: int, data: memoryview, offset: int) -> int:
        calls.append(len(data))
        return real(fd, data[:3], offset)

    monkeypatch.setattr(os, "pwrite", short)
    with open(tmp_path / "f", "wb") as file:
        durable.pwrite_all(file.fileno(), memoryview(b"0123456789"), 2)
    assert (tmp_path / "f").read_bytes() == b"\0\0" + b"0123456789"
    assert len(calls) == 4
