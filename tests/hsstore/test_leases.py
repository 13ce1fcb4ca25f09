"""Leases save work: one holder while it lives, another one soon after it is gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hsstore import paths
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
        end = time.monotonic() + 30
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
