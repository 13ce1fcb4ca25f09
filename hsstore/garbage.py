"""What a store no longer needs: attempts whose writer is gone, files that never got their name, leases that ended.

Finds and, when told to, removes. Nothing that is committed, and nothing that a living writer may still commit: an
attempt goes only when its writer is certainly dead, or when its shard is committed by another attempt (its record is
then refused by the commit itself). In doubt (another machine, no mark) it stays, unless the caller gives an age. Files
of a quarantined shard go only when asked for.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hsstore import leases, manifest, owner, paths, zarrmeta
from hsstore.durable import files_below, is_temporary
from hsstore.errors import HsstoreError
from hsstore.publishing import roll_forward
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
    """Remove it. Returns the bytes freed. What another one has removed meanwhile is no error, and an attempt that
    another one has taken over since it was found stays."""
    freed = 0
    for item in garbage:
        try:
            if item.kind == "attempt" and _is_directory(item.path):
                if not _remove_attempt(item.path):
                    continue
            elif _is_directory(item.path):
                owner.remove(item.path)
            else:
                item.path.unlink()
        except FileNotFoundError:
            continue
        freed += item.bytes
    return freed


def _remove_attempt(place: Path) -> bool:
    """Put it aside, look at it once more, then remove it: a copy that resumes a dead one's shard works in the very
    same directory, and may commit what lies there at any moment."""
    aside = place.with_name(f"{place.name}.{secrets.token_hex(8)}")
    os.rename(place, aside)
    if _is_needed(place, aside) and _put_back(aside, place):
        return False
    owner.remove(aside)
    return True


def _is_needed(place: Path, aside: Path) -> bool:
    """Whether somebody works in an attempt now, or has committed it; whether its record cannot say so."""
    root = place.parent.parent
    try:
        search = _Search(root, manifest.load_header(root), time.time(), None)
        return owner.state_of(aside) == "alive" or search.is_committed(place)
    except HsstoreError:
        return True


def _put_back(aside: Path, place: Path) -> bool:
    """And publish it, if it is committed. False when it has been made anew meanwhile: then that one is needed."""
    try:
        os.rename(aside, place)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise
        return False
    root, number = place.parent.parent, place.name.partition(".")[0]
    with contextlib.suppress(HsstoreError):  # `hsstore verify` tells of damage
        header = manifest.load_header(root)
        if number.isdigit() and paths.record(root, int(number)).exists():
            roll_forward(root, header, [manifest.load_record(root, header, int(number))])
    return True


class _Search:
    def __init__(self, root: Path, header: StoreHeader, now: float, abandoned_seconds: float | None) -> None:
        self.root, self.header, self.now, self.abandoned_seconds = root, header, now, abandoned_seconds
        # Tombstones before records: what is quarantined is given up, whatever its record says.
        self.dead = manifest.quarantined(manifest.load_tombstones(root, header))

    def attempts(self) -> Iterator[Garbage]:
        directory = self.root / paths.STAGING
        for place in sorted(directory / name for name in _names(directory)):
            if place.is_dir() and not paths.is_lease(place.name) and (reason := self._given_up(place)):
                yield Garbage(path=place, kind="attempt", reason=reason, bytes=_disk_bytes(place))

    def _given_up(self, place: Path) -> str:
        """Why nobody needs an attempt; "" when somebody may."""
        # Before the record: a living writer may commit between the two looks, a dead one commits nothing any more.
        state = owner.state_of(place)
        number = place.name.partition(".")[0]
        try:
            winner = self._winner(int(number)) if number.isdigit() else None
            if self.is_committed(place):
                return ""  # not published yet: opening for writing does that
        except HsstoreError:
            return ""  # its record cannot say whose it is: these may be the only files of a committed shard
        if state == "dead":
            return "its writer is dead"
        if state == "alive":
            return ""
        age = self._age(place)
        if winner is not None and age > YOUNG_SECONDS:
            return f"shard {int(number)} was committed by another attempt"
        if age > YOUNG_SECONDS and not _names(place):
            return "it is empty"
        if self.abandoned_seconds is not None and age > self.abandoned_seconds:
            return f"not touched for {age / 3600:.1f} h"
        return ""

    def is_committed(self, place: Path) -> bool:
        """Whether the record of its shard names this attempt, also where it was put aside."""
        number, attempt, *_ = *place.name.split("."), ""
        return number.isdigit() and self._winner(int(number)) == attempt

    def _age(self, place: Path) -> float:
        """Seconds since anything of it was touched; 0 when it goes at this moment."""
        touched = _touched(place)
        return self.now - touched if touched is not None else 0.0

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
        written = (d / name for d in dict.fromkeys(places) for name in _names(d) if is_temporary(name))
        created = re.compile(re.escape(f".{self.root.absolute().name}.") + "[0-9a-f]{16}.creating")
        siblings = (p for p in self.root.absolute().parent.iterdir() if created.fullmatch(p.name))
        for place in sorted([*written, *siblings]):
            if self._age(place) > YOUNG_SECONDS:
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
    return sorted(directory / name for name in _names(directory) if paths.is_lease(name))


def _names(directory: Path) -> list[str]:
    """What lies in a directory, nothing when there is none."""
    try:
        return os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _is_directory(place: Path) -> bool:
    return place.is_dir() and not place.is_symlink()


def _touched(place: Path) -> float | None:
    """Latest modification of a file, or of a directory and what is in it; None when something of it is gone."""
    try:
        return max(p.lstat().st_mtime for p in [place, *(place / name for name in _names(place))])
    except FileNotFoundError:
        return None


def _disk_bytes(place: Path) -> int:
    inside = files_below(place) if _is_directory(place) else [place]
    total = 0
    for path in inside:
        try:
            total += 512 * path.lstat().st_blocks
        except FileNotFoundError:
            continue
    return total
