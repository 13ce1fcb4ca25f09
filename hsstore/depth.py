"""How deep a verification goes: which files it reads whole, which blocks of the others.

Every depth checks everything that `quick` does. Choices are pure functions of names, sizes and a seed, so a run can be
repeated and parts add up. Leaves reading to `filecheck`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

SMALL_FILE_BYTES = 128 << 10
SPOT_BLOCK_BYTES = 64 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The n-th of `total` parts of the files, whole. A file stays in its part when the store grows or moves."""

    n: int
    """From 1."""
    total: int

    def __str__(self) -> str:
        return f"part {self.n}/{self.total}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A share of all blocks of rows, drawn at random."""

    fraction: float
    seed: int

    def __str__(self) -> str:
        return f"sample {100 * self.fraction:g}%"


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """As many blocks, drawn at random, as make that many bytes."""

    n_bytes: int
    seed: int

    def __str__(self) -> str:
        return f"{self.n_bytes} bytes"


Depth = Literal["quick", "full"] | Part | Sample | Budget


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """A shard file as a choice sees it."""

    name: str
    """Path relative to the store."""
    n_bytes: int
    block_bytes: int
    n_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What is read of one file besides its footer."""

    whole: bool = False
    """Every byte: SHA-256."""
    blocks: tuple[int, ...] = ()
    """These blocks: CRC32C; ascending."""


def choose(depth: Depth, extents: Sequence[Extent]) -> list[Choice]:
    """What a verification of that depth reads of each file."""
    match depth:
        case "full":
            return [Choice(whole=True)] * len(extents)
        case Part(n=n, total=total):
            return [Choice(whole=True) if part_of(e.name, total) == n else spot(e) for e in extents]
        case Sample() | Budget():
            drawn = _draw(depth, extents)
            return [spot(e, blocks) for e, blocks in zip(extents, drawn, strict=True)]
    return [spot(e) for e in extents]


def spot(extent: Extent, more: Sequence[int] = ()) -> Choice:
    """What `quick` reads of a file: all of a small one, three blocks of one with small blocks, and these."""
    if extent.n_bytes <= SMALL_FILE_BYTES:
        return Choice(whole=True)
    spots = {0, extent.n_blocks // 2, extent.n_blocks - 1} if extent.block_bytes <= SPOT_BLOCK_BYTES else set()
    return Choice(blocks=tuple(sorted({*spots, *more})))


def part_of(name: str, total: int) -> int:
    """In which of `total` parts a file is, from 1. By its name alone."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % total + 1


def _draw(depth: Sample | Budget, extents: Sequence[Extent]) -> list[list[int]]:
    """The drawn blocks of each file, at least one in all. Files that are read whole anyhow take no part."""
    counts = [0 if e.n_bytes <= SMALL_FILE_BYTES else e.n_blocks for e in extents]
    first = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
    order = np.argsort(_hash(int(first[-1]), depth.seed), kind="stable")
    if isinstance(depth, Sample):
        n = round(depth.fraction * len(order))
    else:
        sizes = np.repeat([e.block_bytes for e in extents], counts)[order]
        n = int(np.searchsorted(np.cumsum(sizes), depth.n_bytes, side="right"))
    drawn = np.sort(order[: max(n, 1)])
    edges = np.searchsorted(drawn, first)
    return [(drawn[a:b] - start).tolist() for a, b, start in zip(edges[:-1], edges[1:], first[:-1], strict=True)]


def _hash(n: int, seed: int) -> npt.NDArray[np.uint64]:
    """n numbers that look random: splitmix64 of 0 … n-1 from that seed; the same on every machine and version."""
    start = np.uint64(int.from_bytes(hashlib.sha256(str(seed).encode()).digest()[:8], "big"))
    z = np.arange(1, n + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + start
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
