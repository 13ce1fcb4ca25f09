"""What a request must pass before anything of it is read: the token, and a bound on its body.

Responsible for refusing in plain ASGI, ahead of the framework, which reads and parses a whole body before it asks any
dependency. Leaves where the token comes from to `auth` and what a refusal looks like to `problems`.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable

from fastapi import Request
from starlette.concurrency import run_in_threadpool
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hsstore.errors import HsstoreError, UnauthorizedError, UsageError
from server.problems import error_response

MAX_BODY_BYTES = 64 << 10
"""The largest request there is, the parameters of a plan, takes some hundred bytes."""
PUBLIC = frozenset({"/health", "/ready", "/openapi.json"})


class TooLargeError(UsageError):
    """The body of a request is larger than any that makes sense here."""

    http_status = 413


class Guard:
    """ASGI wrapper: 401 without the token (`current` gives it, None = none is needed), 413 for a large body."""

    def __init__(self, app: ASGIApp, current: Callable[[], str] | None) -> None:
        self.app = app
        self._current = current

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        try:
            await self._check_token(scope)
            received = await _bounded(scope, receive)
        except HsstoreError as error:
            # The server discards what the client still sends, so that it comes to reading this answer.
            await error_response(Request(scope), error)(scope, receive, send)
            return
        await self.app(scope, received, send)

    async def _check_token(self, scope: Scope) -> None:
        if self._current is None or scope["path"] in PUBLIC:
            return
        scheme, _, given = _header(scope, b"authorization").partition(b" ")
        if scheme.lower() != b"bearer" or not given.strip():
            raise UnauthorizedError(
                "the service wants a bearer token and the request has none", hint="set HSSTORE_TOKEN for the client"
            )
        current = await run_in_threadpool(self._current)  # it looks at a file, whose disk may be slow
        if not hmac.compare_digest(given.strip(), current.encode()):
            raise UnauthorizedError("the bearer token of the request is not the service's", hint="check HSSTORE_TOKEN")


async def _bounded(scope: Scope, receive: Receive) -> Receive:
    """A `receive` that gives the whole body first. Raises `TooLargeError` before more than the bound is held."""
    length = _header(scope, b"content-length")
    if not length and not _header(scope, b"transfer-encoding"):
        return receive
    if length.isdigit() and int(length[:20]) > MAX_BODY_BYTES:
        raise _too_large()
    body = bytearray()
    more = True
    while more:
        message = await receive()
        if message["type"] != "http.request":
            return _replay(message, receive)
        body += message.get("body", b"")
        more = message.get("more_body", False)
        if len(body) > MAX_BODY_BYTES:
            raise _too_large()
    return _replay({"type": "http.request", "body": bytes(body), "more_body": False}, receive)


def _replay(first: Message, receive: Receive) -> Receive:
    waiting = [first]

    async def replayed() -> Message:
        return waiting.pop() if waiting else await receive()

    return replayed


def _header(scope: Scope, name: bytes) -> bytes:
    return next((value for key, value in scope["headers"] if key == name), b"")


def _too_large() -> TooLargeError:
    return TooLargeError(f"the body of a request may have {MAX_BODY_BYTES} bytes at most", hint="see docs/http.md")
