"""The bearer token: where it comes from and how the OpenAPI document describes it.

Responsible for following a token file that is rotated under a running server. Leaves to `settings` whether a token is
needed at all, to `hsstore.credentials` what may be one and to `guard` asking for it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from threading import Lock

from fastapi.security import HTTPBearer

from hsstore.credentials import checked_token, read_token_file
from hsstore.errors import NotFoundError, UsageError
from server.settings import Settings

log = logging.getLogger("hsstore.server")
Stamp = tuple[int, int, int]
SCHEME = HTTPBearer(auto_error=False, description="the token of --token-file or HSSTORE_TOKEN")
"""A dependency that only says in the OpenAPI document what `guard` asks for."""


class TokenFile:
    """A token on disk. A rotated file counts from the next request on; a vanished one keeps the last token."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = Lock()
        self._stamp, self._token = self._read()

    def current(self) -> str:
        with self._lock:
            try:
                if self._stat() != self._stamp:
                    self._stamp, self._token = self._read()
                    log.info("token file %s changed: the new token counts", self.path)
            except (OSError, UsageError) as error:
                log.warning("token file %s: the last good token stays in force: %s", self.path, error)
            return self._token

    def _stat(self) -> Stamp:
        found = self.path.stat()
        return found.st_mtime_ns, found.st_size, found.st_ino

    def _read(self) -> tuple[Stamp, str]:
        try:
            stamp = self._stat()  # before the content: a change in between is read again next time
        except FileNotFoundError:
            raise NotFoundError(f"token file {self.path} does not exist") from None
        except OSError as error:
            raise UsageError(f"token file {self.path} cannot be read: {error.strerror}") from None
        return stamp, read_token_file(self.path)


def token_reader(settings: Settings) -> Callable[[], str]:
    """The function that gives the token in force now."""
    if settings.token_file is not None:
        return TokenFile(settings.token_file).current
    token = checked_token(settings.token or "", "HSSTORE_TOKEN")
    return lambda: token
