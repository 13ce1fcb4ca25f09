"""A log for machines: one JSON object a line for each event, appended to a file that others may rotate.

A line is one write in append mode, so lines of several processes never mix. A log that cannot be written never ends a
run: what was lost is counted, said once on stderr, and said in the log itself when it takes lines again. Good samples
are not logged one by one; failed and repeated ones are. Leaves to `extractor.watch.metrics` what is only counted.
"""

from __future__ import annotations

import datetime
import errno
import json
import os
import platform
import secrets
import stat
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Literal

from extractor.engines.base import EngineInfo
from extractor.watch.events import Pace, RunFacts
from extractor.words import counted
from hsstore import __version__
from hsstore.console import warn
from hsstore.errors import UsageError
from hsstore.records import ShardRecord

STDERR = "-"
Level = Literal["info", "warning", "error"]


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


class LineFile:
    """Whole lines at the end of a file that may be renamed, removed or full. `-` is stderr."""

    def __init__(self, path: str) -> None:
        """Raises `UsageError` when the file cannot be opened now."""
        self.path = path
        self._is_torn = False
        """The file may end in half a line: the next one begins on a line of its own."""
        self._fd = -1
        try:
            self._open()
        except OSError as error:
            raise UsageError(
                f"--log-json {path} cannot be written: {error.strerror}", hint="give a file that this user may write"
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


class JsonLog:
    """A `Watcher` that logs."""

    def __init__(
        self, path: str, *, now: Callable[[], datetime.datetime] = _now, say: Callable[[str], None] = warn
    ) -> None:
        """Raises `UsageError` for a file that cannot be written."""
        self._file = LineFile(path)
        self._now, self._say = now, say
        self._gap = 0
        """Lines lost since the last one that was written."""
        self._said = self._waits = False
        self.run = secrets.token_hex(6)
        """Tells the lines of this run from those of others in the same file."""
        self.lost = 0
        """Lines of this run that could not be written."""

    def log(self, level: Level, event: str, **fields: Any) -> None:
        """Write one line; before it, how many are missing."""
        if self._gap and self._write("warning", "log_lines_lost", {"lines": self._gap}):
            self._gap = 0
        if self._gap or not self._write(level, event, fields):
            self._gap += 1
            self.lost += 1

    def _write(self, level: Level, event: str, fields: dict[str, Any]) -> bool:
        time = self._now().astimezone(datetime.UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        line = {"time": time, "level": level, "event": event, "run": self.run, **fields}
        error = self._file.write(json.dumps(line, ensure_ascii=False, default=str))
        if error is not None and not self._said:
            self._said = True
            self._say(
                f"the log {self._file.path} cannot be written ({error.strerror}): lines are lost, the run goes on"
            )
        return error is None

    def close(self) -> None:
        if self.lost:
            self._say(f"{counted(self.lost, 'line')} of the log {self._file.path} could not be written")
        self._file.close()

    def run_started(self, facts: RunFacts) -> None:
        who = {"hsstore": __version__, "host": platform.node(), "pid": os.getpid()}
        self.log("info", "run_started", **asdict(facts), **who)

    def run_finished(self, written: int, failed: int, skipped: int, remaining: int) -> None:
        level: Level = "warning" if failed or remaining else "info"
        sums = {"written": written, "failed": failed, "skipped": skipped, "remaining": remaining}
        self.log(level, "run_finished", **sums)

    def run_failed(self, kind: str, reason: str) -> None:
        self.log("error", "run_failed", kind=kind, reason=reason)

    def engine_starting(self, name: str) -> None:
        self.log("info", "engine_starting", engine=name)

    def engine_started(self, info: EngineInfo, seconds: float) -> None:
        self.log("info", "engine_started", seconds=round(seconds, 3), **asdict(info))

    def engine_lost(self, reason: str) -> None:
        self.log("error", "engine_lost", reason=reason)

    def engine_stopped(self) -> None:
        self.log("info", "engine_stopped")

    def backoff(self, seconds: float, reason: str) -> None:
        self.log("warning", "backoff", seconds=round(seconds, 3), reason=reason)

    def shard_staged(self, shard: int, n_samples: int, n_tokens: int) -> None:
        self._waits = False
        self.log("info", "shard_staged", shard=shard, samples=n_samples, tokens=n_tokens)

    def shard_dropped(self, shard: int, n_samples: int, n_tokens: int, reason: str) -> None:
        self.log("warning", "shard_dropped", shard=shard, samples=n_samples, tokens=n_tokens, reason=reason)

    def shard_filled(self, shard: int) -> None:
        self.log("info", "shard_filled", shard=shard)

    def shard_sealed(self, shard: int, seconds: float, n_bytes: int) -> None:
        self.log("info", "shard_sealed", shard=shard, seconds=round(seconds, 3), bytes=n_bytes)

    def shard_done(self, record: ShardRecord | None) -> None:
        if record is None:
            self.log("warning", "shard_lost_race")
            return
        failed = len(record.failures)
        fields = {"shard": record.shard, "samples": len(record.samples), "failed": failed, "rows": record.n_rows}
        self.log("info", "shard_committed", **fields, attempt=record.attempt)

    def shard_elsewhere(self, shard: int, n_samples: int, n_tokens: int) -> None:
        self.log("info", "shard_elsewhere", shard=shard, samples=n_samples, tokens=n_tokens)

    def waiting(self, n_shards: int) -> None:
        if not self._waits:
            self.log("info", "waiting_for_others", shards=n_shards)
        self._waits = True

    def sample_sent(self, source_index: int) -> None: ...

    def sample_retried(self, source_index: int, reason: str) -> None:
        self.log("warning", "sample_retried", source_index=source_index, reason=reason)

    def sample_failed(self, source_index: int, reason: str, tries: int) -> None:
        self.log("error", "sample_failed", source_index=source_index, reason=reason, tries=tries)

    def sample_done(self, source_index: int, n_tokens: int, ok: bool) -> None: ...

    def disk_low(self, free: int, needed: int) -> None:
        self.log("error", "disk_low", free_bytes=free, needed_bytes=needed)

    def paced(self, pace: Pace) -> None:
        self.log("info", "progress", **{k: _rounded(v) for k, v in asdict(pace).items()})


def _rounded(value: Any) -> Any:
    return round(value, 1) if isinstance(value, float) else value
