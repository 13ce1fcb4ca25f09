"""The bearer token: what may be one, and reading it from a file.

Responsible for one rule on both ends of the wire, and for errors that never repeat any of the token. Leaves where a
token comes from to the callers and comparing tokens to the service.
"""

from __future__ import annotations

import os

from hsstore.errors import NotFoundError, UsageError

MAX_TOKEN_BYTES = 4096
_HINT = "python -c 'import secrets; print(secrets.token_urlsafe(32))' > FILE"


def checked_token(text: str, where: str) -> str:
    """The token without the white space around it.

    Raises `UsageError` (never naming the token) for what could not travel in a header: nothing, several lines,
    spaces, anything but visible ASCII. `where` says in the message what must hold it.
    """
    token = text.strip()
    if not token or len(token) > MAX_TOKEN_BYTES or not all("!" <= c <= "~" for c in token):
        raise UsageError(f"{where} must hold one token: one line of visible ASCII without spaces", hint=_HINT)
    return token


def read_token_file(path: str | os.PathLike[str]) -> str:
    """The token in a file. Raises `NotFoundError` without the file and `UsageError` without a usable token in it."""
    where = f"token file {os.fspath(path)}"
    try:
        with open(path, "rb") as file:
            content = file.read(2 * MAX_TOKEN_BYTES)
    except FileNotFoundError:
        raise NotFoundError(f"{where} does not exist") from None
    except OSError as error:
        raise UsageError(f"{where} cannot be read: {error.strerror}") from None
    # Latin-1 decodes every byte: what is not ASCII is refused by the check, not by a decoder that quotes it.
    return checked_token(content.decode("latin-1"), where)
