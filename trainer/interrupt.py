"""A wish to stop, heard between two steps.

SIGTERM and Ctrl-C only set a flag: a step, a save or a validation in progress is finished, and the ranks agree on the
step at which all of them stop. A second signal ends the process at once; the last checkpoint is not touched by that.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

from hsstore.errors import EXIT_INTERRUPTED

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Stop:
    """Context manager: while open, the signals set `requested`. Outside the main thread it only holds the flag."""

    def __init__(self) -> None:
        self.requested = False
        self._former: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():
            self._former = {s: signal.signal(s, self._on_signal) for s in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, former in self._former.items():
            signal.signal(number, former)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            os._exit(EXIT_INTERRUPTED)
        self.requested = True
