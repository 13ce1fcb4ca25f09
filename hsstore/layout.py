"""Which sample lies in which rows of which shard, decided from lengths alone, before a verifier runs.

Pure and deterministic: equal inputs give equal layouts, whoever computes them, so a crashed run, a second worker and a
verifier agree without talking. Leaves to `writer` what is done with a placement.

Letters: N samples, S rows of a shard, C rows of a block, H hidden size.
"""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hsstore.errors import UsageError
from hsstore.records import ArraySpec, Capture, SampleEntry, ShardPlan

CHUNK_ROWS = 256
OPEN_SHARDS = 16
_SHARD_BYTES = 1 << 30
_SMALL_STORE_SHARDS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    shard: int
    row: int


def choose_shape(*, n_tokens: int, longest: int, hidden_size: int, chunk_rows: int | None = None) -> tuple[int, int]:
    """(S, C): S a power of two whose hidden files are 0.5 to 1 GiB and at least 4 × the longest sample.

    S is smaller for small data: such a set is spread over about 16 shards, so that a crash costs a sixteenth of it.
    """
    chunk = chunk_rows or CHUNK_ROWS
    full = 1 << ((_SHARD_BYTES // (2 * hidden_size)).bit_length() - 1)
    small = _power_of_two(-(-n_tokens // _SMALL_STORE_SHARDS))
    shard_rows = max(min(full, small), _power_of_two(4 * longest), _power_of_two(chunk))
    if chunk & (chunk - 1):
        raise UsageError(f"chunk rows must be a power of two, found {chunk}")
    return shard_rows, chunk


def check_shard_rows(rows: int, chunk: int) -> None:
    """Raise `UsageError` unless S = `rows` is a power of two and a multiple of C = `chunk`."""
    if rows % chunk or rows & (rows - 1):
        raise UsageError(f"shard rows must be a power of two and a multiple of {chunk}, found {rows}")


def _power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def place(lengths: Iterable[int], shard_rows: int, open_shards: int = OPEN_SHARDS) -> list[Placement]:
    """Best fit over at most `open_shards` open shards, in source order (0.1 % of the rows wasted on real lengths).

    Raises `UsageError` for a sample that is longer than a shard: a sample never crosses a shard.
    """
    placements: list[Placement] = []
    free: list[tuple[int, int]] = []  # (free rows, shard) of the open shards, ascending
    n_shards = 0
    for length in lengths:
        if not 0 < length <= shard_rows:
            raise UsageError(
                f"a sample has {length} tokens; a shard of this store holds 1 to {shard_rows}",
                hint=f"give --shard-rows of at least {length}, or a smaller --max-length",
            )
        at = bisect.bisect_left(free, (length, -1))
        if at == len(free):
            if len(free) == open_shards:
                free.pop(0)
            room, shard = shard_rows, n_shards
            n_shards += 1
        else:
            room, shard = free.pop(at)
        placements.append(Placement(shard=shard, row=shard_rows - room))
        if room > length:
            bisect.insort(free, (room - length, shard))
    return placements


def assign(samples: Sequence[SampleEntry], shard_rows: int) -> list[tuple[SampleEntry, ...]]:
    """The samples of every shard, in row order. The `row` of the given entries is ignored and set."""
    shards: list[list[SampleEntry]] = []
    for sample, spot in zip(samples, place((s.n_tokens for s in samples), shard_rows), strict=True):
        while len(shards) <= spot.shard:
            shards.append([])
        shards[spot.shard].append(SampleEntry(sample.uid, sample.source_index, spot.row, sample.n_tokens, sample.flags))
    return [tuple(shard) for shard in shards]


def rows_in_use(entries: Iterable[SampleEntry]) -> int:
    """One past the last row of a shard's samples."""
    return max((e.row + e.n_tokens for e in entries), default=0)


def shard_plans(shards: Sequence[Sequence[SampleEntry]]) -> tuple[ShardPlan, ...]:
    return tuple(ShardPlan(n_samples=len(s), n_rows=rows_in_use(s)) for s in shards)


def layout_sha256(shards: Sequence[Sequence[SampleEntry]]) -> str:
    """SHA-256 over one line `shard row n_tokens source_index uid` per sample, in shard and row order."""
    digest = hashlib.sha256()
    for number, entries in enumerate(shards):
        for e in entries:
            digest.update(f"{number} {e.row} {e.n_tokens} {e.source_index} {e.uid}\n".encode())
    return digest.hexdigest()


def arrays_of(capture: Capture) -> tuple[ArraySpec, ...]:
    """The arrays a store of that capture has: one per captured state, then tokens."""
    hidden = tuple(
        ArraySpec(name=f"hidden/{k}", dtype="uint16", logical_dtype="bfloat16", row_shape=(capture.hidden_size,))
        for k in capture.layers
    )
    return (
        *hidden,
        ArraySpec(name="tokens/input_ids", dtype="int32", logical_dtype="int32", row_shape=()),
        ArraySpec(name="tokens/loss_mask", dtype="uint8", logical_dtype="uint8", row_shape=()),
    )
