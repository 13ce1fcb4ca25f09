"""What a verification reports: findings with their place, and the counts of one run.

Letters: S rows of a shard.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from hsstore.records import SampleEntry, ShardRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something that is not as committed."""

    severity: Literal["damage", "note"]
    """`damage` makes the exit code 3; a `note` is a state to know of, such as an open shard."""
    kind: str
    """Stable code: record, layout, tombstone, manifest, missing, size, block, footer, digest, read, metadata, derived,
    unknown; of notes: open, stale, staging, unpublished, quarantined."""
    file: str
    """Path relative to the store."""
    detail: str
    """What was expected and what was found."""
    shard: int | None = None
    rows: tuple[int, int] | None = None
    """First and last bad row inside the shard."""
    samples: tuple[SampleEntry, ...] = ()
    """Samples that have rows there: [uid, source_index, row, n_tokens, flags]."""

    def __str__(self) -> str:
        where = f"{self.file}" + (f", rows {self.rows[0]}-{self.rows[1]}" if self.rows else "")
        lines = ", ".join(f"{s.uid[:12]} (line {s.source_index + 1})" for s in self.samples[:8])
        more = f" and {len(self.samples) - 8} more" if len(self.samples) > 8 else ""
        touched = f"; samples {lines}{more}" if self.samples else ""
        return f"{self.severity}: {where}: {self.detail}{touched}"


@dataclass(slots=True)
class Summary:
    """What a verification looked at; filled while the findings stream."""

    depth: str = ""
    """quick, full, part 1/7, sample 5%, 1000000 bytes."""
    seed: int | None = None
    """Of what was drawn at random; the same seed draws the same from the same store."""
    shards: int = 0
    open_shards: int = 0
    quarantined_shards: int = 0
    samples: int = 0
    files: int = 0
    files_whole: int = 0
    """Of them, read to the last byte."""
    files_skipped: int = 0
    """Of them, left out because they were verified before."""
    blocks: int = 0
    """Read of files that were not read whole."""
    bytes_read: int = 0
    bytes_to_read: int = 0
    """What the files take that are read; grows when damage is looked at more closely."""
    damage: int = 0
    notes: int = 0
    manifest_id: str = ""


def printable(name: str) -> str:
    """A file name as one line of valid UTF-8, whatever bytes it is made of."""
    text = os.fsencode(name).decode("utf-8", "backslashreplace")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """[3, 4, 5, 9] → (3, 5), (9, 9)."""
    start = previous = None
    for n in numbers:
        if start is None or previous is None or n != previous + 1:
            if start is not None and previous is not None:
                yield start, previous
            start = n
        previous = n
    if start is not None and previous is not None:
        yield start, previous


def damage(kind: str, file: str, detail: str, shard: int | None = None) -> Finding:
    return Finding(severity="damage", kind=kind, file=file, detail=printable(detail), shard=shard)


def note(kind: str, file: str, detail: str, shard: int | None = None) -> Finding:
    return Finding(severity="note", kind=kind, file=file, detail=printable(detail), shard=shard)


def stale(file: str, detail: str) -> Finding:
    return note("stale", file, f"{detail}; `hsstore manifest build` makes it current")


def at(record: ShardRecord, kind: str, file: str, detail: str, rows: tuple[int, int] | None) -> Finding:
    samples: tuple[SampleEntry, ...] = ()
    if rows is not None:
        samples = tuple(s for s in record.samples if s.row <= rows[1] and rows[0] < s.row + s.n_tokens)
    return Finding(
        severity="damage", kind=kind, file=file, detail=detail, shard=record.shard, rows=rows, samples=samples
    )
