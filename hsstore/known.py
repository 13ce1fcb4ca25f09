"""What a verification could trust so far, and how it reads the small documents of a store.

Never raises on damage. Leaves to `checks`, `builtcheck` and `namecheck` what the documents should be.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from hsstore import paths
from hsstore.errors import DamagedError, HsstoreError, NotFoundError
from hsstore.reading import raise_if_ours
from hsstore.records import LayoutRecord, Manifest, ShardRecord, StoreHeader, Tombstone, decode, read_plain


@dataclass(slots=True)
class Known:
    """What could be trusted so far; the later checks rest on it."""

    root: Path
    header: StoreHeader
    layouts: list[LayoutRecord] = field(default_factory=list)
    layouts_sound: bool = True
    tombstones: list[Tombstone] = field(default_factory=list)
    quarantined: dict[int, Tombstone] = field(default_factory=dict)
    records: dict[int, ShardRecord] = field(default_factory=dict)
    unreadable: set[int] = field(default_factory=set)
    """Shards whose files nobody can judge."""
    open_shards: int = 0
    manifest_id: str = ""

    @property
    def not_judged(self) -> set[int]:
        return self.unreadable | set(self.quarantined)


def bare(known: Known, error: HsstoreError | OSError) -> str:
    """The message without the store's own path."""
    if isinstance(error, HsstoreError):
        return error.message.removeprefix(f"{known.root}/")
    raise_if_ours(error)
    return f"cannot be read: {error.strerror}"


def small_file(known: Known, relative: str) -> bytes | None:
    """A small file whole; None when it is missing, b"" (equal to nothing that is built) when it cannot be read."""
    try:
        return read_plain(known.root / relative)
    except NotFoundError:
        return None
    except DamagedError:
        return b""
    except OSError as error:
        raise_if_ours(error)
        return b""


def manifest_on_disk(known: Known) -> Manifest | None:
    """manifest.json as it lies there; None when it cannot be read as one (`_derived` says what is wrong)."""
    try:
        return decode(small_file(known, paths.MANIFEST) or b"", Manifest, paths.MANIFEST)
    except HsstoreError:
        return None
