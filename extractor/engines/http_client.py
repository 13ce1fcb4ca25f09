"""One SGLang server as a client sees it: requests, raw rows, and what its answers mean.

Responsible for connections that notice a dead host, for telling a server that is gone from a request that it refuses,
and for words that help when the URL is something else. Leaves retries and other servers to `http_pool`.
"""

from __future__ import annotations

import http.client
import secrets
import socket
import ssl
import time
import weakref
from collections.abc import Callable
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec

from extractor.sglang_plugin.protocol import INFO_PATH, PROTOCOL, ROWS_PATH, ServerInfo, WriteError
from hsstore import __version__
from hsstore.answers import TransientError, broken, error_of
from hsstore.client import Patience, ServiceClient
from hsstore.errors import HsstoreError, IncompleteError, ServiceError, UnauthorizedError, UsageError

T = TypeVar("T")
START_HINT = "start one with `hsstore verifier --model MODEL`, and give the URL that it prints"
ROWS_WAIT_SECONDS = 20
_MOST_ERROR_BYTES = 1 << 20
_MAY_PASS = (429, 500, 502, 503, 504)
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError)
_SURE_SECONDS = 2.0  # a connection that breaks that soon was closed while it lay idle
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 6))


class Refused(HsstoreError):
    """The server takes this request for wrong: the same again would be refused again."""


class Missing(ServiceError):
    """The server does not know the path."""


class _Answer(msgspec.Struct):
    meta_info: dict[str, Any]


class _Said(msgspec.Struct):
    """Where SGLang and FastAPI put the words of an error."""

    error: Any = None
    message: Any = None
    detail: Any = None


class VerifierClient(ServiceClient):
    """Talks to one server from any thread; each call is one attempt. Raises `TransientError` when that may pass."""

    def __init__(
        self, url: str, *, token: str | None, answer_seconds: float, context: ssl.SSLContext | None = None
    ) -> None:
        """`context` says whom to trust; None = whom the system (SSL_CERT_FILE) does."""
        super().__init__(url, token=token, patience=Patience(attempts=1, read_seconds=answer_seconds))
        self._ended = False
        self._context = context
        self._sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()

    def info(self) -> ServerInfo:
        """What the server runs. Raises `UsageError` for a URL that is no server with our plugin."""
        try:
            body, media = self._fetched("GET", INFO_PATH)
        except Missing:
            raise self._stranger() from None
        if "json" not in media:
            raise self._stranger()
        try:
            info = msgspec.json.decode(body, type=ServerInfo)
        except _UNREADABLE as error:
            raise UsageError(
                f"{self.url} runs another version of hsstore's plugin: {error}",
                hint=f"install hsstore {__version__} where the server runs",
            ) from None
        if info.protocol != PROTOCOL:
            raise UsageError(
                f"{self.url} runs hsstore {info.hsstore} (protocol {info.protocol}),"
                f" here is {__version__} ({PROTOCOL})",
                hint="install the same hsstore on both sides",
            )
        return info

    def generate(self, body: dict[str, Any]) -> dict[str, Any]:
        """`meta_info` of the answer. Raises `Refused` for a request that the server takes for wrong."""
        answer, _ = self._fetched("POST", "/generate", msgspec.json.encode(body))
        try:
            return msgspec.json.decode(answer, type=_Answer).meta_info
        except _UNREADABLE as error:
            raise TransientError(f"{self.url}/generate gave no answer of SGLang: {error}") from None

    def write_errors(self, ticket: str) -> list[WriteError]:
        """What failed of a request's rows after its answer had left."""
        path = f"{ROWS_PATH}/{ticket}/errors"
        body, _ = self._fetched("GET", path)
        try:
            return msgspec.json.decode(body, type=list[WriteError])
        except _UNREADABLE as error:
            raise TransientError(f"{self.url}{path} gave no list of errors: {error}") from None

    def rows(self, ticket: str, take: Callable[[http.client.HTTPResponse], T]) -> T | None:
        """Hand the rows' body to `take`; None when they are not complete yet."""

        def call() -> T | None:
            with self._exchange("GET", f"{ROWS_PATH}/{ticket}?wait={ROWS_WAIT_SECONDS}", None) as response:
                if response.status == 202:
                    response.read()
                    return None
                return take(response)

        return self._sure(call)

    def drop(self, ticket: str) -> None:
        """Free a request's rows on the server, and let it write no more of them."""
        self._fetched("DELETE", f"{ROWS_PATH}/{ticket}")

    def end(self) -> None:
        """End every exchange of every thread, and begin no other. Each thread still closes its own connection."""
        self._ended = True
        self.shutdown()

    def shutdown(self) -> None:
        """End every exchange of every thread that is under way."""
        for sock in list(self._sockets):
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:  # closed meanwhile
                continue

    def _fetched(self, method: str, path: str, body: bytes | None = None) -> tuple[bytes, str]:
        def call() -> tuple[bytes, str]:
            with self._exchange(method, path, body) as response:
                return response.read(), response.headers.get("Content-Type", "")

        return self._sure(call)

    def _sure(self, call: Callable[[], T]) -> T:
        """Once more, on a new connection, when one that had lain idle was closed by the server just then."""
        reused = self._connection().sock is not None and self._used()
        started = time.monotonic()
        try:
            result = call()
        except TransientError:
            if not reused or time.monotonic() - started > _SURE_SECONDS:
                raise
            result = call()
        self._local.used = True
        return result

    def _used(self) -> bool:
        return bool(getattr(self._local, "used", False))

    def _new_connection(self) -> http.client.HTTPConnection:
        parts = urlsplit(self.url)
        if parts.scheme == "https" and self._context is not None:
            seconds = self.patience.connect_seconds
            return http.client.HTTPSConnection(parts.hostname or "", parts.port, timeout=seconds, context=self._context)
        return super()._new_connection()

    def _connection(self) -> http.client.HTTPConnection:
        connection = super()._connection()
        if self._ended:
            raise TransientError(f"the connection to {self.url} is closed")
        if connection.sock is None:
            self._local.used = False
            try:
                connection.connect()
            except ssl.SSLCertVerificationError as error:
                connection.close()
                raise UsageError(
                    f"the certificate of {self.url} is not trusted: {error.verify_message}",
                    hint="name a file with the certificate of its authority in SSL_CERT_FILE",
                ) from None
            except OSError as error:
                connection.close()
                raise broken(self.url, error) from None
            assert connection.sock is not None
            connection.sock.settimeout(self.patience.read_seconds)
            connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in _KEEPALIVE:
                connection.sock.setsockopt(socket.IPPROTO_TCP, option, value)
            self._sockets.add(connection.sock)
        return connection

    def _error_of(self, where: str, response: http.client.HTTPResponse) -> HsstoreError:
        if "problem+json" in response.headers.get("Content-Type", ""):
            return error_of(where, response)
        said = _words(response.read(_MOST_ERROR_BYTES)) or response.reason
        if response.status in (401, 403):
            return unauthorized(self.url)
        if response.status in (404, 405) or response.status < 400:  # a page elsewhere (3xx) is none of SGLang's
            return Missing(f"{where} answered {response.status}", hint=START_HINT)
        if response.status in _MAY_PASS:
            return TransientError(f"{where} answered {response.status}: {said}")
        if 400 <= response.status < 500:
            return Refused(said)
        return ServiceError(f"{where} answered {response.status}: {said}", hint=START_HINT)

    def _stranger(self) -> UsageError:
        """What answers at the URL, when it is not a server with our plugin."""
        hint = f"{START_HINT}; or add hsstore's plugin to your own (docs/verifier.md)"
        for path, what in (
            ("/server_info", "SGLang {}, started without hsstore's capture plugin"),
            ("/v1/models", "a server of the OpenAI API, not of SGLang's own"),
        ):
            try:
                body, media = self._fetched("GET", path)
                document = msgspec.json.decode(body) if "json" in media else None
            except (HsstoreError, *_UNREADABLE):
                continue
            if isinstance(document, dict):
                return UsageError(f"{self.url} is {what.format(document.get('version', ''))}", hint=hint)
        return UsageError(f"{self.url} is no SGLang server: it knows neither {INFO_PATH} nor /server_info", hint=hint)


def unauthorized(url: str) -> UnauthorizedError:
    return UnauthorizedError(
        f"{url} refuses the token", hint="put the server's API key into a file for --token-file, or into HSSTORE_TOKEN"
    )


def unreachable(url: str, error: Exception) -> IncompleteError:
    return IncompleteError(f"no server can be reached at {url}: {error}", hint=START_HINT)


def new_ticket() -> str:
    """Nobody can guess it, so nobody else fetches or drops the rows."""
    return secrets.token_hex(16)


def _words(body: bytes) -> str:
    """The sentence in an error's body, whichever way it is written."""
    try:
        said = msgspec.json.decode(body, type=_Said)
    except _UNREADABLE:
        return ""
    for value in (said.error, said.message, said.detail):
        text = value.get("message") if isinstance(value, dict) else value
        if isinstance(text, str) and text:
            return text.partition("\n")[0][:500]
    return ""
