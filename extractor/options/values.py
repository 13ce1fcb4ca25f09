"""What stands behind the `=` of repeatable options."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from hsstore import units
from hsstore.errors import UsageError


def pair(option: str, text: str) -> tuple[str, str]:
    """`NAME=VALUE` in two. Raises `UsageError` naming the option."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise UsageError(f"{option} takes NAME=VALUE, found {text!r}")
    return name, value


def json_or_text(text: str) -> Any:
    """`true`, `0.8`, `[1, 2]` as values, everything else as it is."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def directory_value(_context: click.Context, option: click.Parameter, path: Path) -> Path:
    """A directory to make, with a name of its own: things are made beside it. `.` is the directory that it means."""
    named = path if path.name not in ("", "..") else path.resolve()
    if not named.name:
        raise UsageError(f"{option.opts[0]} {path} is the root of the file system", hint="give a directory below it")
    return named


def bytes_value(_context: click.Context, _option: click.Parameter, text: str | None) -> int | None:
    """`64GiB` as a number of bytes, for an option that may be left out."""
    return None if text is None else units.n_bytes(text)
