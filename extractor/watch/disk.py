"""The disk while an extraction runs: no shard is begun that might not fit, so that ENOSPC never strikes.

Staged files have their full size and no blocks yet; what they will still take, this run's and other living writers',
is reckoned as taken. Responsible for measuring and deciding; leaves to `extractor.capture` when to ask, to
`extractor.estimate` whether all of it would fit. A user's quota (EDQUOT) shows in statvfs on some file systems only:
where it does not, the write that meets it ends the run, as a full disk does.

Letters: S rows of a shard, C rows of a block.
"""

from __future__ import annotations

import contextlib
import enum
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from extractor import estimate
from extractor.watch.events import Watcher
from hsstore import owner, paths
from hsstore.console import human_bytes
from hsstore.errors import NoSpaceError

DEFAULT_KEEP_BYTES = 4 << 20
"""Records, indexes and the log. Less than the margin of `extractor.estimate`: what was let begin is let end."""
_EVERY_SECONDS = 5.0
_BLOCK = 512  # unit of st_blocks


class Room(enum.Enum):
    """What the space allows."""

    ENOUGH = "enough"
    LOW = "low"
    """What is open fits, nothing more."""
    OUT = "out"
    """Not even what is open."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """A file system, and what is promised on it."""

    free: int
    """For this user."""
    ours: int
    """That the open shards of this run will still take."""
    others: int = 0
    """That those of other living writers of the store will."""


def judge(space: Space, next_bytes: int, keep: int) -> Room:
    """Whether a shard of `next_bytes` may be begun (0: whether to go on as now) with `keep` left over at its end."""
    if space.free < space.ours:
        return Room.OUT
    return Room.LOW if space.free < needed(space, next_bytes, keep) else Room.ENOUGH


def needed(space: Space, next_bytes: int, keep: int) -> int:
    return space.ours + space.others + next_bytes + keep


def measure(root: Path) -> Space:
    """Of the store at `root`."""
    ours, others = _promised(root / paths.STAGING)
    return Space(free=estimate.free_bytes(root), ours=ours, others=others)


def _promised(staging: Path) -> tuple[int, int]:
    """Bytes of staged files that have no blocks yet: (this process's, those of others that may live)."""
    me, ours, others = owner.identity(os.getpid()), 0, 0
    for attempt in _directories(staging):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # committed or dropped meanwhile
            n_bytes = sum(_unwritten(Path(file.path)) for file in os.scandir(attempt) if file.name != owner.MARK)
            if _mark(attempt) == me:
                ours += n_bytes
            elif owner.state_of(attempt) != "dead":
                others += n_bytes
    return ours, others


def _directories(staging: Path) -> list[Path]:
    try:
        return [Path(entry.path) for entry in os.scandir(staging) if entry.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        return []


def _unwritten(file: Path) -> int:
    found = os.lstat(file)
    return max(0, found.st_size - found.st_blocks * _BLOCK)


def _mark(attempt: Path) -> str:
    return (attempt / owner.MARK).read_text(errors="replace")


class DiskGuard:
    """Asked before each shard and, now and then, in between."""

    def __init__(
        self,
        root: Path,
        watcher: Watcher,
        *,
        keep: int | None = None,
        resume: str = "",
        every_seconds: float = _EVERY_SECONDS,
        clock: Callable[[], float] = time.monotonic,
        look: Callable[[Path], Space] = measure,
    ) -> None:
        """`keep`: of --min-free; `resume`: the command that continues the run."""
        self._root, self._watcher, self._resume = root, watcher, resume
        self._keep = DEFAULT_KEEP_BYTES if keep is None else keep
        self._is_asked = keep is not None
        self._every, self._clock, self._look = every_seconds, clock, look
        self._last = -every_seconds
        self.shortage: NoSpaceError | None = None
        """Once this is set nothing more may be staged; raise it when what is open is committed."""

    def room_for(self, n_bytes: int) -> bool:
        """Whether a shard of that size may be staged. Once no, always no.

        Raises `NoSpaceError` when not even the open shards can be finished.
        """
        if self.shortage is None:
            self._judge(n_bytes)
        return self.shortage is None

    def tick(self) -> None:
        """Between shards, as often as one likes: looks every few seconds. Raises as `room_for` does."""
        if self._clock() - self._last >= self._every:
            self._judge(0)

    def _judge(self, n_bytes: int) -> None:
        self._last = self._clock()
        space = self._look(self._root)
        room = judge(space, n_bytes, self._keep)
        if room is Room.ENOUGH:
            return
        error = self._error(space, n_bytes)
        if self.shortage is None:
            self.shortage = error
            self._watcher.disk_low(space.free, needed(space, n_bytes, self._keep))
        if room is Room.OUT:
            raise error

    def _error(self, space: Space, n_bytes: int) -> NoSpaceError:
        parts = [
            f"the next shard takes {human_bytes(n_bytes)}" if n_bytes else "",
            f"open shards still take {human_bytes(space.ours)}" if space.ours else "",
            f"those of other writers {human_bytes(space.others)}" if space.others else "",
            f"{human_bytes(self._keep)} {'are kept free by --min-free' if self._is_asked else 'are for records'}",
        ]
        command = f":\n  {self._resume}" if self._resume else " with --resume"
        return NoSpaceError(
            f"the file system of {self._root} has {human_bytes(space.free)} free: {', '.join(filter(None, parts))}",
            hint="every committed shard is kept; make space (a quota counts too: EDQUOT), then continue" + command,
        )
