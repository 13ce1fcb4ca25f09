"""How rows leave a scheduler process that serves clients it does not know: into staged files, or into the spool.

Anybody who reaches the server can ask for rows to be written somewhere, so only files that a running extraction has
staged are ever opened. Files are closed after each request, since a network file system hands on what is closed, and
nothing is written for a request that was dropped or whose client has given up. Rows for which the spool has no room
wait aside, first come first served; rows for staged files and the single tokens of a new client pass them. Failures
become notes in the spool, which clients ask for. Leaves the queue and the thread to `writer`.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import time
from collections import OrderedDict
from pathlib import Path

from extractor.sglang_plugin.protocol import WriteError
from extractor.sglang_plugin.spool import Spool
from extractor.sglang_plugin.writer import NoRoomYetError, OpenFiles, Rows, write_rows
from hsstore import owner, paths

logger = logging.getLogger(__name__)
_MOST_REMEMBERED = 10_000
_ATTEMPT = re.compile(r"\d{6,}\.[0-9a-f]{4,64}")
SPOOL_WAIT_SECONDS = 120.0


class Delivery:
    """What a `RowWriter` of a server does with rows. Used by its one thread."""

    def __init__(self, spool: Spool, *, wait_seconds: float = SPOOL_WAIT_SECONDS) -> None:
        self._spool = spool
        self._wait_seconds = wait_seconds
        self._waiting: OrderedDict[str, float] = OrderedDict()  # tickets without room: since when
        self._failed: OrderedDict[str, None] = OrderedDict()  # tickets of which some rows are missing already

    def write(self, files: OpenFiles, rows: Rows) -> None:
        """Write rows to their place. Raises `OSError` once for a request; the rest of its rows are left out.

        Raises `NoRoomYetError` when the same rows should come again later.
        """
        if rows.ticket in self._failed:
            if rows.last:
                del self._failed[rows.ticket]
            return
        try:
            if time.monotonic() > rows.deadline or self._spool.dropped(rows.ticket):
                raise OSError(errno.ECANCELED, "nobody waits for these rows any more", rows.path)
            if rows.path:
                self._write_staged(files, rows)
            else:
                self._write_spooled(files, rows)
        except OSError:
            self._waiting.pop(rows.ticket, None)
            if not rows.last:
                self._failed[rows.ticket] = None
                while len(self._failed) > _MOST_REMEMBERED:  # of requests that ended without a last row
                    self._failed.popitem(last=False)
            raise

    def report(self, error: WriteError) -> None:
        """Note a failed write where the client asks for it."""
        logger.error("request %s: writing %s failed: %s", error.ticket, error.path or "rows", error.reason)
        try:
            self._spool.fail(error)
        except OSError as failure:  # the client then hears nothing, and gives up by itself
            logger.error("and could not be noted: %s", failure)

    def sweep(self) -> None:
        try:
            self._spool.sweep()
        except OSError as failure:
            logger.error("the spool cannot be swept: %s", failure)

    def _write_staged(self, files: OpenFiles, rows: Rows) -> None:
        refuse_unstaged(rows.path)
        try:
            write_rows(files, rows)
        finally:
            files.close_one(rows.path)

    def _write_spooled(self, files: OpenFiles, rows: Rows) -> None:
        if rows.first:
            self._wait_for_room(rows)
            self._spool.begin(rows.ticket, rows.total_bytes)
        part = str(self._spool.part(rows.ticket))
        write_rows(files, rows.at(part))
        if rows.last:
            files.close_one(part)
            self._spool.finish(rows.ticket)

    def _wait_for_room(self, rows: Rows) -> None:
        """Return when there is room for the rows, and it is their turn.

        Raises `NoRoomYetError` until then, `OSError` when nobody asks for them or it takes too long.
        """
        ticket = rows.ticket
        is_next = self._spool.is_small(rows.total_bytes) or next(iter(self._waiting), ticket) == ticket
        if is_next and self._spool.has_room(rows.total_bytes):
            self._waiting.pop(ticket, None)
            return
        waited = time.monotonic() - self._waiting.setdefault(ticket, time.monotonic())
        if min(waited, self._spool.silent_seconds(ticket)) > self._spool.lease_seconds:
            raise OSError(errno.ECANCELED, "the spool was full, and nobody asked for these rows", rows.path)
        if waited > self._wait_seconds:
            reason = f"the spool of {self._spool.max_bytes} bytes was full for {waited:.0f} s"
            raise OSError(errno.ENOBUFS, reason, str(self._spool.directory))
        raise NoRoomYetError


def refuse_unstaged(path: str) -> None:
    """Raise `OSError` for a file that no running extraction has staged: `STORE/staging/NUMBER.ATTEMPT/hidden.…`.

    A file with a second name is refused too: its shard is being published, and its bytes are committed.
    """
    file = Path(path)
    directory = file.parent
    named = directory.parent.name == paths.STAGING and _ATTEMPT.fullmatch(directory.name)
    if not (file.is_absolute() and named and ".." not in file.parts):
        raise OSError(errno.EACCES, "not the staged file of a store, so this server does not write there", path)
    status = os.lstat(path)  # FileNotFoundError: this machine does not see the client's files
    if directory.resolve().parent.name != paths.STAGING or not (directory / owner.MARK).is_file():
        raise OSError(errno.EACCES, "not in a directory that an extraction works in", path)
    if not os.path.isfile(path) or os.path.islink(path) or status.st_nlink != 1:
        raise OSError(errno.EACCES, "not a plain file with one name", path)
