"""Leases save work: one holder while it lives, another one soon after it is gone."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hsstore import owner, paths
from hsstore.leases import Leases

TAKE = """
import sys, time
from pathlib import Path
from hsstore.leases import Leases
print(Leases(Path(sys.argv[1])).take(0), flush=True)
time.sleep(600)
"""


def test_one_holder_at_a_time(tmp_path: Path) -> None:
    first, second = Leases(tmp_path), Leases(tmp_path)
    assert first.take(0)
    assert first.take(1)
    assert not second.take(0)
    second.release(0)  # not its own
    assert not second.take(0)
    first.release(0)
    assert second.take(0)
    assert sorted(p.name for p in (tmp_path / "staging").iterdir()) == ["000000.lease", "000001.lease"]


def test_a_dead_holder_is_no_holder(tmp_path: Path) -> None:
    """After a crash nobody waits for the lease to run out."""
    holder = subprocess.Popen([sys.executable, "-c", TAKE, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout
    assert holder.stdout.readline().strip() == "True"
    assert not Leases(tmp_path).take(0)
    holder.send_signal(signal.SIGKILL)
    holder.communicate()
    assert Leases(tmp_path).take(0)


def test_a_silent_holder_loses_it_and_does_not_take_it_back(tmp_path: Path) -> None:
    silent, other = Leases(tmp_path, seconds=60), Leases(tmp_path, seconds=60)
    assert silent.take(0)
    os.utime(paths.lease(tmp_path, 0), (1, 1))
    assert other.take(0)
    silent.release(0)
    assert paths.lease(tmp_path, 0).exists()
    assert not silent.take(0)


def test_what_is_held_is_renewed_while_open(tmp_path: Path) -> None:
    with Leases(tmp_path, seconds=0.2) as leases:
        assert leases.take(0)
        os.utime(paths.lease(tmp_path, 0), (1, 1))
        end = time.monotonic() + 240
        while paths.lease(tmp_path, 0).stat().st_mtime == 1:
            assert time.monotonic() < end
            time.sleep(0.02)
    assert not paths.lease(tmp_path, 0).exists()


@pytest.mark.parametrize("content", [b"", b"nonsense", b"\xff\xfe\n"])
def test_garbage_for_a_lease_ends_by_age(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "staging").mkdir()
    paths.lease(tmp_path, 0).write_bytes(content)
    os.utime(paths.lease(tmp_path, 0), (1, 1))
    assert Leases(tmp_path).take(0)


def test_without_hard_links_a_lease_is_a_file_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_link(*_: object) -> None:
        raise PermissionError(1, "no links here")

    monkeypatch.setattr(os, "link", no_link)
    first, second = Leases(tmp_path), Leases(tmp_path)
    assert first.take(0)
    assert not second.take(0)


def test_what_cannot_be_known_is_no_death(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without descriptors, or where /proc shows only one's own, a living writer's work must not look abandoned."""
    holder = subprocess.Popen(["sleep", "600"])
    try:
        text = owner.identity(holder.pid)
        assert owner.state(text) == "alive"
        for code in (errno.EMFILE, errno.EACCES, errno.ENOENT):
            with monkeypatch.context() as patch:
                patch.setattr(owner, "_started", lambda _, code=code: _raise(code))
                assert owner.state(text) == "unknown", errno.errorcode[code]
    finally:
        holder.kill()
        holder.wait()
    assert owner.state(text) == "dead"


def test_the_mark_goes_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of an attempt without its mark would stay for ever: nobody could say that its writer is dead."""
    (tmp_path / "attempt").mkdir()
    owner.mark(tmp_path / "attempt")
    for name in ("a", "z"):
        (tmp_path / "attempt" / name).touch()
    real = os.unlink

    def stubborn(path: Path, **options: int) -> None:
        if Path(path).name == "a":
            raise PermissionError(errno.EACCES, "injected", str(path))
        real(path, **options)

    monkeypatch.setattr(os, "unlink", stubborn)
    with pytest.raises(PermissionError):
        owner.remove(tmp_path / "attempt")
    monkeypatch.undo()
    assert sorted(p.name for p in (tmp_path / "attempt").iterdir()) == ["a", owner.MARK]
    owner.remove(tmp_path / "attempt")
    assert not (tmp_path / "attempt").exists()


def test_a_lease_that_could_not_be_taken_whole_is_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be nobody's: not renewed, not released, and everybody would wait until it ends."""
    real, failed = os.unlink, []

    def fails_once(path: Path, **options: int) -> None:
        if str(path).endswith(".tmp") and not failed:
            failed.append(path)
            raise OSError(errno.EIO, "injected", str(path))
        real(path, **options)

    leases = Leases(tmp_path)
    monkeypatch.setattr(os, "unlink", fails_once)
    with pytest.raises(OSError, match="injected"):
        leases.take(0)
    assert failed
    assert Leases(tmp_path).take(0)


def _raise(code: int) -> str:
    raise OSError(code, os.strerror(code))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["fifo", "device", "circle", "directory"])
def test_what_is_no_lease_is_not_read_and_ends_by_age(tmp_path: Path, kind: str) -> None:
    """Nor does it keep anybody from the shard: where no lease can lie the work goes on without one."""
    path = paths.lease(tmp_path, 0)
    path.parent.mkdir()
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    else:
        os.symlink("/dev/zero" if kind == "device" else path, path)
    leases = Leases(tmp_path)
    assert not leases.take(0)  # somebody may have meant something by it
    os.utime(path, (1, 1), follow_symlinks=False)
    assert leases.take(0)
    assert path.is_dir() == (kind == "directory")
    assert path.is_file() == (kind != "directory")
    leases.release(0)
    assert path.is_dir() == (kind == "directory")
