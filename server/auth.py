"""The bearer token: where it comes from and the dependency that asks for it.

Responsible for comparing in constant time and for following a token file that is rotated under a running server.
Leaves to `settings` whether a token is needed at all and to `problems` what a refusal looks like.
"""

from __future__ import annotations

import hmac
import logging
from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import Annotated

from fastapi import Depends
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from hsstore.credentials import checked_token, read_token_file
from hsstore.errors import NotFoundError, UnauthorizedError, UsageError
from server.settings import Settings

log = logging.getLogger("hsstore.server")
Stamp = tuple[int, int, int]
_SCHEME = HTTPBearer(auto_error=False, description="the token of --token-file or HSSTORE_TOKEN")


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


def bearer_check(current: Callable[[], str]) -> Callable[..., None]:
    """A FastAPI dependency that lets a request pass only with the token in force."""

    def check(credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(_SCHEME)]) -> None:
        if credentials is None:
            raise UnauthorizedError(
                "the service wants a bearer token and the request has none", hint="set HSSTORE_TOKEN for the client"
            )
        given = credentials.credentials.encode("utf-8", "surrogateescape")
        if not hmac.compare_digest(given, current().encode()):
            raise UnauthorizedError("the bearer token of the request is not the service's", hint="check HSSTORE_TOKEN")

    return check
