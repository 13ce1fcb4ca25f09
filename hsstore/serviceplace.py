"""The files of a store behind an hsstore service, as a place that can be read.

Responsible for telling a service from a plain web server, and for choosing the store when several are served. Leaves
connections and retries to `client`, which file there may be to the service.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

from hsstore import paths
from hsstore.api import StoreDetail, StoreInfo
from hsstore.client import Patience, ServiceClient
from hsstore.errors import HsstoreError, NotFoundError, UnauthorizedError, UsageError
from hsstore.places import PIECE_BYTES, Piece, Pieces

_NAMED = re.compile(r"(?P<service>.*)/v1/stores/(?P<name>[^/]+)(/files)?/?")
_MANY = 10_000  # attempts: the seconds decide
_FIRST_LOOK = Patience(attempts=2, total_seconds=10.0)


def open_service(url: str, *, uuid: str | None, token: str | None, patience_seconds: float) -> ServicePlace | None:
    """The store at `http://HOST:PORT/v1/stores/NAME`, or at `http://HOST:PORT` the one with that uuid, or the only one.

    None when no service answers there: it may be a plain web server. Raises `NotFoundError` when the service does not
    have the store, `UnauthorizedError` when it wants another token.
    """
    patience = Patience(attempts=_MANY, total_seconds=patience_seconds)
    named = _NAMED.fullmatch(urlsplit(url).path)
    if named:
        service = url[: url.index("/v1/stores/")]
        return ServicePlace(ServiceClient(service, token=token, patience=patience), unquote(named["name"]), url)
    client = ServiceClient(url, token=token, patience=patience)
    try:
        served = [info.name for info in client.get("/v1/stores", list[StoreInfo], patience=_FIRST_LOOK)]
    except UnauthorizedError:
        raise
    except HsstoreError:
        return None  # whoever opens it as a plain web server says what is wrong with it
    return ServicePlace(client, _choose(client, served, uuid), url)


def _choose(client: ServiceClient, served: list[str], uuid: str | None) -> str:
    if len(served) == 1:
        return served[0]
    if uuid is None:
        raise UsageError(
            f"{client.url} serves {', '.join(served)}", hint=f"write {client.url}/v1/stores/NAME to choose one"
        )
    for name in served:
        if client.get(_path(name), StoreDetail).header.uuid == uuid:
            return name
    raise NotFoundError(f"{client.url} does not serve store {uuid}; it serves {', '.join(served)}")


def _path(name: str) -> str:
    return f"/v1/stores/{quote(name, safe='')}"


class ServicePlace:
    """One store of a service."""

    local: Path | None = None

    def __init__(self, client: ServiceClient, name: str, spec: str) -> None:
        self._client, self._spec = client, spec
        self._files = f"{_path(name)}/files/"

    def __str__(self) -> str:
        return self._spec

    def read(self, path: str) -> bytes:
        return bytes(self._client.read(self._at(path)))

    def read_range(self, path: str, start: int, n_bytes: int) -> bytes:
        try:
            return self._client.read_range(self._at(path), start, n_bytes)[0]
        except UsageError:
            return b""  # 416: the file ends before

    def stream(self, path: str, piece_bytes: int = PIECE_BYTES, *, fresh: bool = False) -> Iterator[Piece]:
        at, size = 0, 1
        while at < size:
            piece, size = self._client.read_range(self._at(path), at, piece_bytes)
            at += len(piece)
            yield piece

    def size(self, path: str) -> int | None:
        try:
            return self._client.read_range(self._at(path), 0, 1)[1]
        except NotFoundError:
            return None

    def names(self, directory: str) -> list[str]:
        """From manifest.sha256, which names every file of the store."""
        prefix = f"{directory}/" if directory else ""
        lines = self.read(paths.MANIFEST_SUMS).decode().splitlines()
        listed = [line.partition("  ")[2] for line in lines] + [paths.MANIFEST_SUMS]
        below = [name.removeprefix(prefix) for name in listed if name.startswith(prefix)]
        return sorted(name for name in below if "/" not in name)

    def exists(self, path: str) -> bool:
        return self.size(path) is not None

    def is_empty(self) -> bool:
        return False

    def write_new(self, path: str, data: bytes) -> bool:
        raise self._read_only()

    def put(self, path: str, pieces: Pieces, n_bytes: int) -> None:
        raise self._read_only()

    def _at(self, path: str) -> str:
        return self._files + quote(path)

    def _read_only(self) -> UsageError:
        return UsageError(f"{self._spec} is a service: it can only be read", hint="give a directory or a bucket")
