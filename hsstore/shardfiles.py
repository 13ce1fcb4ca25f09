"""Bytes of sealed files, by memory map or by `pread`: two readers with one interface.

Responsible for comparing a file's size with its record before it is used, for a cap on live maps and open files, and
for turning what the medium does (a file that became shorter, EIO, a stale handle) into `DamagedError` that names rows,
never into SIGBUS. Safe in threads and under fork: maps and descriptors are inherited, reads name their offset. Leaves
to `store` which file an array's rows lie in.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import resource
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Generic, Literal, NamedTuple, TypeVar

import numpy as np

from hsstore.errors import DamagedError
from hsstore.locks import ForkLock
from hsstore.plainfile import open_plain
from hsstore.prefault import check_size, prefault, read_ahead

Backend = Literal["mmap", "pread"]
MAX_MAPS = 256
_STEP_BYTES = 4 << 20
_PART_BYTES = 1 << 16
_UNREADABLE = {errno.EIO, errno.EBADMSG, errno.EUCLEAN, errno.ENODATA, errno.EREMOTEIO}


class SealedFile(NamedTuple):
    """One file of a shard, as its record describes it."""

    relative: str
    """Path relative to the store."""
    paths: tuple[Callable[[], Path], ...]
    """Where it may lie, in that order: its final name, then its staged one while it is not published."""
    n_bytes: int
    row_bytes: int
    shard: int
    hint: str

    def rows(self, start: int, n_bytes: int) -> str:
        """A byte range in words."""
        first, last = start // self.row_bytes, (start + n_bytes - 1) // self.row_bytes
        return f"rows {first} to {last} of shard {self.shard} ({self.relative})"


Key = tuple[str, int]
"""(array, shard)."""
Locate = Callable[[Key], SealedFile]
Held = TypeVar("Held")


class Reader(ABC):
    """Reads byte ranges of sealed files."""

    @abstractmethod
    def view(self, key: Key, start: int, n_bytes: int) -> memoryview:
        """The bytes, read-only. Raises `DamagedError` for a file that is missing or of another size than recorded."""

    @abstractmethod
    def read_into(self, key: Key, start: int, out: memoryview) -> None:
        """Fill `out`. Raises `DamagedError` naming rows for bytes that cannot be read."""

    @abstractmethod
    def close(self) -> None:
        """Let go of every file. Views that are held stay valid; the next read opens again."""


def reader(backend: Backend, locate: Locate, max_maps: int) -> Reader:
    return PreadReader(locate, max_maps) if backend == "pread" else MapReader(locate, max_maps)


class _OpenFiles(Generic[Held]):
    """At most `most` of something that holds a descriptor, the least recently used going first."""

    def __init__(self, opened: Callable[[Key], Held], most: int) -> None:
        self._opened, self._most = opened, most
        self._held: OrderedDict[Key, Held] = OrderedDict()
        self._lock = ForkLock()

    def __len__(self) -> int:
        return len(self._held)

    def get(self, key: Key) -> Held:
        with self._lock:
            held = self._held.get(key)
            if held is None:
                held = self._held[key] = self._open(key)
                while len(self._held) > self._most:
                    self._held.popitem(last=False)
            else:
                self._held.move_to_end(key)
            return held

    def _open(self, key: Key) -> Held:
        try:
            return self._opened(key)
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE) or not self._held:
                raise
            self._held.clear()  # the limit is lower than the cap, or others need descriptors as well
            return self._opened(key)

    def forget(self, key: Key) -> None:
        with self._lock:
            self._held.pop(key, None)

    def clear(self) -> None:
        with self._lock:
            self._held.clear()


def _cap(max_maps: int) -> int:
    """Each map keeps a descriptor: never more than half of what this process may have."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max_maps if soft == resource.RLIM_INFINITY else max(1, min(max_maps, soft // 2))


def open_checked(file: SealedFile) -> int:
    """A descriptor of the file. Raises `DamagedError` when it is missing, no plain file or not as long as recorded."""
    for path in file.paths:
        try:
            fd = open_plain(path(), name=file.relative, hint=file.hint)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            if error.errno not in _UNREADABLE:
                raise
            raise DamagedError(f"{file.relative} cannot be opened: {error.strerror}", hint=file.hint) from None
        try:
            size = os.fstat(fd).st_size
        except BaseException:
            os.close(fd)
            raise
        if size == file.n_bytes:
            return fd
        os.close(fd)
        raise DamagedError(f"{file.relative} has {size} bytes, its record says {file.n_bytes}", hint=file.hint)
    raise DamagedError(f"{file.relative} is missing", hint=file.hint)


class _Map:
    """A whole file in memory, and which of its pages were brought in on purpose."""

    __slots__ = ("array", "seen", "view")

    def __init__(self, fd: int, n_bytes: int) -> None:
        self.view = memoryview(mmap.mmap(fd, n_bytes, prot=mmap.PROT_READ))
        self.array = np.frombuffer(self.view, np.uint8)
        self.seen = bytearray(-(-n_bytes // _PART_BYTES))
        """1 for each part that was read once without an error."""

    def expect(self, start: int, stop: int) -> None:
        """Say which bytes will be checked next: the disk sees them all at once, not the 128 kB the kernel guesses."""
        if self.seen.find(0, start // _PART_BYTES, -(-stop // _PART_BYTES)) >= 0:
            read_ahead(self.view[start:stop])

    def check(self, start: int, stop: int) -> None:
        """Raise `DamagedError` when a copy of these bytes would be SIGBUS.

        The kernel is asked for pages (200 ns each) only where none was asked for before; elsewhere, as long as the file
        has its size, they are there or come back from a medium that gave them once.
        """
        check_size(self.view)
        first, last = start // _PART_BYTES, -(-stop // _PART_BYTES)
        if self.seen.find(0, first, last) >= 0:
            prefault(self.view[first * _PART_BYTES : last * _PART_BYTES])
            self.seen[first:last] = b"\1" * (last - first)


class MapReader(Reader):
    """Zero-copy views of memory maps. For a local disk.

    Copies are twice as fast as with `pread` where the pages are in memory (benchmarks/gather.py). What is left of
    SIGBUS: a file cut within the 0.3 ms of a step's copy, and a medium that fails to give a page a second time.
    """

    def __init__(self, locate: Locate, max_maps: int = MAX_MAPS) -> None:
        self._locate = locate
        self._maps = _OpenFiles(self._map, _cap(max_maps))

    def _map(self, key: Key) -> _Map:
        file = self._locate(key)
        fd = open_checked(file)
        try:
            # Past the end of a map is SIGBUS, not an exception: what is not all there was refused above.
            return _Map(fd, file.n_bytes)
        finally:
            os.close(fd)

    def view(self, key: Key, start: int, n_bytes: int) -> memoryview:
        return self._maps.get(key).view[start : start + n_bytes]

    def read_into(self, key: Key, start: int, out: memoryview) -> None:
        held, filled = self._maps.get(key), np.frombuffer(out, np.uint8)
        held.expect(start, start + len(out))
        for at in range(0, len(out), _STEP_BYTES):
            target = filled[at : at + _STEP_BYTES]
            first, stop = start + at, start + at + len(target)
            try:
                held.check(first, stop)
            except DamagedError as error:
                self._maps.forget(key)
                file = self._locate(key)
                what = error.message.removeprefix("a piece of the store ")
                raise DamagedError(f"{file.rows(first, len(target))} {what}", hint=file.hint) from None
            np.copyto(target, held.array[first:stop])  # lets other threads run, as an assignment of views would not

    def close(self) -> None:
        self._maps.clear()


class _Descriptor:
    """Closed when nobody reads from it any more: another thread may have taken it from the cache before it left."""

    __slots__ = ("fd",)

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self) -> None:
        with contextlib.suppress(OSError):  # it is closed all the same, and was only read from
            os.close(self.fd)


class PreadReader(Reader):
    """Copies by `preadv`, straight into the caller's buffer. For network disks, and wherever no map may be."""

    def __init__(self, locate: Locate, max_files: int = MAX_MAPS) -> None:
        self._locate = locate
        self._files = _OpenFiles(lambda key: _Descriptor(open_checked(locate(key))), _cap(max_files))

    def view(self, key: Key, start: int, n_bytes: int) -> memoryview:
        out = np.empty(n_bytes, np.uint8).data
        self.read_into(key, start, out)
        return out.toreadonly()

    def read_into(self, key: Key, start: int, out: memoryview) -> None:
        try:
            self._fill(key, start, out)
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
            self._fill(key, start, out)  # a file server has started again: a new handle, once

    def _fill(self, key: Key, start: int, out: memoryview) -> None:
        held = self._files.get(key)
        done = 0
        while done < len(out):
            try:
                n = os.preadv(held.fd, [out[done:]], start + done)
                why = "the file became shorter than its record"
            except OSError as error:
                self._files.forget(key)
                if error.errno not in _UNREADABLE:
                    raise
                n, why = 0, error.strerror or "read error"
            if n == 0:
                self._files.forget(key)
                file = self._locate(key)
                where = file.rows(start + done, len(out) - done)
                raise DamagedError(f"{where} cannot be read: {why}", hint=file.hint)
            done += n

    def close(self) -> None:
        self._files.clear()
