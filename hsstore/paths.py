"""Where everything of a store lies, relative to its directory. Only names; nothing here touches the disk.

STORE/
  store.json  layouts/000000.json  arrays.zarr/…  records/000017.json  tombstones/000017.0.json
  staging/000017.<attempt>/  staging/000017.lease
  manifest.json  manifest.sha256  manifests/<manifest_id>.json  index/*.npy
"""

from __future__ import annotations

import re
from errno import ENOENT
from pathlib import Path

HEADER = "store.json"
LAYOUTS = "layouts"
RECORDS = "records"
TOMBSTONES = "tombstones"
STAGING = "staging"
MANIFEST = "manifest.json"
MANIFEST_SUMS = "manifest.sha256"
MANIFESTS = "manifests"
INDEX = "index"

_URL = re.compile(r"([a-z][a-z0-9]+):/+(.+)")
_NUMBERED = re.compile(r"(\d{6,})\.json")
_TOMBSTONE = re.compile(r"(\d{6,})\.(\d+)\.json")
_LEASE = re.compile(r"\d{6,}\.lease")
_KEPT = re.compile(r"([0-9a-f]{64})\.json")


def url_of(root: Path) -> str | None:
    """The URL that was given where a path was wanted; None for a path."""
    match = _URL.fullmatch(str(root))
    return f"{match[1]}://{match[2]}" if match else None


def numbered(number: int) -> str:
    return f"{number:06d}.json"


def record(root: Path, shard: int) -> Path:
    return root / RECORDS / numbered(shard)


def layout(root: Path, number: int) -> Path:
    return root / LAYOUTS / numbered(number)


def tombstone(root: Path, shard: int, number: int) -> Path:
    return root / TOMBSTONES / f"{shard:06d}.{number}.json"


def kept_manifest(root: Path, manifest_id: str) -> Path:
    return root / MANIFESTS / f"{manifest_id}.json"


def lease(root: Path, shard: int) -> Path:
    return root / STAGING / f"{shard:06d}.lease"


def staging(root: Path, shard: int, attempt: str) -> Path:
    return root / STAGING / f"{shard:06d}.{attempt}"


def staged_name(array: str) -> str:
    """File name inside a staging directory: `hidden/after_2` → `hidden.after_2`."""
    return array.replace("/", ".")


def number_of(name: str) -> int | None:
    """Number in a `000017.json` name; None for any other name."""
    match = _NUMBERED.fullmatch(name)
    number = int(match[1]) if match else None
    return number if number is not None and numbered(number) == name else None


def tombstone_of(name: str) -> tuple[int, int] | None:
    """(shard, number) of a `000017.0.json` name; None for any other name."""
    match = _TOMBSTONE.fullmatch(name)
    if match is None or f"{int(match[1]):06d}.{int(match[2])}.json" != name:
        return None
    return int(match[1]), int(match[2])


def is_lease(name: str) -> bool:
    return _LEASE.fullmatch(name) is not None


def kept_id(name: str) -> str | None:
    """The manifest_id of a `<manifest_id>.json` name; None for any other name."""
    match = _KEPT.fullmatch(name)
    return match[1] if match else None


def numbers_in(directory: Path) -> list[int]:
    """Numbers of the `000017.json` files of a directory, ascending. Raises `FileNotFoundError` without one."""
    if not directory.is_dir():
        raise FileNotFoundError(ENOENT, "no such directory", str(directory))
    return sorted(n for n in map(number_of, (p.name for p in directory.iterdir())) if n is not None)
