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
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from extractor import estimate
from extractor.watch.events import Deaf, Watcher
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


class DiskGuard(Deaf):
    """Asked before each shard; as a watcher of the run it looks every few seconds in between."""

    def __init__(
        self,
        root: Path,
        watcher: Watcher,
        todo: Mapping[int, int],
        *,
        keep: int | None = None,
        resume: str = "",
        every_seconds: float = _EVERY_SECONDS,
        clock: Callable[[], float] = time.monotonic,
        look: Callable[[Path], Space] = measure,
    ) -> None:
        """`todo`: bytes of each shard to be extracted; `keep`: of --min-free; `resume`: the command that goes on."""
        self._root, self._watcher, self._todo, self._resume = root, watcher, dict(todo), resume
        self._keep = DEFAULT_KEEP_BYTES if keep is None else keep
        self._is_asked = keep is not None
        self._every, self._clock, self._look = every_seconds, clock, look
        self._last = clock()
        self._shortage: NoSpaceError | None = None

    def low(self) -> NoSpaceError | None:
        """Why no further shard may be staged; None while there is room. Once there is a reason, it stays.

        Raises `NoSpaceError` when not even the open shards can be finished.
        """
        if self._shortage is None:
            # The largest: every one of them must fit sooner or later.
            self._judge(max(self._todo.values(), default=0))
        return self._shortage

    def shard_staged(self, shard: int, n_samples: int, n_tokens: int) -> None:
        self._todo.pop(shard, None)

    def shard_elsewhere(self, shard: int, n_samples: int, n_tokens: int) -> None:
        self._todo.pop(shard, None)

    def sample_done(self, source_index: int, n_tokens: int, ok: bool) -> None:
        self._look_again()

    def waiting(self, n_shards: int) -> None:
        self._look_again()

    def _look_again(self) -> None:
        if self._clock() - self._last >= self._every:
            self._judge(0)

    def _judge(self, n_bytes: int) -> None:
        self._last = self._clock()
        space = self._look(self._root)
        room = judge(space, n_bytes, self._keep)
        if room is Room.ENOUGH:
            return
        error = self._error(space, n_bytes)
        if self._shortage is None:
            self._shortage = error
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
