"""Bring pages of a memory map into memory on purpose, and learn of a truncated or unreadable file without SIGBUS.

A cold page touched by `send` would stall every connection of a server, and one behind the end of a truncated file
kills the process that copies it in user space. `madvise(MADV_POPULATE_READ)` (Linux 5.14) does the touching inside the
kernel: it blocks only the thread that asks, and answers EFAULT where an access would have raised SIGBUS. Older kernels
get read-ahead without waiting; there the size of the file, which is always looked at, is all that is known.

Called through ctypes because that releases the GIL, which `mmap.madvise` does not.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys

import numpy as np

from hsstore.errors import DamagedError

MADV_POPULATE_READ = 22  # linux/mman.h; Python's mmap does not name it
_PAGE_BYTES = mmap.PAGESIZE
_NOT_KNOWN = {errno.EINVAL, errno.ENOSYS}
_GONE = {errno.EFAULT, errno.ENOMEM, getattr(errno, "EHWPOISON", 133)}
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def prefault(piece: memoryview, what: str = "") -> None:
    """Read the pages under `piece` in. Pieces that lie in no map are left alone.

    Raises `DamagedError`, naming `what`, when the file behind them became shorter or its medium gives an error.
    """
    if sys.platform != "linux" or not piece.nbytes or not isinstance(piece.obj, mmap.mmap):
        return
    check_size(piece, what)
    address = np.frombuffer(piece, np.uint8).ctypes.data
    start = address - address % _PAGE_BYTES
    n_bytes = address + piece.nbytes - start
    code = _madvise(start, n_bytes, MADV_POPULATE_READ)
    if code in _NOT_KNOWN:
        code = _madvise(start, n_bytes, mmap.MADV_WILLNEED)
    if code in _GONE:
        raise _gone(what)
    if code:
        raise OSError(code, os.strerror(code))


def read_ahead(piece: memoryview) -> None:
    """Have the kernel start reading the pages of a piece of a map, without waiting for them. Advice: never an error."""
    address = np.frombuffer(piece, np.uint8).ctypes.data
    start = address - address % _PAGE_BYTES
    _madvise(start, address + piece.nbytes - start, mmap.MADV_WILLNEED)


def check_size(piece: memoryview, what: str = "") -> None:
    """Raise `DamagedError`, naming `what`, when the file of the map under `piece` is shorter than the map: 0.5 µs."""
    owner = piece.obj
    assert isinstance(owner, mmap.mmap)
    if owner.size() < len(owner):  # fstat; the rest of a last page would read as zeros without an error
        raise _gone(what)


def _gone(what: str) -> DamagedError:
    why = "its file became shorter than its record, or its medium gives errors"
    return DamagedError(
        f"{what or 'a piece of the store'} cannot be read: {why}", hint="run `hsstore verify manifest STORE`"
    )


def _madvise(start: int, n_bytes: int, advice: int) -> int:
    """errno of the call, 0 when it went well."""
    while True:
        if _libc.madvise(start, n_bytes, advice) == 0:
            return 0
        code = ctypes.get_errno()
        if code not in (errno.EAGAIN, errno.EINTR):
            return code
