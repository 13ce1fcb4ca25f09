"""Opening a plain file by its name, whatever lies there: never waiting, never reading a device.

A store and its inputs are directories that others write to. A FIFO under a file's name would wait for a writer for
ever, a device could be read without an end. Leaves to the caller what the file should hold.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from hsstore.errors import DamagedError

# A socket, a device without a driver, a link that leads to itself: refused by `open` itself.
_NEVER_PLAIN = {errno.ENXIO, errno.ENODEV, errno.ELOOP}


def open_plain(path: str | Path, *, name: str = "", hint: str = "") -> int:
    """A descriptor for reading. Raises `DamagedError` for anything but a plain file, else the `OSError` it met.

    `name` is what messages call it.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError as error:
        if error.errno not in _NEVER_PLAIN:
            raise
        raise DamagedError(f"{name or path} is no plain file", hint=hint) from None
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise DamagedError(f"{name or path} is no plain file", hint=hint)
    except BaseException:
        os.close(fd)
        raise
    return fd


def check_plain(path: str | Path) -> None:
    """For a file that a library opens by its name. Raises as `open_plain` does."""
    os.close(open_plain(path))


def read_text(path: Path, most: int = 4096) -> str | None:
    """The first bytes of a small text; None for what is no plain file or no UTF-8. Raises the `OSError` it met."""
    try:
        fd = open_plain(path)
    except DamagedError:
        return None
    try:
        return os.pread(fd, most, 0).decode()
    except UnicodeDecodeError:
        return None
    finally:
        os.close(fd)
