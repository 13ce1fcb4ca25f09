"""Files of a directory in a stable order, and files written whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from extractor.foreign.sample import Item
from hsstore import durable, plainfile
from hsstore.errors import DamagedError, UsageError

WORK = ".dataset."
"""How the names of directories begin in which files are prepared."""
_DIGITS = re.compile(r"(\d+)")


def walk(root: Path, suffixes: tuple[str, ...]) -> list[Path]:
    """Every file below `root` whose name ends so, but hidden ones. Raises `OSError` for a directory it cannot read."""

    def fail(error: OSError) -> None:
        raise error

    return [
        Path(directory) / name
        for directory, _, names in os.walk(root, onerror=fail)
        for name in names
        if name.endswith(suffixes) and not name.startswith(".")
    ]


def read_plain(path: Path) -> bytes:
    """A document beside the samples. Raises `UsageError` for what is no plain file, else the `OSError` it met."""
    try:
        fd = plainfile.open_plain(path)
    except DamagedError as error:
        raise UsageError(error.message, hint="restore it or move it away") from None
    with open(fd, "rb") as file:
        return file.read()


def natural(text: str) -> tuple[tuple[int, int | str], ...]:
    """Sorts numbers inside names by their value: data_2 before data_10."""
    return tuple((0, int(part)) if part.isdigit() else (1, part) for part in _DIGITS.split(text) if part)


def numbered(root: Path, paths: Iterable[Path], pattern: re.Pattern[str]) -> list[Item]:
    """Items by the number in their file's name (group 1), then those without one, in natural order of their names.

    A second file of the same number is an item with a fault: which of the two is meant cannot be known.
    """
    found: list[tuple[int | None, str, Path]] = []
    for path in paths:
        match = pattern.fullmatch(path.name)
        found.append((int(match[1]) if match else None, path.relative_to(root).as_posix(), path))
    found.sort(key=lambda f: (f[0] is None, f[0] or 0, natural(f[1]), f[1]))
    items: list[Item] = []
    first: dict[int, str] = {}
    for number, name, path in found:
        fault = None
        if number is not None and number in first:
            fault = ("duplicate", f"the number of {first[number]} too")
        elif number is not None:
            first[number] = name
        items.append(Item(name=name, path=path, fault=fault))
    return items


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a temporary file beside `path`; then it is fsynced and takes the name."""
    durable.make_dirs(path.parent)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        write(temporary)
        durable.fsync_file(temporary)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    durable.take_place(temporary, path)


def remove_leftovers(root: Path, before: float) -> None:
    """Remove what killed runs left: temporary files and directories that were last touched before that time."""
    for directory, names, files in os.walk(root):
        for name in [n for n in names if n.startswith(WORK)]:
            if Path(directory, name).stat().st_mtime < before:
                shutil.rmtree(Path(directory, name), ignore_errors=True)
                names.remove(name)
        for path in (Path(directory, name) for name in files if durable.is_temporary(name)):
            with contextlib.suppress(FileNotFoundError):  # its writer lives, and was quicker
                if path.stat().st_mtime < before:
                    path.unlink()


def write_json(path: Path, document: object) -> None:
    """A JSON file, whole or not at all."""
    write_whole(path, lambda at: at.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8"))
