"""Where everything of a store lies, relative to its directory. Only names; nothing here touches the disk.

STORE/
  store.json  layouts/000000.json  arrays.zarr/…  records/000017.json  staging/000017.<attempt>/
  manifest.json  manifest.sha256  index/*.npy
"""

from __future__ import annotations

import re
from errno import ENOENT
from pathlib import Path

HEADER = "store.json"
LAYOUTS = "layouts"
RECORDS = "records"
STAGING = "staging"
MANIFEST = "manifest.json"
MANIFEST_SUMS = "manifest.sha256"
INDEX = "index"

_NUMBERED = re.compile(r"(\d{6,})\.json")


def numbered(number: int) -> str:
    return f"{number:06d}.json"


def record(root: Path, shard: int) -> Path:
    return root / RECORDS / numbered(shard)


def layout(root: Path, number: int) -> Path:
    return root / LAYOUTS / numbered(number)


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


def numbers_in(directory: Path) -> list[int]:
    """Numbers of the `000017.json` files of a directory, ascending. Raises `FileNotFoundError` without one."""
    if not directory.is_dir():
        raise FileNotFoundError(ENOENT, "no such directory", str(directory))
    return sorted(n for n in map(number_of, (p.name for p in directory.iterdir())) if n is not None)
