"""The background thread of a scheduler process that puts captured rows into the staged files.

Responsible for whole writes at the right offset, for a bounded amount of memory waiting to be written, for open files
that do not pile up, for rows that have to wait while others need not, and for saying which request a failed write
belonged to. It never takes the scheduler down: what fails goes to `report`. Leaves to `capture` what the rows are, to
the parent process whether they arrived.

Letters: H hidden size.
"""

from __future__ import annotations

import errno
import math
import os
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from extractor.sglang_plugin.protocol import WriteError
from hsstore.durable import pwrite_all

MAX_QUEUED_BYTES = 1 << 30  # ten seconds of a disk at 100 MB/s; then the scheduler waits, which slows the engine down
MAX_OPEN_FILES = 64  # 16 open shards of 4 states
SWEEP_SECONDS = 1.0
_AGAIN_SECONDS = 0.02


class NoRoomYetError(Exception):
    """There is no place for these rows now. They come again, behind them the rest of their request; others go on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Consecutive rows of one state of one request."""

    request: int
    path: str
    """Staged file; "" for the request's own file in the spool of a server."""
    offset: int
    """Bytes from the start of the file."""
    data: npt.NDArray[np.uint8]
    """Contiguous, owned by this record alone."""
    ticket: str = ""
    """Of a client's request to a server."""
    first: bool = False
    """Whether no rows of the request came before."""
    last: bool = False
    """Whether no rows of the request follow."""
    total_bytes: int = 0
    """Of the request's file in the spool."""
    deadline: float = math.inf
    """When, by the monotonic clock, nobody waits for these rows any more."""

    def at(self, path: str) -> Rows:
        """The same rows for another file."""
        return replace(self, path=path)


class OpenFiles:
    """Descriptors by path: least recently used ones are closed, and those whose path names another file or none."""

    def __init__(self, limit: int = MAX_OPEN_FILES) -> None:
        self._limit = limit
        self._files: OrderedDict[str, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._files)

    def get(self, path: str) -> int:
        """Descriptor of the file that the path names now. Raises `OSError` when there is none."""
        # A staged file is unlinked when its shard is published. A late write must then fail: through an old
        # descriptor it would change committed bytes.
        at_path = os.stat(path)
        fd = self._files.get(path)
        if fd is not None and os.path.samestat(os.fstat(fd), at_path):
            self._files.move_to_end(path)
            return fd
        self.close_one(path)
        fd = self._files[path] = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        while len(self._files) > self._limit:
            self.close_one(next(iter(self._files)))
        return fd

    def sweep(self) -> None:
        """Close the files whose path has gone."""
        for path in [path for path in self._files if not os.path.exists(path)]:
            self.close_one(path)

    def close(self) -> None:
        for path in list(self._files):
            self.close_one(path)

    def close_one(self, path: str) -> None:
        """Close the file of a path when it is open."""
        fd = self._files.pop(path, None)
        if fd is not None:
            os.close(fd)


def write_rows(files: OpenFiles, rows: Rows) -> None:
    """Write all of the rows inside the file as it is. Raises `OSError`; the rows are then undefined."""
    fd = files.get(rows.path)
    if rows.offset + rows.data.nbytes > os.fstat(fd).st_size:
        # A shard file already has its full size; growing it would only hide a wrong place.
        raise OSError(errno.EFBIG, "rows end behind the end of the staged file", rows.path)
    pwrite_all(fd, rows.data.data, rows.offset)


class RowWriter:
    """One daemon thread and its queue. `put` waits while too many bytes are queued, at most `wait_seconds`."""

    def __init__(
        self,
        report: Callable[[WriteError], None],
        *,
        max_queued_bytes: int = MAX_QUEUED_BYTES,
        wait_seconds: float = 240.0,  # SGLang's watchdog ends a scheduler that stands still for 300 s
        write: Callable[[OpenFiles, Rows], Any] = write_rows,
        sweep: Callable[[], None] = lambda: None,
    ) -> None:
        self._report = report
        self._max_queued_bytes = max_queued_bytes
        self._wait_seconds = wait_seconds
        self._write = write
        self._sweep = sweep
        self._files = OpenFiles()
        self._queue: deque[Rows] = deque()
        self._held: deque[Rows] = deque()
        """Of requests for which there was no room; counted among the queued bytes."""
        self._held_tickets: Counter[str] = Counter()
        self._queued_bytes = 0
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="hsstore-row-writer", daemon=True)
        self._thread.start()

    def put(self, rows: Rows) -> None:
        """Queue rows. Raises `TimeoutError` when the disk takes nothing for too long."""
        with self._changed:
            fits = self._changed.wait_for(
                lambda: self._queued_bytes == 0 or self._queued_bytes + rows.data.nbytes <= self._max_queued_bytes,
                self._wait_seconds,
            )
            if not fits:
                raise TimeoutError(f"the disk took no rows for {self._wait_seconds:.0f} s")
            self._queue.append(rows)
            self._queued_bytes += rows.data.nbytes
            self._changed.notify_all()

    def close(self) -> None:
        """Write what is queued, close the files, end the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        swept = tried = time.monotonic()
        while (rows := self._next()) is not None or not self._closed or self._held:
            if rows is not None:
                self._write_in_turn(rows)
            if self._held and time.monotonic() - tried > _AGAIN_SECONDS:
                self._write_held()
                tried = time.monotonic()
            if time.monotonic() - swept > SWEEP_SECONDS:
                self._files.sweep()
                self._sweep()
                swept = time.monotonic()
        self._files.close()

    def _next(self) -> Rows | None:
        with self._changed:
            if self._held:
                self._changed.wait_for(lambda: self._queue, _AGAIN_SECONDS)
            else:
                self._changed.wait_for(lambda: self._queue or self._closed, SWEEP_SECONDS)
            return self._queue.popleft() if self._queue else None

    def _write_in_turn(self, rows: Rows) -> None:
        """Behind what is held of the same request."""
        if (rows.ticket and self._held_tickets[rows.ticket]) or not self._write_one(rows):
            self._held.append(rows)
            self._held_tickets[rows.ticket] += 1

    def _write_held(self) -> None:
        """From the first one on, as far as there is room."""
        while self._held and self._write_one(self._held[0]):
            ticket = self._held.popleft().ticket
            self._held_tickets[ticket] -= 1
            if not self._held_tickets[ticket]:
                del self._held_tickets[ticket]

    def _write_one(self, rows: Rows) -> bool:
        """Whether they are done with: written, or reported as failed."""
        try:
            self._write(self._files, rows)
        except NoRoomYetError:
            return False
        except OSError as error:
            reason = error.strerror or str(error)
            self._report(WriteError(rows.request, rows.path, error.errno or errno.EIO, reason, rows.ticket))
        except Exception as error:  # noqa: BLE001 - a dead thread would stop the scheduler at a full queue; reported instead
            self._report(WriteError(rows.request, rows.path, errno.EIO, repr(error), rows.ticket))
        with self._changed:
            self._queued_bytes -= rows.data.nbytes
            self._changed.notify_all()
        return True
