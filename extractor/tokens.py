"""The bearer token for verifier servers: from a file, or from the environment."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from hsstore.credentials import checked_token, read_token_file

TOKEN_VARIABLE = "HSSTORE_TOKEN"


def token_of(file: Path | None, environment: Mapping[str, str]) -> str | None:
    """The file's, else the environment's, else none. Raises `UsageError` for one that cannot be sent."""
    if file is not None:
        return read_token_file(file)
    text = environment.get(TOKEN_VARIABLE)
    return checked_token(text, TOKEN_VARIABLE) if text else None
