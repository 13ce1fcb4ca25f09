"""Bring pages of a memory map into memory off the event loop, and learn of a truncated file without SIGBUS.

A cold page touched by `send` would stall every connection, and one behind the end of a truncated file would kill a
process that copies it in user space. `madvise(MADV_POPULATE_READ)` (Linux 5.14) does the touching inside the kernel:
it blocks only the thread that asks, and answers EFAULT where an access would have raised SIGBUS. Older kernels get
read-ahead without waiting; there the EFAULT comes from the socket's write, which is safe too.

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


def prefault(piece: memoryview) -> None:
    """Read the pages under `piece` in. Raises `DamagedError` when the file behind them is shorter than its map."""
    if sys.platform != "linux" or not piece.nbytes:
        return
    address = np.frombuffer(piece, np.uint8).ctypes.data
    start = address - address % _PAGE_BYTES
    n_bytes = address + piece.nbytes - start
    code = _madvise(start, n_bytes, MADV_POPULATE_READ)
    if code in _NOT_KNOWN:
        _madvise(start, n_bytes, mmap.MADV_WILLNEED)
    elif code in _GONE:
        raise DamagedError(
            "a file of the store became shorter than its record while it was served",
            hint="run `hsstore verify manifest STORE --quick`",
        )
    elif code:
        raise OSError(code, os.strerror(code))


def _madvise(start: int, n_bytes: int, advice: int) -> int:
    """errno of the call, 0 when it went well."""
    while True:
        if _libc.madvise(start, n_bytes, advice) == 0:
            return 0
        code = ctypes.get_errno()
        if code not in (errno.EAGAIN, errno.EINTR):
            return code
