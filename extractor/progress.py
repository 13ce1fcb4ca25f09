"""What a person at the terminal sees of a run: a progress line, notes, warnings.

A watcher of the run's events. Leaves numbers for machines to `extractor.watch`.
"""

from __future__ import annotations

import time

from extractor.engines.base import EngineInfo
from extractor.watch.events import Deaf, Pace
from extractor.words import counted
from hsstore.console import Progress, human_bytes, human_count, note, warn
from hsstore.records import ShardRecord


class ProgressWatcher(Deaf):
    """Progress in samples of the run's input, on one line; what must be read stays above it."""

    def __init__(self, progress: Progress, bytes_per_token: int) -> None:
        self._progress, self._per_token = progress, bytes_per_token
        self._done = self._failed = 0
        self.n_tokens = 0
        """Captured by this process, good or not."""
        self._started = time.monotonic()
        self._waits = False

    def sample_done(self, source_index: int, n_tokens: int, ok: bool) -> None:
        self._done += 1
        self._failed += not ok
        self.n_tokens += n_tokens
        rate = self.n_tokens / max(1e-9, time.monotonic() - self._started)
        failed = f" · {self._failed} failed" if self._failed else ""
        self._progress.update(
            self._done,
            f"{human_count(round(rate))} tok/s · {human_bytes(self.n_tokens * self._per_token)}{failed}",
        )

    def shard_elsewhere(self, shard: int, n_samples: int, n_tokens: int) -> None:
        self._done += n_samples
        self._progress.update(self._done, self._progress.detail)

    def paced(self, pace: Pace) -> None:
        self._progress.eta_seconds = pace.eta_seconds  # by tokens, and with what others commit

    def waiting(self, n_shards: int) -> None:
        if not self._waits:
            note(f"other processes are at the last {counted(n_shards, 'shard')}; waiting for them (or their end)")
        self._waits = True

    def engine_lost(self, reason: str) -> None:
        warn(f"lost the engine: {reason}")

    def backoff(self, seconds: float, reason: str) -> None:
        note(f"starting it again in {seconds:.1f} s; what was in flight is sent again")

    def engine_started(self, info: EngineInfo, seconds: float) -> None:
        note(f"{info.engine} {info.version} is up after {seconds:.0f} s")

    def shard_done(self, record: ShardRecord | None) -> None:
        if record is None:
            return
        bad = {name: s for name, s in record.statistics.items() if s.nan or s.inf}
        for name, s in bad.items():
            warn(
                f"shard {record.shard} has {s.nan} NaN and {s.inf} Inf in {name}: the verifier overflowed; try --dtype"
            )
