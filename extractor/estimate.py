"""What an extraction will take: tokens, bytes, shards, and whether they fit on the disk. Pure but for one statvfs.

Letters: S rows of a shard, C rows of a block, H hidden size, L captured states.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from extractor.words import counted
from hsstore.console import human_bytes
from hsstore.errors import NoSpaceError
from hsstore.layout import assign, check_shard_rows, choose_shape, rows_in_use
from hsstore.records import SampleEntry

_TOKEN_BYTES = 4 + 1  # input_ids int32, loss_mask uint8
_MARGIN = 0.01  # footers, records, indexes, file-system blocks
_MARGIN_BYTES = 8 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What `--dry-run` prints."""

    samples: int
    tokens: int
    assistant_tokens: int
    truncated: int
    longest_tokens: int
    bytes_per_token: int
    """2·H·L of states, 5 of ids and mask."""
    bytes_per_sample_mean: int
    bytes_per_sample_max: int
    total_bytes: int
    """On disk, whole blocks."""
    needed_bytes: int
    """Of the shards that are not committed yet, with a margin."""
    free_bytes: int
    shards: int
    shards_done: int
    shard_rows: int
    chunk_rows: int
    lines: int
    rejected: dict[str, int]
    layers: tuple[str, ...]
    hidden_size: int

    @property
    def states_bytes(self) -> int:
        """Of the states alone, without ids, mask and the rest of the last block of each shard."""
        return self.tokens * (self.bytes_per_token - _TOKEN_BYTES)

    @property
    def fits(self) -> bool:
        return self.needed_bytes <= self.free_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The layout of a run."""

    shard_rows: int
    chunk_rows: int
    shards: Mapping[int, tuple[SampleEntry, ...]]
    """By number."""


def shape_of(
    entries: Sequence[SampleEntry], hidden_size: int, shard_rows: int | None, chunk_rows: int | None = None
) -> Shape:
    """Lay the samples out as `StoreWriter.create` will."""
    rows, chunk = choose_shape(
        n_tokens=sum(e.n_tokens for e in entries),
        longest=max(e.n_tokens for e in entries),
        hidden_size=hidden_size,
        chunk_rows=chunk_rows,
    )
    rows = shard_rows or rows
    check_shard_rows(rows, chunk)
    return Shape(shard_rows=rows, chunk_rows=chunk, shards=dict(enumerate(assign(entries, rows))))


def bytes_per_token(layers: Sequence[str], hidden_size: int) -> int:
    return 2 * hidden_size * len(layers) + _TOKEN_BYTES


def shard_bytes(shape: Shape, numbers: Iterable[int], per_token: int) -> int:
    """Disk that those shards take: their rows in use, in whole blocks."""
    blocks = sum(-(-rows_in_use(shape.shards[n]) // shape.chunk_rows) for n in numbers)
    return blocks * shape.chunk_rows * per_token


def needed_bytes(shape: Shape, todo: Sequence[int], per_token: int) -> int:
    """The same with a margin; 0 when nothing is to be done."""
    return int(shard_bytes(shape, todo, per_token) * (1 + _MARGIN)) + _MARGIN_BYTES if todo else 0


def free_bytes(path: Path) -> int:
    """Free space for this user on the file system where `path` is or will be."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def refuse_if_full(out: Path, needed: int, what: str = "the states") -> None:
    """Raise `NoSpaceError` when it cannot fit; `what` needs so much."""
    free = free_bytes(out)
    if needed > free:
        raise NoSpaceError(
            f"{what} need {human_bytes(needed)}, the file system of {out} has {human_bytes(free)} free",
            hint="free space, or give --out on a larger disk; --dry-run shows the sizes",
        )


def refuse_without_room(out: Path, shape: Shape, todo: Sequence[int], per_token: int, min_free: int = 0) -> None:
    """Raise `NoSpaceError` when the shards `todo` cannot fit with `min_free` left over, in the terms of `--dry-run`."""
    entries = [e for n in todo for e in shape.shards[n]]
    n_tokens = sum(e.n_tokens for e in entries)
    states = human_bytes(n_tokens * (per_token - _TOKEN_BYTES))
    kept = f" and {human_bytes(min_free)} kept free (--min-free)" if min_free else ""
    what = (
        f"{counted(len(entries), 'sample')}, {counted(n_tokens, 'token')}, {states} of states"
        f" in {counted(len(todo), 'shard')}{kept}"
    )
    refuse_if_full(out, needed_bytes(shape, todo, per_token) + min_free if todo else 0, what)
