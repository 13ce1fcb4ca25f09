"""Whole lines appended to a file, whatever happens to it meanwhile.

A line is one write in append mode, so lines of several processes never mix. A file that was renamed (logrotate) or
removed is made anew; a half line, of a full disk or a process that was killed, is taken back or ended. Leaves to the
callers what a line says and what a failed write means to them.
"""

from __future__ import annotations

import errno
import os
import stat

from hsstore.errors import UsageError

STDERR = "-"


class LineFile:
    """Whole lines at the end of a file that may be renamed, removed or full. `-` is stderr."""

    def __init__(self, path: str) -> None:
        """Opened by the first line that is written."""
        self.path = path
        self._is_torn = False
        """The file may end in half a line: the next one begins on a line of its own."""
        self._fd = -1

    def check(self, option: str) -> None:
        """Open it now. Raises `UsageError` naming the option when that cannot be."""
        try:
            self._open()
        except (OSError, ValueError) as error:  # ValueError: a NUL in the name
            reason = getattr(error, "strerror", None) or str(error)
            raise UsageError(
                f"{option} {self.path} cannot be written: {reason.lower()}", hint="give a file that this user may write"
            ) from None

    def _open(self) -> None:
        if self.path == STDERR:
            self._fd = os.dup(2)
        else:
            flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK  # a FIFO must not wait
            self._fd = os.open(self.path, flags, 0o644)
        self._is_torn = self._ends_in_half()

    def _ends_in_half(self) -> bool:
        """What a process that died while writing may have left."""
        if self.path == STDERR or not stat.S_ISREG(os.fstat(self._fd).st_mode):
            return False
        size = os.fstat(self._fd).st_size
        return size > 0 and os.pread(self._fd, 1, size - 1) != b"\n"

    def write(self, line: str) -> OSError | None:
        """Append a line. Returns what was in the way, None when it is written; never raises for the file's sake."""
        try:
            if self._was_rotated():
                self.close()
            if self._fd < 0:
                self._open()
            data = (b"\n" if self._is_torn else b"") + line.encode(errors="backslashreplace") + b"\n"
            written = os.write(self._fd, data)
            if written < len(data):
                self._drop_half(written)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            return error
        self._is_torn = False
        return None

    def _drop_half(self, n_bytes: int) -> None:
        """Take back the part of a line that went in, when nobody has written behind it."""
        self._is_torn = True
        if self.path == STDERR or not stat.S_ISREG(os.fstat(self._fd).st_mode):
            return
        end = os.lseek(self._fd, 0, os.SEEK_CUR)  # append mode leaves the position behind what was written
        if os.fstat(self._fd).st_size == end:
            os.ftruncate(self._fd, end - n_bytes)
            self._is_torn = self._ends_in_half()

    def _was_rotated(self) -> bool:
        if self.path == STDERR or self._fd < 0:
            return False
        try:
            return not os.path.samestat(os.stat(self.path), os.fstat(self._fd))
        except FileNotFoundError:
            return True

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
