"""The demo's child processes: started so that Ctrl-C reaches each once, and ended with the demo, whatever ends it.

Leaves to `demo` what is run and what it means.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

GRACE_SECONDS = 30.0  # a training step in progress and its checkpoint
READY_SECONDS = 60.0


class Children:
    """Context manager: no child outlives it. SIGTERM and a closed terminal count as Ctrl-C."""

    def __init__(self) -> None:
        self._running: list[subprocess.Popen[bytes]] = []
        self._former: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Children:
        self._former = {number: signal.signal(number, _interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for child in reversed(self._running):
            _end(child)
        for number, former in self._former.items():
            signal.signal(number, former)

    def run(self, command: Sequence[str], *, stdout: Path | None) -> int:
        """Run to its end, stdout into a file or to where ours goes. Returns the exit code."""
        child = self._start(command, stdout=stdout, stderr=None)
        try:
            return child.wait()
        finally:
            _end(child)
            self._running.remove(child)

    def serve(self, command: Sequence[str], *, url: str, log: Path) -> None:
        """Start a service and wait until it answers. Ends the demo, with the service's own words, if it does not."""
        child = self._start(command, stdout=log, stderr=log)
        until = time.monotonic() + READY_SECONDS
        while not _ready(url):
            if child.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"{log.read_text()}error: the service did not start; its words stand above")
            time.sleep(0.1)

    def _start(self, command: Sequence[str], *, stdout: Path | None, stderr: Path | None) -> subprocess.Popen[bytes]:
        with contextlib.ExitStack() as stack:
            out = stack.enter_context(open(stdout, "wb")) if stdout else None
            err = out if stderr else None
            # A session of its own keeps the terminal's Ctrl-C away: it gets ours, once, and can end in order.
            child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=environment(), start_new_session=True
            )
        self._running.append(child)
        return child


def environment() -> dict[str, str]:
    """Ours, without options of hsstore that would change the demo, and without a hub."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HSSTORE_")}
    return kept | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def _ready(url: str) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/ready", timeout=5) as answer:
        return bool(answer.status == 200)
    return False


def _end(child: subprocess.Popen[bytes]) -> None:
    """As Ctrl-C would; what is left of its process group after the grace period is killed."""
    if child.poll() is None:
        child.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
            child.wait(GRACE_SECONDS)
    if child.returncode != 0:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
