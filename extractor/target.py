"""Whether a run could write where it was told to, asked before anything that takes long.

Leaves to `extractor.estimate` whether there is room, to `extractor.run` whether a store may be resumed.
"""

from __future__ import annotations

import os
from pathlib import Path

from extractor.settings import Settings
from hsstore import manifest, paths
from hsstore.errors import UsageError


def refuse_unwritable(settings: Settings) -> None:
    """Raise `UsageError` naming the option. A complete store may lie on a read-only disk: nothing is written there."""
    if settings.append or not (settings.out_is_store and _is_complete(settings.out)):
        _check("--out", settings.out)
    if settings.failed_out is not None:
        if settings.failed_out.is_dir():
            raise UsageError(f"--failed-out {settings.failed_out} is a directory, expected a file", hint=_HINT)
        if not settings.failed_out.absolute().parent.is_dir():
            raise UsageError(f"--failed-out {settings.failed_out}: its directory does not exist", hint=_HINT)


def _check(option: str, path: Path) -> None:
    place = path.absolute()
    try:
        while not place.exists():  # a place below a file does not exist, the file does
            place = place.parent
    except OSError as error:  # a name too long, a directory that may not be entered
        raise UsageError(f"{option} {path} cannot be used: {error.strerror}", hint=_HINT) from None
    if not place.is_dir():
        what = "is a file" if place == path.absolute() else f"lies below {place}, which is a file"
        raise UsageError(f"{option} {path} {what}, expected a directory", hint=_HINT)
    if not os.access(place, os.W_OK | os.X_OK):
        raise UsageError(f"{option} {path} cannot be written: {place} is read-only for this user", hint=_HINT)


def _is_complete(out: Path) -> bool:
    header = manifest.load_header(out)
    if manifest.quarantined(manifest.load_tombstones(out, header)):
        return False  # something may have to be done again
    expected = sum(len(layout.shards) for layout in manifest.load_layouts(out, header))
    return len(paths.numbers_in(out / paths.RECORDS)) == expected


_HINT = "give a place that this user may write to"
