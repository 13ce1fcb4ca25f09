"""What happens in an extraction, as calls: the protocol of everyone who hears it, and the fan-out to many of them.

Responsible for the names of the events and for nothing else; what they are told for is the matter of each watcher. A
watcher is called from one thread at a time, and quickly: the engine waits for it. What it raises ends the run.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from extractor.engines.base import EngineInfo
from hsstore.records import ShardRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What is known when a run begins, before its engine is loaded."""

    store: str
    model: str
    engine: str
    samples: int
    """To be extracted: of the shards that are not committed."""
    tokens: int
    shards: int
    samples_done: int = 0
    """Committed before this run."""
    bytes_per_token: int
    """2·H·L of states, 5 of ids and mask."""
    resume: str = ""
    """The command that continues this run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How fast a run is, and how long it will take at that."""

    samples_left: int
    tokens_left: int
    bytes_left: int
    tokens_done: int
    """By this run."""
    seconds: float
    """Of this run's extraction, since the engine first had work."""
    tokens_per_second: float
    """Of this run, of late."""
    tokens_per_second_all: float
    """With what other processes have committed meanwhile."""
    eta_seconds: float | None
    """None while nothing is known."""


class Watcher(Protocol):
    """Who hears it. Every sample that is sent is answered by exactly one of retried, done, or a lost engine."""

    def run_started(self, facts: RunFacts) -> None: ...

    def run_finished(self, written: int, failed: int, skipped: int, remaining: int) -> None:
        """The sum that the run ends with."""
        ...

    def run_failed(self, kind: str, reason: str) -> None:
        """The run ends early: `kind` of `hsstore.errors`, or `interrupted`, `terminated`, `error`."""
        ...

    def engine_starting(self, name: str) -> None: ...

    def engine_started(self, info: EngineInfo, seconds: float) -> None: ...

    def engine_lost(self, reason: str) -> None:
        """What was sent and not answered is in flight no more."""
        ...

    def engine_stopped(self) -> None:
        """Closed on purpose."""
        ...

    def backoff(self, seconds: float, reason: str) -> None:
        """The run waits so long before it tries the engine again."""
        ...

    def shard_staged(self, shard: int, n_samples: int, n_tokens: int) -> None: ...

    def shard_dropped(self, shard: int, n_samples: int, n_tokens: int, reason: str) -> None:
        """An open shard is given up: that much had been `sample_done` in it, and is to be done again."""
        ...

    def shard_filled(self, shard: int) -> None:
        """Every sample is in or failed: the shard waits for its commit."""
        ...

    def shard_sealed(self, shard: int, seconds: float, n_bytes: int) -> None:
        """Hashed, fsynced, committed or found committed; said before `shard_done`."""
        ...

    def shard_done(self, record: ShardRecord | None) -> None:
        """`None`: another writer had committed that shard first."""
        ...

    def shard_elsewhere(self, shard: int, n_samples: int, n_tokens: int) -> None:
        """Another process has committed a shard that was on the list."""
        ...

    def waiting(self, n_shards: int) -> None:
        """Every shard that is left is another process's; called again and again while that is so."""
        ...

    def sample_sent(self, source_index: int) -> None: ...

    def sample_retried(self, source_index: int, reason: str) -> None:
        """Its answer did not hold: it will be sent again."""
        ...

    def sample_failed(self, source_index: int, reason: str, tries: int) -> None:
        """Given up; said before its `sample_done(…, ok=False)`."""
        ...

    def sample_done(self, source_index: int, n_tokens: int, ok: bool) -> None: ...

    def disk_low(self, free: int, needed: int) -> None:
        """No further shard is staged: going on takes `needed` bytes, `free` are there."""
        ...

    def paced(self, pace: Pace) -> None:
        """The running estimate, every now and then."""
        ...


class Deaf:
    """A `Watcher` that hears nothing: the base of those that care for some events only."""

    def run_started(self, facts: RunFacts) -> None: ...
    def run_finished(self, written: int, failed: int, skipped: int, remaining: int) -> None: ...
    def run_failed(self, kind: str, reason: str) -> None: ...
    def engine_starting(self, name: str) -> None: ...
    def engine_started(self, info: EngineInfo, seconds: float) -> None: ...
    def engine_lost(self, reason: str) -> None: ...
    def engine_stopped(self) -> None: ...
    def backoff(self, seconds: float, reason: str) -> None: ...
    def shard_staged(self, shard: int, n_samples: int, n_tokens: int) -> None: ...
    def shard_dropped(self, shard: int, n_samples: int, n_tokens: int, reason: str) -> None: ...
    def shard_filled(self, shard: int) -> None: ...
    def shard_sealed(self, shard: int, seconds: float, n_bytes: int) -> None: ...
    def shard_done(self, record: ShardRecord | None) -> None: ...
    def shard_elsewhere(self, shard: int, n_samples: int, n_tokens: int) -> None: ...
    def waiting(self, n_shards: int) -> None: ...
    def sample_sent(self, source_index: int) -> None: ...
    def sample_retried(self, source_index: int, reason: str) -> None: ...
    def sample_failed(self, source_index: int, reason: str, tries: int) -> None: ...
    def sample_done(self, source_index: int, n_tokens: int, ok: bool) -> None: ...
    def disk_low(self, free: int, needed: int) -> None: ...
    def paced(self, pace: Pace) -> None: ...


class Many:
    """A `Watcher` that tells every event to each of several, in their order."""

    def __init__(self, watchers: Iterable[Watcher] = ()) -> None:
        self.watchers = list(watchers)

    def add(self, watcher: Watcher) -> None:
        self.watchers.append(watcher)

    def run_started(self, facts: RunFacts) -> None:
        for w in self.watchers:
            w.run_started(facts)

    def run_finished(self, written: int, failed: int, skipped: int, remaining: int) -> None:
        for w in self.watchers:
            w.run_finished(written, failed, skipped, remaining)

    def run_failed(self, kind: str, reason: str) -> None:
        for w in self.watchers:
            w.run_failed(kind, reason)

    def engine_starting(self, name: str) -> None:
        for w in self.watchers:
            w.engine_starting(name)

    def engine_started(self, info: EngineInfo, seconds: float) -> None:
        for w in self.watchers:
            w.engine_started(info, seconds)

    def engine_lost(self, reason: str) -> None:
        for w in self.watchers:
            w.engine_lost(reason)

    def engine_stopped(self) -> None:
        for w in self.watchers:
            w.engine_stopped()

    def backoff(self, seconds: float, reason: str) -> None:
        for w in self.watchers:
            w.backoff(seconds, reason)

    def shard_staged(self, shard: int, n_samples: int, n_tokens: int) -> None:
        for w in self.watchers:
            w.shard_staged(shard, n_samples, n_tokens)

    def shard_dropped(self, shard: int, n_samples: int, n_tokens: int, reason: str) -> None:
        for w in self.watchers:
            w.shard_dropped(shard, n_samples, n_tokens, reason)

    def shard_filled(self, shard: int) -> None:
        for w in self.watchers:
            w.shard_filled(shard)

    def shard_sealed(self, shard: int, seconds: float, n_bytes: int) -> None:
        for w in self.watchers:
            w.shard_sealed(shard, seconds, n_bytes)

    def shard_done(self, record: ShardRecord | None) -> None:
        for w in self.watchers:
            w.shard_done(record)

    def shard_elsewhere(self, shard: int, n_samples: int, n_tokens: int) -> None:
        for w in self.watchers:
            w.shard_elsewhere(shard, n_samples, n_tokens)

    def waiting(self, n_shards: int) -> None:
        for w in self.watchers:
            w.waiting(n_shards)

    def sample_sent(self, source_index: int) -> None:
        for w in self.watchers:
            w.sample_sent(source_index)

    def sample_retried(self, source_index: int, reason: str) -> None:
        for w in self.watchers:
            w.sample_retried(source_index, reason)

    def sample_failed(self, source_index: int, reason: str, tries: int) -> None:
        for w in self.watchers:
            w.sample_failed(source_index, reason, tries)

    def sample_done(self, source_index: int, n_tokens: int, ok: bool) -> None:
        for w in self.watchers:
            w.sample_done(source_index, n_tokens, ok)

    def disk_low(self, free: int, needed: int) -> None:
        for w in self.watchers:
            w.disk_low(free, needed)

    def paced(self, pace: Pace) -> None:
        for w in self.watchers:
            w.paced(pace)
