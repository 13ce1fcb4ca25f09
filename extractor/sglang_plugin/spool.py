"""The directory in which a server keeps captured rows until a client has fetched them.

Shared by the scheduler processes, which fill it, and the server's main process, which hands out what is in it: one file
a request, named by the request's unguessable ticket. Responsible for a bounded size, for notes of what failed, and for
an end of whatever nobody fetches: a client asks for its rows as soon as it has its answer and then every 20 s, so that
silence means that it is gone. Leaves to `delivery` what is written, to `routes` how it leaves.

    <ticket>.part      rows that are being written
    <ticket>.rows      all of a request's rows, state after state
    <ticket>.asked     touched when a client asks for rows that are not complete yet
    <ticket>.failed    why rows could not be written, here or in staged files
    <ticket>.dropped   nobody wants the rows any more: nothing is written for them from now on
"""

from __future__ import annotations

import math
import os
import re
import tempfile
import time
from pathlib import Path

import msgspec

from extractor.sglang_plugin.protocol import WriteError

DEFAULT_BYTES = 4 << 30
KEEP_SECONDS = 900.0  # of notes, and of rows that are still being captured: the next chunk may take long
LEASE_SECONDS = 60.0  # of rows that a client could have; it asks three times meanwhile
_TICKET = re.compile(r"[0-9a-f]{32}")
_SHARED_MEMORY = Path("/dev/shm")
_LARGEST_SHARE = 0.8  # of what is free where the spool lies
_RESERVED_SHARE = 1 / 16  # for the single tokens by which a new client tries the server, so that they need not wait
_SINGLE_TOKEN_BYTES = 1 << 20
_SINGLE_TOKEN_SHARE = 1 / 1024


def is_ticket(text: str) -> bool:
    """Whether it can name files of the spool; anything else could name other files."""
    return _TICKET.fullmatch(text) is not None


class Spool:
    """Files by ticket. Usable from several processes and threads at once."""

    def __init__(
        self,
        directory: Path,
        max_bytes: int,
        *,
        keep_seconds: float = KEEP_SECONDS,
        lease_seconds: float = LEASE_SECONDS,
    ) -> None:
        self.directory = directory
        self.max_bytes = max_bytes
        self.lease_seconds = lease_seconds
        self._keep_seconds = keep_seconds

    @classmethod
    def of(cls, text: str) -> Spool:
        """From the value of SPOOL_VARIABLE: `BYTES:DIRECTORY`, or a directory. Raises `ValueError`."""
        size, colon, directory = text.partition(":")
        if colon and size.isdecimal():
            return cls(Path(directory), int(size))
        return cls(Path(text), DEFAULT_BYTES)

    def __str__(self) -> str:
        return f"{self.max_bytes}:{self.directory}"

    def rows(self, ticket: str) -> Path:
        return self._path(ticket, "rows")

    def part(self, ticket: str) -> Path:
        return self._path(ticket, "part")

    def is_small(self, n_bytes: int) -> bool:
        """Whether that are the rows of a token or few, for which there is room in reserve."""
        return n_bytes <= min(_SINGLE_TOKEN_BYTES, self.max_bytes * _SINGLE_TOKEN_SHARE)

    def has_room(self, n_bytes: int) -> bool:
        """What is larger than the spool fits when nothing else is there."""
        used = self.used_bytes()
        reserved = 0.0 if self.is_small(n_bytes) else self.max_bytes * _RESERVED_SHARE
        return not used or used + n_bytes <= self.max_bytes - reserved

    def begin(self, ticket: str, n_bytes: int) -> None:
        """Make the file of a request's rows, of that size."""
        with open(self._path(ticket, "part"), "xb") as file:
            file.truncate(n_bytes)

    def asked(self, ticket: str) -> None:
        """A client asks for the rows: they are kept a while longer, as is their place among those that wait."""
        try:
            os.utime(self.rows(ticket))
        except FileNotFoundError:
            self._path(ticket, "asked").touch()

    def silent_seconds(self, ticket: str) -> float:
        """Since somebody asked for rows that are not complete; endless when nobody did."""
        try:
            return max(0.0, time.time() - self._path(ticket, "asked").stat().st_mtime)
        except FileNotFoundError:
            return math.inf

    def finish(self, ticket: str) -> None:
        """The rows are complete. They go at once when they were dropped meanwhile."""
        os.rename(self._path(ticket, "part"), self.rows(ticket))
        self._path(ticket, "asked").unlink(missing_ok=True)
        if self.dropped(ticket):
            self.rows(ticket).unlink(missing_ok=True)

    def fail(self, error: WriteError) -> None:
        """Note why rows are missing, and give up those that are there."""
        self._path(error.ticket, "part").unlink(missing_ok=True)
        half = self._path(error.ticket, "note")
        half.write_bytes(msgspec.json.encode(error))
        half.rename(self._path(error.ticket, "failed"))  # a reader never sees half a note

    def failure(self, ticket: str) -> WriteError | None:
        """What was noted by `fail`."""
        try:
            return msgspec.json.decode(self._path(ticket, "failed").read_bytes(), type=WriteError)
        except FileNotFoundError:
            return None

    def drop(self, ticket: str) -> None:
        """Free the rows; those that are still to come are never written."""
        done = self.rows(ticket).exists()
        if not done:
            self._path(ticket, "dropped").touch()
        for kind in ("rows", "part", "failed", "asked"):
            self._path(ticket, kind).unlink(missing_ok=True)

    def dropped(self, ticket: str) -> bool:
        return self._path(ticket, "dropped").exists()

    def used_bytes(self) -> int:
        total = 0
        with os.scandir(self.directory) as entries:
            for entry in entries:
                try:
                    total += entry.stat().st_size
                except FileNotFoundError:  # delivered while we looked
                    continue
        return total

    def sweep(self) -> None:
        """Remove rows that nobody has asked for, and whatever else is older than anybody waits."""
        now = time.time()
        with os.scandir(self.directory) as entries:
            for entry in entries:
                try:
                    leased = entry.name.endswith((".rows", ".asked"))
                    if now - entry.stat().st_mtime > (self.lease_seconds if leased else self._keep_seconds):
                        os.unlink(entry.path)
                except FileNotFoundError:
                    continue

    def _path(self, ticket: str, kind: str) -> Path:
        if not is_ticket(ticket):
            raise ValueError(f"{ticket[:80]!r} is no ticket")
        return self.directory / f"{ticket}.{kind}"


def make_spool(parent: Path | None, max_bytes: int | None) -> Spool:
    """A spool of its own in `parent`, else in shared memory where that is large enough, else where temporary files lie.

    Never larger than most of what is free there. Raises `OSError` when it cannot be made.
    """
    wanted = max_bytes or DEFAULT_BYTES
    if parent is None:
        roomy = _SHARED_MEMORY.is_dir() and _free_bytes(_SHARED_MEMORY) * _LARGEST_SHARE >= wanted
        parent = _SHARED_MEMORY if roomy else Path(tempfile.gettempdir())
    size = min(wanted, int(_free_bytes(parent) * _LARGEST_SHARE))
    return Spool(Path(tempfile.mkdtemp(prefix="hsstore-spool-", dir=parent)), size)


def _free_bytes(directory: Path) -> int:
    stat = os.statvfs(directory)
    return stat.f_bavail * stat.f_frsize
