"""Bytes of files that may be anything: opened without waiting, read in pieces, past the page cache, at a bounded rate.

Leaves to `filecheck` what the bytes should be.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from hsstore.digest import crc32c
from hsstore.errors import DamagedError, IncompleteError, from_os_error

PIECE_BYTES = 1 << 20  # SHA-256 of 64 KiB pieces is 6 % slower, of 4 MiB ones not faster
_DROP_BYTES = 16 << 20  # of a file that is being read, no more than about this much stays in the page cache
_OURS = {errno.EMFILE, errno.ENFILE, errno.ENOMEM}


class RateLimit:
    """So many bytes a second, all threads together."""

    def __init__(self, bytes_per_second: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate, self._clock = bytes_per_second, clock
        self._free_at = clock()
        self._lock = threading.Lock()

    def reserve(self, n_bytes: int) -> float:
        """Take a turn of that many bytes. Returns the seconds to wait for it."""
        with self._lock:
            now = self._clock()
            start = max(self._free_at, now)
            self._free_at = start + n_bytes / self._rate
            return start - now


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How bytes are asked for; shared by all threads of one verification."""

    cached: bool = False
    """Whether what lies in the page cache may answer for the disk."""
    rate: RateLimit | None = None
    stop: threading.Event = field(default_factory=threading.Event)
    """Set: every read that is not begun yet raises `IncompleteError`."""
    on_bytes: Callable[[int], None] = lambda n: None
    """Called with what was read, by any thread."""
    _buffers: threading.local = field(default_factory=threading.local)

    @contextlib.contextmanager
    def open(self, path: str) -> Iterator[PlainFile]:
        """A plain file. Raises `DamagedError` for anything else under that name, and the `OSError` it met."""
        # A FIFO would wait for a writer: looked at first, and opened in a way that never waits.
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise DamagedError(f"{path} is no plain file")
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise DamagedError(f"{path} is no plain file")
            yield PlainFile(self, fd, status.st_size)
        finally:
            os.close(fd)

    def buffer(self) -> memoryview:
        """This thread's buffer of `PIECE_BYTES`."""
        view: memoryview | None = getattr(self._buffers, "view", None)
        if view is None:
            view = self._buffers.view = memoryview(bytearray(PIECE_BYTES))
        return view

    def wait(self, n_bytes: int) -> None:
        """Until that many bytes may be read."""
        if self.rate is not None:
            self.stop.wait(self.rate.reserve(n_bytes))
        if self.stop.is_set():
            raise IncompleteError("the verification was stopped")


@dataclass(frozen=True, slots=True)
class PlainFile:
    """An open file and how to read it."""

    reading: Reading
    fd: int
    size: int

    def read(self, start: int, n_bytes: int) -> bytes:
        """A few bytes, through the page cache; fewer at the end of the file."""
        self.reading.wait(n_bytes)
        out = bytearray()
        while len(out) < n_bytes:
            piece = os.pread(self.fd, n_bytes - len(out), start + len(out))
            if not piece:
                break
            out += piece
        self.reading.on_bytes(len(out))
        return bytes(out)

    def pieces(self, start: int, n_bytes: int) -> Iterator[memoryview]:
        """The bytes in cache-sized pieces, valid until the next one; fewer when the file ends.

        Unless `cached`, the page cache is asked to forget them before, so that the disk answers, and after, so that
        what other programs have in it is not pushed out.
        """
        buffer, at, end, kept = self.reading.buffer(), start, start + n_bytes, start
        self._advise(start, n_bytes, os.POSIX_FADV_DONTNEED)
        if n_bytes >= _DROP_BYTES:
            self._advise(start, n_bytes, os.POSIX_FADV_SEQUENTIAL)
        try:
            while at < end:
                view = buffer[: min(len(buffer), end - at)]
                self.reading.wait(len(view))
                n = os.preadv(self.fd, [view], at)
                if not n:
                    break
                self.reading.on_bytes(n)
                at += n
                yield view[:n]
                if at - kept >= _DROP_BYTES:
                    self._advise(kept, at - kept, os.POSIX_FADV_DONTNEED)
                    kept = at
        finally:
            self._advise(kept, at - kept, os.POSIX_FADV_DONTNEED)

    def sha256(self) -> str:
        """Of the whole file."""
        digest = hashlib.sha256()
        for piece in self.pieces(0, self.size):
            digest.update(piece)  # without the GIL: the only arithmetic here that uses all cores
        return digest.hexdigest()

    def crc32c(self, start: int, n_bytes: int, digest: hashlib._Hash | None = None) -> int:
        """Of a range, which is added to `digest` too."""
        value = 0
        for piece in self.pieces(start, n_bytes):
            value = crc32c(piece, value)
            if digest is not None:
                digest.update(piece)
        return value

    def _advise(self, start: int, n_bytes: int, advice: int) -> None:
        # File systems that do not take advice (and say so) are read through their cache.
        if not self.reading.cached and n_bytes > 0:
            with contextlib.suppress(OSError):
                os.posix_fadvise(self.fd, start, n_bytes, advice)


def raise_if_ours(error: OSError) -> None:
    """Raise what is no fault of the store: too many open files, no memory."""
    if error.errno in _OURS:
        raise from_os_error(error) from None
