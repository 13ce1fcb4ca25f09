"""The command's side of the driver process: starts it, hears it, ends it.

Leaves what is heard to `extractor.fleet.command`, Ray to the process.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType

import msgspec

from extractor.fleet.messages import Command, Ended, Erred, FromDriver
from extractor.fleet.supervisor import ENDING_SECONDS
from extractor.sglang_plugin.process import last_error_line

_TO_END_SECONDS = ENDING_SECONDS + 30


class Driver:
    """`extractor.fleet.driver`, as a context: whatever ends it, no worker is left behind."""

    def __init__(self, command: Command) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="hsstore-ray-"))
        self.log = self._directory / "ray.log"
        self.result: Ended | Erred | None = None
        self._decoder: msgspec.json.Decoder[FromDriver] = msgspec.json.Decoder(FromDriver)
        self._rest = b""
        with open(self.log, "wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "extractor.fleet.driver"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,  # Ctrl-C is ours to pass on, not the terminal's
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._process.stdout, selectors.EVENT_READ)
        with contextlib.suppress(BrokenPipeError):  # then it says nothing, which is heard
            self._process.stdin.write(msgspec.json.encode(command) + b"\n")
            self._process.stdin.flush()

    def __enter__(self) -> Driver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends the workers in good order; a second Ctrl-C ends the driver at once, and Ray the workers with it."""
        try:
            self._end()
        finally:
            if self._process.poll() is None:
                self._process.kill()
            self._process.wait()
            self._selector.close()
            for pipe in (self._process.stdin, self._process.stdout):
                with contextlib.suppress(OSError):
                    assert pipe is not None
                    pipe.close()
            if not self._unexplained():
                shutil.rmtree(self._directory, ignore_errors=True)

    def hear(self, seconds: float) -> list[FromDriver]:
        """What it says within that time. Sets `result` when it has ended: an `Erred` when it went without a word."""
        if not self._selector.select(seconds):
            return []
        assert self._process.stdout is not None
        data = os.read(self._process.stdout.fileno(), 1 << 20)
        if not data:
            self.result = self.result or self._gone()
            return []
        *lines, self._rest = (self._rest + data).split(b"\n")
        events = [self._decoder.decode(line) for line in lines]
        self.result = self.result or next((e for e in events if isinstance(e, Ended | Erred)), None)
        if isinstance(self.result, Erred) and self._unexplained() and not self.result.hint:
            self.result = Erred(kind=self.result.kind, message=self.result.message, hint=f"the log is {self.log}")
        return events

    def _unexplained(self) -> bool:
        """Whether the log may say more than the result does."""
        return isinstance(self.result, Erred) and self.result.kind == "error"

    def _gone(self) -> Erred:
        """Ray ends the process that is connected when the head of its cluster is lost."""
        code = self._process.wait()
        said = last_error_line(self.log)
        return Erred(
            kind="error",
            message=f"the connection to the Ray cluster was lost (exit code {code}){': ' + said if said else ''}",
            hint=f"what was committed is kept: run the same command with --resume; the log is {self.log}",
        )

    def _end(self) -> None:
        if self._process.poll() is not None:
            return
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_TO_END_SECONDS)
