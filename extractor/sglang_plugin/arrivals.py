"""Whether the rows of a request have arrived in its files as they were captured.

The scheduler answers before its background thread has written, so a receipt alone proves nothing about the disk.
Responsible for waiting, for comparing digests, and for turning a reported write error into one of ours.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable

from extractor.sglang_plugin.process import RESUME_HINT
from extractor.sglang_plugin.protocol import Receipt, Target, WriteError
from hsstore.digest import crc32c_at
from hsstore.errors import HsstoreError, IncompleteError, NoSpaceError

FIRST_WAIT_SECONDS = 0.0005
LONGEST_WAIT_SECONDS = 0.1


class Arrivals:
    def __init__(self, reported: Callable[[], list[WriteError]], *, row_bytes: int, seconds: float) -> None:
        self._reported = reported
        self._row_bytes = row_bytes
        self._seconds = seconds
        self._errors: dict[int, WriteError] = {}

    def forget(self) -> None:
        """Drop errors of requests nobody waits for any more."""
        self._reported()
        self._errors.clear()

    def confirm(self, target: Target, receipt: Receipt) -> None:
        """Return when every state's rows have the receipt's digest.

        Raises `NoSpaceError` or `IncompleteError` when a write failed or the rows do not come in time.
        """
        deadline = time.monotonic() + self._seconds
        for name, path in target.files.items():
            wait = FIRST_WAIT_SECONDS
            while self._digest(target, path) != receipt.crc32c[name]:
                self._raise_reported(target.request)
                if time.monotonic() > deadline:
                    raise IncompleteError(
                        f"rows {target.row} to {target.row + target.n_tokens - 1} of {path} are not what was captured, "
                        f"{self._seconds:.0f} s after the engine said so",
                        hint=RESUME_HINT,
                    )
                time.sleep(wait)
                wait = min(2 * wait, LONGEST_WAIT_SECONDS)

    def _digest(self, target: Target, path: str) -> int | None:
        try:
            return crc32c_at(path, target.row * self._row_bytes, target.n_tokens * self._row_bytes)
        except OSError as error:
            raise IncompleteError(f"cannot read {path} back: {error.strerror}", hint=RESUME_HINT) from None

    def _raise_reported(self, request: int) -> None:
        self._errors.update((error.request, error) for error in self._reported())
        if error := self._errors.pop(request, None):
            raise write_error(error)


def write_error(error: WriteError) -> HsstoreError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return NoSpaceError(f"no space left while writing {error.path}", hint=f"free some; {RESUME_HINT}")
    return IncompleteError(f"writing {error.path} failed: {error.reason}", hint=RESUME_HINT)
