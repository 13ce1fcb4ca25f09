"""What runs on a node as a Ray actor: keeps one worker process, and answers at once whatever that one does.

A process of its own, because an extraction wants the main thread, its own signals and a clean environment, and because
whatever kills the worker must not look like a lost node. Knows nothing of Ray: the driver makes an actor of the class.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading

import msgspec

from extractor.fleet.messages import FromWorker

_TAIL_BYTES = 4096
_ENDED = ("ended", "erred")


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """An answer of an actor."""

    host: str
    pid: int
    """Of the worker."""
    events: list[FromWorker]
    """That were not told before."""
    exit_code: int | None = None
    """Of the worker, once it has ended and all its events are told."""
    log: str = ""
    """End of the log of a worker that ended without a word."""


class FleetActor:
    """One worker process. Every method returns at once."""

    def __init__(self, order: bytes) -> None:
        # Without a name: nothing is left of it, however this process ends.
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the last status
        self._events: list[FromWorker] = []
        self._lock = threading.Lock()
        # What the actor finds its packages in: a runtime environment of Ray may have added to it.
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "extractor.fleet.worker"],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, name="events", daemon=True)
        self._reader.start()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it is gone already: its exit code says so
            self._process.stdin.write(order + b"\n")
            self._process.stdin.flush()

    def status(self) -> bytes:
        """A `Status` as JSON."""
        code = self._process.poll()
        if code is not None:
            self._reader.join(5)
        with self._lock:
            events, self._events = self._events, []
        code = None if self._reader.is_alive() else code
        log = ""
        if code is not None and not self._log.closed:
            log = "" if any(_is_last(event) for event in events) else self._end_of_log()
            self._close()
        return msgspec.json.encode(
            Status(host=os.uname().nodename, pid=self._process.pid, events=events, exit_code=code, log=log)
        )

    def stop(self) -> None:
        """Tell the worker to drop its open shards and to end."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def _close(self) -> None:
        for file in (self._process.stdin, self._process.stdout, self._log):
            with contextlib.suppress(BrokenPipeError):
                assert file is not None
                file.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        decoder: msgspec.json.Decoder[FromWorker] = msgspec.json.Decoder(FromWorker)
        for line in self._process.stdout:
            event = decoder.decode(line)
            with self._lock:
                self._events.append(event)

    def _end_of_log(self) -> str:
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), _TAIL_BYTES, max(0, size - _TAIL_BYTES)).decode("utf-8", "replace")


def _is_last(event: FromWorker) -> bool:
    return type(event).__struct_config__.tag in _ENDED
