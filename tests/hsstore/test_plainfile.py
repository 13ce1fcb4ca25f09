"""Whatever lies under a file's name: an answer at once, never a wait and never bytes of a device."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from hsstore import plainfile
from hsstore.errors import DamagedError

pytestmark = pytest.mark.timeout(30)


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path))


STRANGE: dict[str, Callable[[Path], object]] = {
    "fifo": os.mkfifo,
    "directory": os.mkdir,
    "device": lambda path: os.symlink("/dev/zero", path),
    "circle": lambda path: os.symlink(path, path),
    "socket": make_socket,
}


@pytest.mark.parametrize("kind", STRANGE)
def test_nothing_but_a_plain_file_is_opened(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error has the name it was asked for, no descriptor stays open."""
    monkeypatch.chdir(tmp_path)  # a socket's name is short
    path = Path("x")
    STRANGE[kind](path)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(DamagedError, match="c/5/0 is no plain file"):
        plainfile.open_plain(path, name="c/5/0")
    assert plainfile.read_text(path) is None
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_plain_file_is(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("words")
    os.symlink(tmp_path / "x", tmp_path / "link")
    fd = plainfile.open_plain(tmp_path / "link")
    assert os.read(fd, 9) == b"words"
    os.close(fd)
    assert plainfile.read_text(tmp_path / "x", most=4) == "word"
    with pytest.raises(FileNotFoundError):
        plainfile.open_plain(tmp_path / "y")
