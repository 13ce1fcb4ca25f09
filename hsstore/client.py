"""The HTTP client of a service: JSON answers as records, batch bodies straight into a caller's buffer.

Responsible for connections (one pool per process and thread, so it survives fork and pickling), time-outs, bounded
retries with jitter, and for turning problem answers back into the error that the service raised. Leaves what is asked
for, and in which order, to `source`.

urllib3 rather than http.client: read in pieces of 1 MiB it holds 94 to 110 % of http.client's speed with 32 and
256 MiB bodies (4.4 to 5.5 GB/s over loopback on 2 cores, benchmarks/http_client.py). The pieces matter: its `readinto`
copies out of a bytes object, which a larger piece pushes out of the cache (27 % of http.client with one read per body).
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec
import numpy as np
import stamina
import urllib3

from hsstore import __version__, errors
from hsstore.api import Problem
from hsstore.errors import HsstoreError, ServiceError, UnauthorizedError, UsageError

T = TypeVar("T")
PIECE_BYTES = 1 << 20
_RETRIED_STATUS = (502, 503, 504)


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

    def close(self) -> None:
        """Close the connections of this thread; those of others close with their threads."""
        pool = self._local.__dict__.pop("pool", None)
        if pool is not None and pool[0] == os.getpid():
            pool[1].close()

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
            on=_worth_another_try,
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
                    return call()
        except _Transient as error:
            raise ServiceError(f"{error.message} (tried {tried} times)", hint=_ALIVE) from None
        raise AssertionError("a retry context ends with a result or an error")

    def _body_once(self, method: str, path: str, body: bytes | None) -> bytes:
        with self._answer(method, path, body) as response:
            data: bytes = response.read()
            return data

    def _read_once(self, path: str, buffer: bytearray | memoryview | None) -> memoryview:
        with self._answer("GET", path, None) as response:
            length = response.headers.get("Content-Length", "")
            if not length.isdecimal():
                raise ServiceError(f"{self.url}{path} answered without a Content-Length", hint=_ALIVE)
            view = _room(buffer, int(length))
            done = 0
            while done < len(view):
                n = response.readinto(view[done : done + PIECE_BYTES])
                if n == 0:
                    raise _Transient(f"{self.url}{path} ended after {done} of {len(view)} bytes")
                done += n
            return view

    def _answer(self, method: str, path: str, body: bytes | None) -> _Answer:
        return _Answer(self, method, path, body)

    def _pool(self) -> urllib3.HTTPConnectionPool:
        """The pool of this process and thread: a socket shared over fork would mix two answers."""
        held = self._local.__dict__.get("pool")
        if held is None or held[0] != os.getpid():
            timeout = urllib3.Timeout(connect=self.patience.connect_seconds, read=self.patience.read_seconds)
            pool = urllib3.connection_from_url(self.url, maxsize=1, block=False, retries=False, timeout=timeout)
            held = self._local.pool = (os.getpid(), pool)
        pool = held[1]
        assert isinstance(pool, urllib3.HTTPConnectionPool)
        return pool

    def _headers(self, body: bytes | None) -> dict[str, str]:
        headers = {"User-Agent": f"hsstore/{__version__}", "Accept-Encoding": "identity"}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        if body is not None:
            headers["Content-Type"] = "application/json"
        return headers


class _Transient(ServiceError):
    """Worth another try, after `retry_after` seconds when the service said so."""

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class _Answer:
    """One exchange as a context: an open, successful response inside, every transport error mapped on the way out."""

    def __init__(self, client: ServiceClient, method: str, path: str, body: bytes | None) -> None:
        self._client, self._method, self._path, self._body = client, method, path, body
        self._response: urllib3.BaseHTTPResponse | None = None

    def __enter__(self) -> urllib3.BaseHTTPResponse:
        client = self._client
        try:
            self._response = response = client._pool().urlopen(
                self._method,
                urlsplit(client.url).path + self._path,
                body=self._body,
                headers=client._headers(self._body),
                preload_content=False,
                decode_content=False,
                redirect=False,
            )
            if response.status >= 300:
                raise _error_of(f"{client.url}{self._path}", response)
        except (urllib3.exceptions.HTTPError, OSError) as error:
            self._drop()
            raise self._mapped(error) from None
        return response

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is None and self._response is not None:
            self._response.release_conn()
            return
        self._drop()
        if isinstance(error, (urllib3.exceptions.HTTPError, OSError)) and not isinstance(error, HsstoreError):
            raise self._mapped(error) from None

    def _drop(self) -> None:
        """Never reuse a connection whose answer was not read to its end."""
        if self._response is not None:
            self._response.close()

    def _mapped(self, error: Exception) -> HsstoreError:
        if isinstance(error, HsstoreError):
            return error
        return _Transient(f"no complete answer from {self._client.url}{self._path}: {_reason(error)}")


def _error_of(url: str, response: urllib3.BaseHTTPResponse) -> HsstoreError:
    """The error a problem answer stands for; `_Transient` where trying again may help."""
    try:
        problem = msgspec.json.decode(response.read(1 << 20), type=Problem)
    except (msgspec.DecodeError, UnicodeDecodeError):
        problem = None
    if response.status in _RETRIED_STATUS and (problem is None or problem.kind == ServiceError.kind):
        said = problem.detail if problem else response.reason
        return _Transient(f"{url} answered {response.status}: {said}", _seconds(response.headers.get("Retry-After")))
    if problem is None:
        if response.status == 401:
            return UnauthorizedError(f"{url} wants a token", hint="set HSSTORE_TOKEN")
        return ServiceError(f"{url} answered {response.status} {response.reason}", hint="is this an hsstore service?")
    class_ = _BY_KIND.get(problem.kind, ServiceError)
    return class_(f"{problem.detail} [{url}]", hint=problem.hint)


def _tree(root: type[HsstoreError]) -> Iterator[type[HsstoreError]]:
    yield root
    for class_ in root.__subclasses__():
        if class_.__module__ == errors.__name__:
            yield from _tree(class_)


_BY_KIND: dict[str, type[HsstoreError]] = {class_.kind: class_ for class_ in _tree(HsstoreError)}
_ALIVE = "is the service running? try `curl URL/health`"


def _worth_another_try(error: Exception) -> bool | float:
    if not isinstance(error, _Transient):
        return False
    if error.retry_after is None:
        return True
    return error.retry_after + random.uniform(0.05, 0.5)  # all ranks were told the same second


def _seconds(retry_after: str | None) -> float | None:
    """Seconds of a Retry-After header, at most 30; a date counts as absent."""
    return min(float(retry_after), 30.0) if retry_after and retry_after.isdecimal() else None


def _room(buffer: bytearray | memoryview | None, n_bytes: int) -> memoryview:
    if buffer is not None:
        view = memoryview(buffer).cast("B")
        if len(view) >= n_bytes:
            return view[:n_bytes]
    return np.empty(n_bytes, np.uint8).data  # not bytearray: that would write zeros first


def _reason(error: Exception) -> str:
    """The innermost words of urllib3's nested messages, without object addresses."""
    while error.__cause__ is not None and isinstance(error.__cause__, OSError):
        error = error.__cause__
    text = str(error).split(": ", 1)[-1] if "object at 0x" in str(error) else str(error)
    return text or type(error).__name__


def _checked(url: str) -> str:
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number
        valid = False
    if not valid or parts.query or parts.fragment:
        raise UsageError(f"{url!r} is no URL of a service", hint="expected something like http://127.0.0.1:8420")
    if parts.username or parts.password:
        raise UsageError("the URL of a service holds no user or password", hint="set HSSTORE_TOKEN")
    return url.rstrip("/")


def _restore(url: str, token: str | None, patience: Patience) -> ServiceClient:
    return ServiceClient(url, token=token, patience=patience)
