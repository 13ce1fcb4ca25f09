"""A log for machines: one JSON object a line for each event, appended to a file that others may rotate.

A log that cannot be written never ends a run: what was lost is counted, said once on stderr, and said in the log itself
when it takes lines again. Good samples are not logged one by one; failed and repeated ones are. Leaves to
`extractor.watch.lines` how a line gets into the file, to `extractor.watch.metrics` what is only counted.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import secrets
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Literal

from extractor.engines.base import EngineInfo
from extractor.watch.events import Pace, RunFacts
from extractor.watch.lines import LineFile
from extractor.words import counted
from hsstore import __version__
from hsstore.console import warn
from hsstore.records import ShardRecord

Level = Literal["info", "warning", "error"]


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


class JsonLog:
    """A `Watcher` that logs."""

    def __init__(
        self, path: str, *, now: Callable[[], datetime.datetime] = _now, say: Callable[[str], None] = warn
    ) -> None:
        """Raises `UsageError` for a file that cannot be written."""
        self._file = LineFile(path)
        self._file.check("--log-json")
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
