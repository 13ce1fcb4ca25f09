"""The HTTP client of a service: JSON answers as records, batch bodies straight into a caller's buffer.

Responsible for connections (one per process and thread, so that it survives fork and pickling), time-outs and bounded
retries with jitter. Leaves to `answers` what a failure means, to `source` what is asked for.

http.client rather than urllib3, whose `readinto` copies out of a bytes object. With bodies of 32 and 256 MiB urllib3
reaches 0.21 to 0.45 of http.client's speed; in pieces of 1 MiB 0.82 to 1.13 on an idle machine (3 to 5.5 GB/s over
loopback) but 0.49 to 0.83 where CPU is short (load 8 on 2 cores), for 0.19 to 0.23 CPU s/GB instead of 0.14 to 0.18
(benchmarks/http_client.py).
"""

from __future__ import annotations

import http.client
import logging
import os
import select
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec
import numpy as np
import stamina

from hsstore import __version__
from hsstore.answers import TransientError, broken, error_of, worth_another_try
from hsstore.errors import HsstoreError, ServiceError, UsageError

# Each retry is told in our words; without a handler of its own stamina's logger would print a bare event name.
logging.getLogger("stamina").addHandler(logging.NullHandler())
log = logging.getLogger("hsstore.client")
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long to wait and how often to try. The defaults outlive a restart of the service."""

    attempts: int = 12
    total_seconds: float = 120.0
    """No new attempt is begun after that."""
    first_wait_seconds: float = 0.2
    """Doubles with each attempt up to `longest_wait_seconds`, plus jitter."""
    longest_wait_seconds: float = 8.0
    connect_seconds: float = 5.0
    read_seconds: float = 60.0
    """Without a single byte arriving."""


class ServiceClient:
    """Talks to one service. Usable from any thread and after fork; picklable."""

    def __init__(self, url: str, *, token: str | None = None, patience: Patience | None = None) -> None:
        """Opens no connection. Raises `UsageError` for a URL that is none."""
        self.url = _checked(url)
        self.patience = patience or Patience()
        self._token = token
        self._local = threading.local()

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (self.url, self._token, self.patience)

    def __repr__(self) -> str:
        return f"ServiceClient({self.url!r})"

    def get(self, path: str, type_: type[T], *, patience: Patience | None = None) -> T:
        """A JSON answer as a record."""
        return self._json("GET", path, None, type_, patience)

    def post(self, path: str, body: object, type_: type[T]) -> T:
        """POST JSON, read JSON. Retried like a GET: every POST of the service is idempotent."""
        return self._json("POST", path, msgspec.json.encode(body), type_, None)

    def read(self, path: str, buffer: bytearray | memoryview | None = None) -> memoryview:
        """A binary answer, in `buffer` when that is large enough, else in a buffer of its own.

        Raises `ServiceError` when no complete body came within the patience.
        """
        return self._retrying(lambda: self._read_once(path, buffer), None)

    def read_range(self, path: str, start: int, n_bytes: int) -> tuple[bytes, int]:
        """Some bytes of a binary answer (fewer where it ends before), and how many bytes it has in all.

        Raises `UsageError` when none of them exist, `ServiceError` for a service that does not know ranges.
        """
        return self._retrying(lambda: self._range_once(path, start, n_bytes), None)

    def close(self) -> None:
        """Close the connection of this thread; others close theirs."""
        held = self._local.__dict__.pop("held", None)
        if held is not None:
            held[1].close()

    def _json(self, method: str, path: str, body: bytes | None, type_: type[T], patience: Patience | None) -> T:
        data = self._retrying(lambda: self._body_once(method, path, body), patience)
        try:
            return msgspec.json.decode(data, type=type_)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ServiceError(
                f"{self.url}{path} did not answer with a {getattr(type_, '__name__', type_)}: {error}",
                hint="is this URL an hsstore service of the same version?",
            ) from None

    def _retrying(self, call: Callable[[], T], patience: Patience | None) -> T:
        p = patience or self.patience
        attempts = stamina.retry_context(
            on=worth_another_try,
            attempts=p.attempts,
            timeout=p.total_seconds,
            wait_initial=p.first_wait_seconds,
            wait_max=p.longest_wait_seconds,
            wait_jitter=p.first_wait_seconds,
        )
        tried = 0
        try:
            for attempt in attempts:
                with attempt:
                    tried += 1
                    return _told(call, tried, p.attempts)
        except TransientError as error:
            raise ServiceError(f"{error.message} (tried {tried} times)", hint=self._hint) from None
        raise AssertionError("a retry context ends with a result or an error")

    @property
    def _hint(self) -> str:
        return f"is the service running? try `curl {self.url}/health`"

    def _body_once(self, method: str, path: str, body: bytes | None) -> bytes:
        with self._exchange(method, path, body) as response:
            return response.read()

    def _read_once(self, path: str, buffer: bytearray | memoryview | None) -> memoryview:
        with self._exchange("GET", path, None) as response:
            length = response.headers.get("Content-Length", "")
            if not length.isdecimal():
                raise ServiceError(f"{self.url}{path} answered without a Content-Length", hint=self._hint)
            view = _room(buffer, int(length))
            done = 0
            while done < len(view):
                n = response.readinto(view[done:])
                if n == 0:
                    raise TransientError(f"{self.url}{path} ended after {done} of {len(view)} bytes")
                done += n
            return view

    def _range_once(self, path: str, start: int, n_bytes: int) -> tuple[bytes, int]:
        with self._exchange("GET", path, None, {"Range": f"bytes={start}-{start + n_bytes - 1}"}) as response:
            total = response.headers.get("Content-Range", "").rpartition("/")[2]
            if response.status != 206 or not total.isdecimal():
                raise ServiceError(f"{self.url}{path} answered {response.status} to a request for a range")
            return response.read(), int(total)

    @contextmanager
    def _exchange(
        self, method: str, path: str, body: bytes | None, more: Mapping[str, str] | None = None
    ) -> Iterator[http.client.HTTPResponse]:
        """One request and its successful answer; whatever breaks inside leaves as an error of our tree."""
        where, connection, complete = self.url + path, self._connection(), False
        try:
            if connection.sock is None:
                connection.connect()
                _socket_of(connection).settimeout(self.patience.read_seconds)
            connection.request(method, urlsplit(self.url).path + path, body, {**self._headers(body), **(more or {})})
            response = connection.getresponse()
            if response.status >= 300:
                raise self._error_of(where, response)
            yield response
            complete = response.isclosed()
        except HsstoreError:
            raise
        except (OSError, http.client.HTTPException) as error:
            raise broken(where, error) from None
        finally:
            if not complete:  # what is left of that answer must never be taken for the next one
                connection.close()

    def _error_of(self, where: str, response: http.client.HTTPResponse) -> HsstoreError:
        """What an answer means that is no success; a client of another service knows its words."""
        return error_of(where, response)

    def _connection(self) -> http.client.HTTPConnection:
        """The connection of this process and thread: a socket shared over fork would mix two answers."""
        held = self._local.__dict__.get("held")
        if held is None or held[0] != os.getpid():
            if held is not None:
                held[1].close()  # this process's copy of the descriptor; the parent goes on with its own
            held = self._local.held = (os.getpid(), self._new_connection())
        connection = held[1]
        if connection.sock is not None and _is_readable(connection.sock):
            connection.close()  # nothing is due on an idle connection, so the service has closed it
        return connection

    def _new_connection(self) -> http.client.HTTPConnection:
        parts = urlsplit(self.url)
        class_ = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        return class_(parts.hostname or "", parts.port, timeout=self.patience.connect_seconds)

    def _headers(self, body: bytes | None) -> dict[str, str]:
        headers = {"User-Agent": f"hsstore/{__version__}", "Accept-Encoding": "identity"}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        if body is not None:
            headers["Content-Type"] = "application/json"
        return headers


def _told(call: Callable[[], T], tried: int, attempts: int) -> T:
    """Say what went wrong before the silence of a back-off; the last failure becomes the error."""
    try:
        return call()
    except TransientError as error:
        if tried < attempts:
            of = f" of {attempts}" if attempts < 100 else ""  # else the seconds decide
            log.warning("%s; attempt %d%s", error.message, tried, of)
        raise


def _room(buffer: bytearray | memoryview | None, n_bytes: int) -> memoryview:
    if buffer is not None:
        view = memoryview(buffer).cast("B")
        if len(view) >= n_bytes:
            return view[:n_bytes]
    return np.empty(n_bytes, np.uint8).data  # not bytearray: that would write zeros first


def _socket_of(connection: http.client.HTTPConnection) -> socket.socket:
    assert isinstance(connection.sock, socket.socket), "connect() opens one or raises"
    return connection.sock


def _is_readable(sock: socket.socket) -> bool:
    poll = select.poll()  # not select(), which fails beyond 1024 descriptors
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(0))


def _checked(url: str) -> str:
    try:
        parts = urlsplit(url)
        host = (parts.hostname or "").encode("idna")  # as the socket module does it, in the middle of a run
        valid = parts.scheme in ("http", "https") and bool(host) and parts.port != 0
        valid = valid and parts.path.isascii() and not any(c <= " " or c == "\x7f" for c in url)
    except ValueError:  # a port that is no number, a name that is none (UnicodeError)
        valid = False
    if not valid or parts.query or parts.fragment:
        raise UsageError(f"{url!r} is no URL of a service", hint="expected something like http://127.0.0.1:8420")
    if parts.username or parts.password:
        raise UsageError("the URL of a service holds no user or password", hint="set HSSTORE_TOKEN")
    return url.rstrip("/")


def _restore(url: str, token: str | None, patience: Patience) -> ServiceClient:
    return ServiceClient(url, token=token, patience=patience)
