"""A plain web server as a place to read from: what it lacks compared with an object store.

Leaves requests, time-outs and retries to `objectplace`.
"""

from __future__ import annotations

import html.parser
from urllib.parse import unquote, urlsplit

from hsstore import paths
from hsstore.errors import NotFoundError, UnauthorizedError, UsageError
from hsstore.objectplace import ObjectPlace
from hsstore.places import Pieces


class WebPlace(ObjectPlace):
    """What a plain web server shows; read only. Directories are listed from its index pages, else from
    manifest.sha256, which names every file that the store had when its manifest was built."""

    def names(self, directory: str) -> list[str]:
        page = self._page(directory)
        if page is not None:
            return sorted(set(page))
        prefix = f"{directory}/" if directory else ""
        sums = self.read(paths.MANIFEST_SUMS).decode("utf-8", "replace").splitlines()
        listed = [
            name.removeprefix(prefix)
            for _, _, name in (line.partition("  ") for line in sums)
            if name.startswith(prefix)
        ]
        return sorted(name for name in listed if name and "/" not in name)

    def _page(self, directory: str) -> list[str] | None:
        """Links of the index page of a directory; None when the server gives none."""
        try:
            data = self.read(directory)
        except (NotFoundError, UnauthorizedError):  # many servers say 403 where they show no index
            return None
        links = _Links()
        links.feed(data.decode("utf-8", "replace"))
        return links.names

    def is_empty(self) -> bool:
        raise self._read_only()  # asked of a place that is to be written

    def write_new(self, path: str, data: bytes) -> bool:
        raise self._read_only()

    def put(self, path: str, pieces: Pieces, n_bytes: int) -> None:
        raise self._read_only()

    def _read_only(self) -> UsageError:
        return UsageError(f"{self} can only be read", hint="copy to a directory or an object store")


class _Links(html.parser.HTMLParser):
    """Names of the files that an index page links to."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "a" and (target := dict(attrs).get("href")):
            name = unquote(urlsplit(target).path)
            if name and "/" not in name and not name.startswith("."):
                self.names.append(name)
