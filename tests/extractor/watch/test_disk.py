"""No shard is begun that might not fit, what is open is finished, and ENOSPC is never met."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from extractor.watch.disk import DEFAULT_KEEP_BYTES, DiskGuard, Room, Space, judge, measure
from extractor.watch.events import Deaf
from hsstore import owner, paths
from hsstore.errors import NoSpaceError

GB = 10**9


@pytest.mark.parametrize(
    ("space", "next_bytes", "keep", "room"),
    [
        (Space(free=10 * GB, ours=2 * GB), 4 * GB, 0, Room.ENOUGH),
        (Space(free=6 * GB, ours=2 * GB), 4 * GB, 0, Room.ENOUGH),
        (Space(free=6 * GB - 1, ours=2 * GB), 4 * GB, 0, Room.LOW),
        (Space(free=10 * GB, ours=2 * GB, others=4 * GB + 1), 4 * GB, 0, Room.LOW),
        (Space(free=10 * GB, ours=2 * GB), 4 * GB, 5 * GB, Room.LOW),
        (Space(free=2 * GB, ours=2 * GB), 0, GB, Room.LOW),
        (Space(free=2 * GB - 1, ours=2 * GB), 0, 0, Room.OUT),
        (Space(free=2 * GB, ours=2 * GB, others=90 * GB), 0, 0, Room.LOW),  # they may stop; we finish
        (Space(free=0, ours=0), 0, 0, Room.ENOUGH),
    ],
)
def test_what_the_space_allows(space: Space, next_bytes: int, keep: int, room: Room) -> None:
    assert judge(space, next_bytes, keep) is room


def stage(root: Path, name: str, size: int, written: int, identity: str | None) -> Path:
    """An attempt as a writer leaves it: sparse files, a mark."""
    attempt = root / paths.STAGING / name
    attempt.mkdir(parents=True)
    if identity is not None:
        (attempt / owner.MARK).write_text(identity)
    with open(attempt / "hidden.final", "wb") as file:
        file.truncate(size)
        file.write(b"\xff" * written)
        file.flush()
        os.fsync(file.fileno())
    return attempt


def test_what_staged_files_will_still_take_is_as_good_as_taken(tmp_path: Path) -> None:
    """Ours and others' apart; an attempt of a process that died takes nothing more, one of another machine may."""
    mib = 1 << 20
    me, machine = owner.identity(os.getpid()), owner.identity(os.getpid()).rsplit(" ", 2)[0]
    assert measure(tmp_path).ours == measure(tmp_path).others == 0
    stage(tmp_path, "000000.a", 8 * mib, 2 * mib, me)
    stage(tmp_path, "000001.b", 4 * mib, 0, "elsewhere/boot/ns 17 99")
    stage(tmp_path, "000002.c", 64 * mib, 0, f"{machine} {os.getpid()} 1")  # a recycled process id: dead
    (tmp_path / paths.STAGING / "000000.lease").write_text(me)
    space = measure(tmp_path)
    assert 5 * mib < space.ours <= 6 * mib
    assert space.others == 4 * mib
    assert space.free > 0


class Watched(Deaf):
    def __init__(self) -> None:
        self.low: list[tuple[int, int]] = []

    def disk_low(self, free: int, needed: int) -> None:
        self.low.append((free, needed))


class Disk:
    """A file system that shrinks as a test says, and a clock."""

    def __init__(self, tmp_path: Path, todo: dict[int, int], **options: Any) -> None:
        self.space, self.now, self.looks = Space(free=100 * GB, ours=0), 0.0, 0
        self.heard = Watched()
        self.guard = DiskGuard(
            tmp_path, self.heard, todo, clock=lambda: self.now, look=self._look, resume="hsstore extract …", **options
        )

    def _look(self, _root: Path) -> Space:
        self.looks += 1
        return self.space


def test_no_further_shard_is_staged_on_a_disk_that_is_nearly_full(tmp_path: Path) -> None:
    """One event, one error with every number and the command that goes on; it stays when space comes back."""
    disk = Disk(tmp_path, {0: 4 * GB, 1: 4 * GB})
    assert disk.guard.low() is None
    disk.guard.shard_staged(0, 1, 1)
    disk.space = Space(free=5 * GB, ours=2 * GB, others=GB)
    error = disk.guard.low()
    assert isinstance(error, NoSpaceError)
    assert error.exit_code == 4
    for word in ("5 GB free", "next shard takes 4 GB", "still take 2 GB", "other writers 1 GB", "EDQUOT"):
        assert word in str(error)
    assert "hsstore extract …" in error.hint
    assert disk.heard.low == [(5 * GB, 7 * GB + DEFAULT_KEEP_BYTES)]
    disk.space = Space(free=100 * GB, ours=0)
    assert disk.guard.low() is error
    assert len(disk.heard.low) == 1


def test_the_last_shard_needs_no_room_for_another(tmp_path: Path) -> None:
    """What was let begin, since it fits with a margin, is let end: only shards that are left to do are reckoned."""
    disk = Disk(tmp_path, {0: 4 * GB, 1: 1 << 20})
    disk.guard.shard_elsewhere(0, 1, 1)
    disk.space = Space(free=(1 << 20) + DEFAULT_KEEP_BYTES, ours=0)
    assert disk.guard.low() is None
    disk.guard.shard_staged(1, 1, 1)
    disk.space = Space(free=DEFAULT_KEEP_BYTES, ours=0)
    assert disk.guard.low() is None


def test_min_free_is_kept(tmp_path: Path) -> None:
    disk = Disk(tmp_path, {0: 4 * GB}, keep=50 * GB)
    disk.space = Space(free=53 * GB, ours=0)
    error = disk.guard.low()
    assert error is not None
    assert "50 GB are kept free by --min-free" in str(error)


def test_it_looks_every_few_seconds_while_samples_come_in(tmp_path: Path) -> None:
    disk = Disk(tmp_path, {0: 4 * GB}, every_seconds=5.0)
    disk.guard.sample_done(0, 9, True)
    assert disk.looks == 0
    disk.now = 5.0
    disk.guard.sample_done(1, 9, True)
    disk.guard.sample_done(2, 9, True)
    assert disk.looks == 1
    disk.now, disk.space = 10.0, Space(free=2 * GB, ours=2 * GB)
    disk.guard.waiting(1)
    assert disk.heard.low == [(2 * GB, 2 * GB + DEFAULT_KEEP_BYTES)]
    assert disk.guard.low() is not None


def test_a_disk_that_cannot_take_what_is_open_ends_the_run_at_once(tmp_path: Path) -> None:
    """Before the write that would meet ENOSPC, also when the guard said before that space is low."""
    disk = Disk(tmp_path, {}, every_seconds=0.0)
    disk.space = Space(free=2 * GB, ours=2 * GB)
    disk.guard.sample_done(0, 9, True)
    disk.space = Space(free=GB, ours=2 * GB)
    with pytest.raises(NoSpaceError, match="1 GB free"):
        disk.guard.sample_done(1, 9, True)
