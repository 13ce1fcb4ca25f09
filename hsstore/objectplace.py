"""Object stores (S3, Google Cloud Storage, Azure) as places, through obstore.

Responsible for time-outs, bounded retries and the words of their errors: no call waits for ever, a service that stays
away is a `ServiceError`. Credentials and endpoints come from the environment (AWS_*, GOOGLE_*, AZURE_*), as obstore
reads them. A body that breaks off is continued where it broke, provided that the object is still the same. Leaves what
a plain web server cannot do to `webplace`.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit, urlunsplit

from hsstore import paths
from hsstore.errors import (
    HsstoreError,
    MissingExtraError,
    NotFoundError,
    ServiceError,
    UnauthorizedError,
    UsageError,
    extra_hint,
)
from hsstore.places import PIECE_BYTES, Piece, Pieces, Place
from hsstore.upload import Body

try:
    import obstore
    from obstore import exceptions as refused
    from obstore.store import MemoryStore, from_url
except ImportError:
    raise MissingExtraError("object stores and web servers need obstore", hint=extra_hint("remote")) from None

T = TypeVar("T")
_SINGLE_PUT_BYTES = 8 << 20
_PART_BYTES = 8 << 20  # S3 takes 10,000 parts: files up to 80 GB, of which a shard has a hundredth
_PARTS_AT_ONCE = 2  # of one file
_READ_BYTES = 1 << 20
_PROBE = f"{paths.STAGING}/conditional-put"
_HINT = "run the same command again when the service answers"
_STATUS = re.compile(r"status code: (\d{3})")
_FINAL = {400, 405, 410, 411, 413, 414, 416, 501}
_METADATA_SERVICE = "169.254.169.254"  # where obstore looks for credentials when the environment has none
_memories: dict[str, Any] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long to wait for a service, and between tries."""

    total_seconds: float = 120.0
    """No new try of a call, or of a body that does not get on, is begun after that."""
    retries: int = 3
    """What obstore adds to each try for itself, within `retry_seconds`."""
    retry_seconds: float = 20.0
    first_wait_seconds: float = 0.5
    """Doubles with each attempt up to `longest_wait_seconds`, plus jitter."""
    longest_wait_seconds: float = 8.0
    connect_seconds: float = 5.0
    read_seconds: float = 30.0
    """Without a single byte arriving."""
    request_seconds: float = 600.0
    """For one whole request; the body of a shard file may be a gigabyte."""


def open_object_place(url: str, patience: Patience | None = None) -> Place:
    """The place of a URL. Opens no connection. Raises `UsageError` for a URL that obstore does not take."""
    patience = patience or Patience()
    parts = urlsplit(url)
    if parts.username or parts.password:
        raise UsageError("give no credentials in a URL", hint="set them in the environment")
    if parts.scheme == "memory":
        return ObjectPlace(url, _memories.setdefault(parts.netloc, MemoryStore()), patience, prefix=parts.path)
    client = {
        "connect_timeout": timedelta(seconds=patience.connect_seconds),
        "read_timeout": timedelta(seconds=patience.read_seconds),
        "timeout": timedelta(seconds=patience.request_seconds),
        "allow_http": parts.scheme == "http" or _allow_http(),
    }
    backoff = {"init_backoff": timedelta(milliseconds=200), "max_backoff": timedelta(seconds=5), "base": 2}
    retry = {
        "backoff": backoff,
        "max_retries": patience.retries,
        "retry_timeout": timedelta(seconds=patience.retry_seconds),
    }
    plain = urlunsplit((parts.scheme, parts.netloc, parts.path.rstrip("/"), parts.query, ""))
    try:
        store = from_url(plain, client_options=client, retry_config=retry)  # type: ignore[call-overload]
    except (refused.BaseError, ValueError) as error:
        raise UsageError(f"{url} cannot be used: {_said(error)}", hint="check the URL") from None
    if parts.scheme in ("http", "https"):
        from hsstore.webplace import WebPlace

        return WebPlace(url, store, patience)
    return ObjectPlace(url, store, patience)


def _allow_http() -> bool:
    """obstore forgets this setting of the environment when it is given any client option of ours."""
    names = ("AWS_ALLOW_HTTP", "GOOGLE_ALLOW_HTTP", "AZURE_ALLOW_HTTP")
    return any(os.environ.get(name, "").lower() in ("1", "true", "yes", "on", "y") for name in names)


class ObjectPlace:
    """A bucket, or what lies under a prefix of one."""

    local: Path | None = None

    def __init__(self, url: str, store: Any, patience: Patience, prefix: str = "") -> None:
        self._url, self._store, self.patience = url, store, patience
        self._prefix = prefix.strip("/")
        self._lock = threading.Lock()
        self._honours: bool | None = None

    def __str__(self) -> str:
        return self._url

    def read(self, path: str) -> bytes:
        return b"".join(map(bytes, self.stream(path)))

    def read_range(self, path: str, start: int, n_bytes: int) -> bytes:
        size = self.size(path)
        if size is None:
            raise NotFoundError(f"{self._at(path)} does not exist")
        n_bytes = min(n_bytes, size - start)
        if n_bytes <= 0:
            return b""
        # `get` rather than `get_range`: only its answer says which bytes it has.
        data, found = self._call(path, lambda: self._range_once(path, start, start + n_bytes))
        if found != (start, start + n_bytes) or len(data) != n_bytes:
            raise ServiceError(f"{self._at(path)} was asked for bytes {start} to {start + n_bytes}, it gave {found}")
        return data

    def _range_once(self, path: str, start: int, stop: int) -> tuple[bytes, tuple[int, int]]:
        answer = obstore.get(self._store, self._key(path), options={"range": (start, stop)})
        return bytes(answer.bytes()), answer.range

    def stream(self, path: str, piece_bytes: int = PIECE_BYTES, *, fresh: bool = False) -> Iterator[Piece]:
        """obstore's pieces as they come: at least 1 MiB, whatever `piece_bytes` says (it buffers what arrives)."""
        progress, tries, tag, size = 0, _Tries(self.patience), None, None
        while size is None or progress < size:
            before = progress
            try:
                answer = obstore.get(self._store, self._key(path), options=self._rest(progress, tag))
                tag, size = answer.meta["e_tag"], answer.meta["size"]
                for piece in answer.stream(min_chunk_size=min(piece_bytes, _READ_BYTES)):
                    progress += len(piece)
                    yield piece
                if progress < size:
                    raise refused.GenericError(f"the body ended after {progress} of {size} bytes")
            except refused.PreconditionError:
                raise ServiceError(f"{self._at(path)} was replaced while it was read", hint="run it again") from None
            except (OSError, refused.BaseError) as error:
                if progress > before:
                    tries = _Tries(self.patience)
                tries.wait_or_raise(self._error(path, error))

    @staticmethod
    def _rest(start: int, tag: str | None) -> Any:
        """Options of a request for what comes behind `start`, of the same object."""
        options: dict[str, Any] = {"range": {"offset": start}} if start else {}
        if start and tag is not None:
            options["if_match"] = tag
        return options

    def size(self, path: str) -> int | None:
        try:
            return int(self._call(path, lambda: obstore.head(self._store, self._key(path)))["size"])
        except NotFoundError:
            return None

    def names(self, directory: str) -> list[str]:
        """Raises `NotFoundError` when there is no such bucket."""
        key = self._key(directory)
        found = self._call(directory, lambda: obstore.list_with_delimiter(self._store, key or None))
        return sorted(entry["path"].rpartition("/")[2] for entry in found["objects"])

    def write_new(self, path: str, data: bytes) -> bool:
        """By a conditional put. False also when an earlier try of this call won and its answer was lost: whoever cares
        compares what lies there. Where a service ignores the condition (`honours_conditions`), by look, then put."""
        if not self.honours_conditions():
            if self.exists(path):
                return False
            self._put_small(path, data, "overwrite")
            return True
        return self._put_small(path, data, "create")

    def honours_conditions(self) -> bool:
        """Whether the service refuses to overwrite when it is told so. Found out once, with a file in staging/."""
        with self._lock:
            if self._honours is None:
                self._honours = self._probe()
            return self._honours

    def _probe(self) -> bool:
        try:
            if self._put_small(_PROBE, b"hsstore\n", "create"):
                taken = not self._put_small(_PROBE, b"hsstore\n", "create")
                with contextlib.suppress(UnauthorizedError):  # who may write need not be allowed to delete
                    self._call(_PROBE, lambda: obstore.delete(self._store, self._key(_PROBE)))
                return taken
        except FinalServiceError:
            return False
        return True

    def _put_small(self, path: str, data: bytes, mode: Any) -> bool:
        def put() -> bool:
            try:
                obstore.put(self._store, self._key(path), data, mode=mode, use_multipart=False)
            except refused.AlreadyExistsError:
                return False
            return True

        return self._call(path, put)

    def put(self, path: str, pieces: Pieces, n_bytes: int) -> None:
        """Small files in one request, others as a multipart upload, which shows nothing before its end."""
        tries = _Tries(self.patience)
        while True:
            body = Body(path, pieces(), n_bytes)
            try:
                self._put_once(path, body, n_bytes)
                return
            except (OSError, refused.BaseError) as error:
                if body.error is not None:
                    raise body.error from None
                tries.wait_or_raise(self._error(path, error))
            finally:
                body.close()

    def _put_once(self, path: str, body: Body, n_bytes: int) -> None:
        key = self._key(path)
        if n_bytes <= _SINGLE_PUT_BYTES:
            obstore.put(self._store, key, b"".join(body), use_multipart=False)
            return
        obstore.put(
            self._store, key, iter(body), use_multipart=True, chunk_size=_PART_BYTES, max_concurrency=_PARTS_AT_ONCE
        )

    def exists(self, path: str) -> bool:
        return self.size(path) is not None

    def is_empty(self) -> bool:
        """What a killed copy left of finding out about conditions does not count."""
        key = self._key("")
        found = self._call("", lambda: next(iter(obstore.list(self._store, key or None, chunk_size=2)), []))
        return all(entry["path"] == self._key(_PROBE) for entry in found)

    def _key(self, path: str) -> str:
        return "/".join(filter(None, (self._prefix, path)))

    def _at(self, path: str) -> str:
        return f"{self._url.rstrip('/')}/{path}"

    def _call(self, path: str, call: Callable[[], T]) -> T:
        tries = _Tries(self.patience)
        while True:
            try:
                return call()
            except (OSError, refused.BaseError) as error:
                tries.wait_or_raise(self._error(path, error))

    def _error(self, path: str, error: Exception) -> HsstoreError:
        """What the library says, as one of ours; a `ServiceError` is worth another try."""
        where, said = self._at(path), _said(error)
        status = int(match[1]) if (match := _STATUS.search(said)) else 0
        if isinstance(error, FileNotFoundError | refused.NotFoundError) or status == 404:
            return NotFoundError(f"{where} does not exist", hint="check the URL, and that the bucket exists")
        refusals = refused.PermissionDeniedError | refused.UnauthenticatedError
        if isinstance(error, refusals) or status in (401, 403) or _METADATA_SERVICE in said:
            hint = "check the credentials in the environment (AWS_*, GOOGLE_*, AZURE_*)"
            return UnauthorizedError(f"{where} is refused: {said}", hint=hint)
        if isinstance(error, refused.InvalidPathError | refused.UnknownConfigurationKeyError):
            return UsageError(f"{where} cannot be used: {said}", hint="check the URL")
        if isinstance(error, refused.NotSupportedError | NotImplementedError) or (
            status in _FINAL and "RequestTimeout" not in str(error)  # S3 says 400 to a body that came too slowly
        ):
            return FinalServiceError(f"{where}: {said}", hint="the service does not do what was asked")
        return ServiceError(f"{where}: {said}", hint=_HINT)


class FinalServiceError(ServiceError):
    """The service answers, and will always answer that."""


class _Tries:
    """The tries of one call."""

    def __init__(self, patience: Patience) -> None:
        self._patience, self._failed, self._started = patience, 0, time.monotonic()

    def wait_or_raise(self, error: HsstoreError) -> None:
        """Wait for the time of the next try, or raise when none may help or the patience is at its end."""
        if not isinstance(error, ServiceError) or isinstance(error, FinalServiceError):
            raise error from None
        p, self._failed = self._patience, self._failed + 1
        wait = min(p.longest_wait_seconds, p.first_wait_seconds * 2 ** (self._failed - 1)) * (1 + random.random() / 2)
        if time.monotonic() + wait - self._started > p.total_seconds:
            raise ServiceError(f"{error.message} (tried {self._failed} times)", hint=error.hint) from None
        time.sleep(wait)


def _said(error: Exception) -> str:
    """obstore appends a dump of its internals to what it says."""
    return str(error).partition("\n")[0].strip() or type(error).__name__
