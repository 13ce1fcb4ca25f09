"""What a store no longer needs: attempts whose writer is gone, files that never got their name, leases that ended.

Finds and, when told to, removes. Nothing that is committed, and nothing that a living writer may still commit: an
attempt goes only when its writer is certainly dead, or when its shard is committed by another attempt (its record is
then refused by the commit itself). In doubt (another machine, no mark) it stays, unless the caller gives an age. Files
of a quarantined shard go only when asked for.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hsstore import leases, manifest, owner, paths, zarrmeta
from hsstore.durable import is_temporary
from hsstore.errors import HsstoreError
from hsstore.records import StoreHeader

YOUNG_SECONDS = 600.0
"""A file that waits for its name lives for milliseconds, an unmarked attempt too: younger ones are left alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Garbage:
    """One file or directory that may go."""

    path: Path
    kind: Literal["attempt", "temporary", "lease", "quarantined"]
    reason: str
    bytes: int
    """Disk that removing it frees."""


def find(
    root: Path, *, abandoned_seconds: float | None = None, quarantined: bool = False, now: float | None = None
) -> list[Garbage]:
    """Everything that may go.

    `abandoned_seconds`: also attempts of writers nothing is known of, when they were not touched for that long.
    `quarantined`: also the data files of quarantined shards.
    """
    header = manifest.load_header(root)
    search = _Search(root, header, time.time() if now is None else now, abandoned_seconds)
    found = [*search.attempts(), *search.leases(), *search.temporaries()]
    if quarantined:
        found += search.quarantined_files()
    return found


def strange(root: Path) -> list[Path]:
    """Directories where leases belong. They stay: whose they are, and what is in them, nobody here knows."""
    return [place for place in _lease_names(root) if _is_directory(place)]


def remove(garbage: Iterable[Garbage]) -> int:
    """Remove it. Returns the bytes freed. What another one has removed meanwhile is no error."""
    freed = 0
    for item in garbage:
        try:
            if item.path.is_dir() and not item.path.is_symlink():
                owner.remove(item.path)
            else:
                item.path.unlink()
        except FileNotFoundError:
            continue
        freed += item.bytes
    return freed


class _Search:
    def __init__(self, root: Path, header: StoreHeader, now: float, abandoned_seconds: float | None) -> None:
        self.root, self.header, self.now, self.abandoned_seconds = root, header, now, abandoned_seconds
        # Tombstones before records: what is quarantined is given up, whatever its record says.
        self.dead = manifest.quarantined(manifest.load_tombstones(root, header))

    def attempts(self) -> Iterator[Garbage]:
        directory = self.root / paths.STAGING
        for place in sorted(directory.iterdir()) if directory.is_dir() else ():
            if place.is_dir() and not paths.is_lease(place.name) and (reason := self._given_up(place)):
                yield Garbage(path=place, kind="attempt", reason=reason, bytes=_disk_bytes(place))

    def _given_up(self, place: Path) -> str:
        """Why nobody needs an attempt; "" when somebody may."""
        # Before the record: a living writer may commit between the two looks, a dead one commits nothing any more.
        state = owner.state_of(place)
        number, _, attempt = place.name.partition(".")
        try:
            winner = self._winner(int(number)) if number.isdigit() else None
        except HsstoreError:
            return ""  # its record cannot say whose it is: these may be the only files of a committed shard
        if winner == attempt:
            return ""  # committed, not published yet: opening for writing does that
        if state == "dead":
            return "its writer is dead"
        if state == "alive":
            return ""
        age = self.now - _touched(place)
        if winner is not None and age > YOUNG_SECONDS:
            return f"shard {int(number)} was committed by another attempt"
        if age > YOUNG_SECONDS and not any(place.iterdir()):
            return "it is empty"
        if self.abandoned_seconds is not None and age > self.abandoned_seconds:
            return f"not touched for {age / 3600:.1f} h"
        return ""

    def _winner(self, shard: int) -> str | None:
        """Attempt that committed a shard, "" when the record cannot say; None for an open shard."""
        if not paths.record(self.root, shard).exists():
            return None
        try:
            return manifest.load_record(self.root, self.header, shard).attempt
        except HsstoreError:
            if shard in self.dead:
                return ""
            raise

    def leases(self) -> Iterator[Garbage]:
        for place in _lease_names(self.root):
            if not _is_directory(place) and leases.ended(place, self.now):
                yield Garbage(path=place, kind="lease", reason="its holder is gone", bytes=_disk_bytes(place))

    def temporaries(self) -> Iterator[Garbage]:
        names = ("", paths.LAYOUTS, paths.RECORDS, paths.TOMBSTONES, paths.INDEX, paths.MANIFESTS, paths.STAGING)
        places = [self.root / name for name in names]
        places += [self.root / zarrmeta.ROOT / group for group in zarrmeta.GROUPS]
        places += [self.root / zarrmeta.ROOT / spec.name for spec in self.header.arrays]
        written = (p for d in dict.fromkeys(places) if d.is_dir() for p in d.iterdir() if is_temporary(p.name))
        created = re.compile(re.escape(f".{self.root.absolute().name}.") + "[0-9a-f]{16}.creating")
        siblings = (p for p in self.root.absolute().parent.iterdir() if created.fullmatch(p.name))
        for place in sorted([*written, *siblings]):
            if self.now - _touched(place) > YOUNG_SECONDS:
                reason = "it never got its name: its writer was killed"
                yield Garbage(path=place, kind="temporary", reason=reason, bytes=_disk_bytes(place))

    def quarantined_files(self) -> Iterator[Garbage]:
        for shard, stone in self.dead.items():
            reason = f"shard {shard} is quarantined: {stone.reason}"
            for place in sorted((self.root / paths.STAGING).glob(f"{shard:06d}.*")):
                if place.is_dir() and owner.state_of(place) != "alive" and not self._given_up(place):
                    yield Garbage(path=place, kind="quarantined", reason=reason, bytes=_disk_bytes(place))
            for spec in self.header.arrays:
                path = self.root / zarrmeta.chunk_path(spec, shard)
                if path.is_file():
                    yield Garbage(path=path, kind="quarantined", reason=reason, bytes=_disk_bytes(path))


def _lease_names(root: Path) -> list[Path]:
    directory = root / paths.STAGING
    return sorted(p for p in directory.iterdir() if paths.is_lease(p.name)) if directory.is_dir() else []


def _is_directory(place: Path) -> bool:
    return place.is_dir() and not place.is_symlink()


def _touched(place: Path) -> float:
    """Latest modification of a file, or of a directory and what is in it; 0 when it is gone."""
    try:
        inside = list(place.iterdir()) if place.is_dir() else []
        return max(p.lstat().st_mtime for p in [place, *inside])
    except FileNotFoundError:
        return 0.0


def _disk_bytes(place: Path) -> int:
    inside = place.rglob("*") if place.is_dir() else [place]
    total = 0
    for path in inside:
        try:
            total += 512 * path.lstat().st_blocks
        except FileNotFoundError:
            continue
    return total
