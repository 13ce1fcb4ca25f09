"""What stands behind the `=` of repeatable options."""

from __future__ import annotations

import json
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


def bytes_value(_context: click.Context, _option: click.Parameter, text: str | None) -> int | None:
    """`64GiB` as a number of bytes, for an option that may be left out."""
    return None if text is None else units.n_bytes(text)
