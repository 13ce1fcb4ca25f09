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
    if settings.failed_out is not None and not settings.failed_out.absolute().parent.is_dir():
        raise UsageError(f"--failed-out {settings.failed_out}: its directory does not exist", hint=_HINT)
    if settings.append or not (settings.out_is_store and _is_complete(settings.out)):
        _check("--out", settings.out)


def refuse_lists(settings: Settings) -> None:
    """Raise `UsageError` for a list or a log in the place of another file; asked before either is opened."""
    refuse_list("--failed-out", settings.report, settings.prompts)
    if settings.log_json not in (None, "-"):
        _refuse_same("--log-json", Path(str(settings.log_json)), settings.prompts)
        _refuse_same("--log-json", Path(str(settings.log_json)), settings.report)


def refuse_list(option: str, path: Path, prompts: Path) -> None:
    """Raise `UsageError` for a place where a list cannot be exchanged for another: it is replaced, and removed when it
    would be empty, so it must be a plain file and nobody else's."""
    try:
        if path.is_dir():
            raise UsageError(f"{option} {path} is a directory, expected a file", hint=_HINT)
        if path.exists() and not path.is_file():
            raise UsageError(f"{option} {path} is a device or a pipe, expected a plain file", hint=_HINT)
        _refuse_same(option, path, prompts)
    except OSError as error:  # a name too long, a directory that may not be entered
        raise UsageError(f"{option} {path} cannot be used: {error.strerror}", hint=_HINT) from None


def _refuse_same(option: str, path: Path, other: Path) -> None:
    if path.exists() and other.exists() and path.samefile(other):
        raise UsageError(f"{option} {path} is {other}, which would be overwritten", hint="give another file")


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
