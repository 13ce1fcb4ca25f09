"""Starts the engine process, talks to it, and leaves nothing of it behind.

Responsible for the process group, its log, its temporary directory and the channel of write errors. Every way in which
the engine can be lost ends here as `IncompleteError`. Leaves the meaning of messages to `extractor.engines.sglang`.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec

from extractor.sglang_plugin import ERRORS_VARIABLE
from extractor.sglang_plugin.group import kill_group, shared_memory
from extractor.sglang_plugin.protocol import FromHost, WriteError
from hsstore.errors import IncompleteError

LOG_LEVELS_ON_TERMINAL = ("debug", "info")
RESUME_HINT = "what was committed is kept: run the same command with --resume"


class EngineProcess:
    """One `extractor.sglang_plugin.host`, or another module like it, and every process below it."""

    def __init__(
        self,
        start: msgspec.Struct,
        *,
        log_level: str,
        environment: Mapping[str, str] | None = None,
        module: str = "extractor.sglang_plugin.host",
        replies: Any = FromHost,
    ) -> None:
        """Start it. `module` reads `start` and then requests from its socket, and sends `replies`."""
        self._up = False
        self._module = module
        self._shared_memory: set[Path] = set()
        self.directory = Path(tempfile.mkdtemp(prefix="hsstore-sglang-"))
        self.log = self.directory / "engine.log"
        # A datagram socket, not a file: it must work when the disk is full.
        self._errors = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._errors.bind(str(self.directory / "errors"))
        self._errors.setblocking(False)
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(replies)
        ours, theirs = socket.socketpair()
        try:
            self._process = self._spawn(theirs, log_level, environment or {})
        finally:
            theirs.close()
        self._finalizer = weakref.finalize(self, _kill, self._process, self.directory, self._shared_memory)
        self._connection = Connection(ours.detach())
        self._send_bytes(msgspec.msgpack.encode(start))

    def _spawn(self, theirs: socket.socket, log_level: str, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        inductor = Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}"
        variables = {
            "TORCHINDUCTOR_CACHE_DIR": str(inductor),  # torch's own default, which the next line would move
            **os.environ,
            "TMPDIR": str(self.directory),  # SGLang leaves its sockets behind in it
            ERRORS_VARIABLE: str(self.directory / "errors"),
            **environment,
        }
        with open(self.log, "wb") as log:
            output = sys.__stderr__ if log_level in LOG_LEVELS_ON_TERMINAL else log
            return subprocess.Popen(
                [sys.executable, "-P", "-m", self._module, str(theirs.fileno()), str(os.getpid())],
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is ours to handle, and SGLang kills its whole process group at times
            )

    @property
    def pid(self) -> int:
        """Of the host, which leads the group and the session of all engine processes."""
        return self._process.pid

    def has_ended(self) -> bool:
        """Whether the host has gone. It is not reaped by that: its group can still be ended."""
        if self._process.returncode is not None:
            return True
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    @property
    def exit_status(self) -> int:
        """Of a host that was ended by `lost` or `close`, as a shell says it: 128 + N for signal N."""
        status = self._process.returncode
        return status if status >= 0 else 128 - status

    def came_up(self) -> None:
        """From now on there may be something to resume, and shared memory that a crash would leave behind."""
        self._up = True
        self._shared_memory |= shared_memory(self.pid)

    def send(self, request: msgspec.Struct) -> None:
        """Raises `IncompleteError` when the engine is lost."""
        self._send_bytes(msgspec.msgpack.encode(request))

    def has_message(self, timeout_seconds: float) -> bool:
        """Whether `receive` would return, or raise, at once; waits for that."""
        try:
            return self._connection.poll(timeout_seconds)
        except (EOFError, OSError):
            return True  # receive says what happened

    def receive(self, timeout_seconds: float) -> Any:
        """The next message. Raises `IncompleteError` when the engine is lost or says nothing for too long."""
        try:
            if not self._connection.poll(timeout_seconds):
                raise self.lost(f"said nothing for {timeout_seconds:.0f} s")
            return self._decoder.decode(self._connection.recv_bytes())
        except (EOFError, OSError):
            raise self.lost("ended") from None

    def write_errors(self) -> list[WriteError]:
        """Failed writes reported since the last call."""
        errors = []
        with contextlib.suppress(BlockingIOError):
            while True:
                errors.append(msgspec.json.decode(self._errors.recv(65536), type=WriteError))
        return errors

    def lost(self, how: str) -> IncompleteError:
        """End what is left of the engine, keep its log, and say so."""
        _kill_group(self._process, self._shared_memory)
        if self._finalizer.detach():
            self._connection.close()
            _clear(self.directory, keep=self.log)
        reason = last_error_line(self.log)
        if " ".join(reason.split())[-60:] in how:  # said already
            reason = ""
        when = "" if self._up else " during its start"
        status = f"exit status {self._process.returncode}"
        # In the message, not in the hint: a run that starts the engine again shows this alone.
        message = f"the SGLang engine {how}{when} ({status}){': ' + reason if reason else ''}; its log is {self.log}"
        return IncompleteError(message, hint=RESUME_HINT if self._up else "see that log")

    def close(self) -> None:
        """End every process of the engine at once. Safe to call again.

        SGLang's own shutdown kills its processes too, only later; what it would leave lies in our directory.
        """
        self._finalizer()
        self._connection.close()
        self._errors.close()

    def _send_bytes(self, data: bytes) -> None:
        try:
            self._connection.send_bytes(data)
        except OSError:
            raise self.lost("ended") from None


def _clear(directory: Path, keep: Path) -> None:
    for entry in directory.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry, ignore_errors=True)
        elif entry != keep:
            entry.unlink(missing_ok=True)


def _kill(process: subprocess.Popen[bytes], directory: Path, shared: set[Path]) -> None:
    _kill_group(process, shared)
    shutil.rmtree(directory, ignore_errors=True)


def _kill_group(process: subprocess.Popen[bytes], shared: set[Path]) -> None:
    # Before the leader is reaped: its number, which is the group's, cannot be another's until then.
    if process.returncode is None:
        kill_group(process.pid)
        process.wait()
    for path in shared:
        path.unlink(missing_ok=True)


def last_error_line(log: Path) -> str:
    """The last line of the log that names an exception, "" when none does."""
    with contextlib.suppress(OSError):
        lines = log.read_text(errors="replace").splitlines()
        named = [line.strip() for line in lines if "Error: " in line or "Exception: " in line]
        if named:
            return named[-1][:500]
    return ""
