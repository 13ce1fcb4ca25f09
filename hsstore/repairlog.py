"""What a repair is told to do, and what it reports: one event for each thing done or not possible, and the counts.

Leaves doing it to `repair`, printing it to the command.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hsstore.records import SampleEntry

Action = Literal["refused", "restored", "rebuilt", "republished", "quarantined", "lost", "left"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What is looked at, and how far to go."""

    full: bool = False
    """Read every byte of the store; else what a quick verification reads, and `suspects`."""
    suspects: frozenset[str] = frozenset()
    """Files that an earlier verification named; they are read whole."""
    dry_run: bool = False
    """Say what would be done; write nothing and fetch no block."""
    state: Path | None = None
    """Directory of the ledger; the files that a verification noted there as damaged are suspects too."""
    quarantine_rest: bool = False
    """Put a tombstone on every shard of which something is lost, provided that every replica answered to the end: one
    that stayed away may have it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One thing that was done, or could not be."""

    action: Action
    """`restored` a document from a replica, `rebuilt` a derived file here, `republished` a shard file, `quarantined` a
    shard, `refused` a replica; `lost`: no replica has it whole; `left`: damage that replicas cannot mend."""
    file: str = ""
    """Path relative to the store."""
    detail: str = ""
    shard: int | None = None
    rows: tuple[int, int] | None = None
    """First and last row inside the shard that nobody has."""
    samples: tuple[SampleEntry, ...] = ()
    """Samples that have rows there: [uid, source_index, row, n_tokens, flags]."""
    blocks: int = 0
    """Blocks of rows that were fetched; in a dry run those that would be."""
    replicas: tuple[str, ...] = ()
    """Where it came from, or which one is refused."""

    def __str__(self) -> str:
        where = self.file + (f", rows {self.rows[0]}-{self.rows[1]}" if self.rows else "")
        lines = ", ".join(f"{s.uid[:12]} (line {s.source_index + 1})" for s in self.samples[:8])
        more = f" and {len(self.samples) - 8} more" if len(self.samples) > 8 else ""
        touched = f"; samples {lines}{more}" if self.samples else ""
        return f"{self.action}: {': '.join(filter(None, (where, self.detail)))}{touched}"


@dataclass(slots=True)
class Summary:
    """The counts of one repair; in a dry run what they would be."""

    dry_run: bool = False
    files_examined: int = 0
    """Shard files that were read whole because something spoke against them."""
    files_republished: int = 0
    documents_restored: int = 0
    derived_rebuilt: int = 0
    blocks_fetched: int = 0
    bytes_fetched: int = 0
    """Of shard files, whatever became of them."""
    replicas_refused: int = 0
    """Times that one was not used: for good, or for a shard of other content."""
    replicas_away: int = 0
    """Those that did not answer, or not to the end: they may have what is lost."""
    replica_faults: int = 0
    """Blocks, documents and files that a replica had and that were damaged there."""
    suspects_unknown: int = 0
    """Names in a list of findings that no record of this store has."""
    quarantined: int = 0
    """Shards."""
    lost: int = 0
    """Files and documents that no replica has whole."""
    remaining: int = 0
    """Files that are still damaged; 0 is a sound store."""
    manifest_id: str = ""
