"""How fast an extraction is and when it will be done: counted from its events, worded after the first shard.

Counts what this run does and what other processes commit meanwhile, never what was committed before. Of late means
over the last quarter of an hour, so that a rate that changes shows, and a pause to restart the engine counts as what
it is. Leaves to `extractor.estimate` what is known before the first sample.
"""

from __future__ import annotations

import datetime
import time
from collections import deque
from collections.abc import Callable

from extractor.watch.events import Deaf, Pace, RunFacts, Watcher
from extractor.words import counted
from hsstore.console import human_bytes, human_count, note
from hsstore.records import ShardRecord

WINDOW_SECONDS = 900.0
_STEP_SECONDS = 5.0
_EVERY_SECONDS = 30.0


class Meter:
    """Counts a run. The caller says what time it is, in seconds of any clock that only goes forward."""

    def __init__(self, facts: RunFacts) -> None:
        self._facts = facts
        self._started: float | None = None
        self._samples = self._others_samples = 0
        self._tokens = self._others = 0
        self._worked = 0
        """Tokens that came in, those of shards that were dropped later included: what the rate is made of."""
        self._marks: deque[tuple[float, int, int]] = deque()

    def start(self, now: float) -> None:
        """The engine has work. Heard once; a restarted engine goes on in the same count."""
        if self._started is None:
            self._started = now
            self._marks.append((now, 0, 0))

    def done(self, now: float, n_tokens: int) -> None:
        self.start(now)
        self._samples += 1
        self._tokens += n_tokens
        self._worked += n_tokens
        self._mark(now)

    def dropped(self, n_samples: int, n_tokens: int) -> None:
        self._samples -= n_samples
        self._tokens -= n_tokens

    def elsewhere(self, now: float, n_samples: int, n_tokens: int) -> None:
        self.start(now)
        self._others_samples += n_samples
        self._others += n_tokens
        self._mark(now)

    def pace(self, now: float) -> Pace:
        left = max(0, self._facts.tokens - self._tokens - self._others)
        ours, everybody = self._rates(now)
        eta = 0.0 if left == 0 else left / everybody if everybody > 0 else None
        return Pace(
            samples_left=max(0, self._facts.samples - self._samples - self._others_samples),
            tokens_left=left,
            bytes_left=left * self._facts.bytes_per_token,
            tokens_done=self._tokens,
            seconds=now - self._started if self._started is not None else 0.0,
            tokens_per_second=ours,
            tokens_per_second_all=everybody,
            eta_seconds=eta,
        )

    def _mark(self, now: float) -> None:
        if now - self._marks[-1][0] >= _STEP_SECONDS:
            self._marks.append((now, self._worked, self._others))
        while len(self._marks) > 1 and now - self._marks[1][0] >= WINDOW_SECONDS:
            self._marks.popleft()

    def _rates(self, now: float) -> tuple[float, float]:
        """(Of this run, with others): tokens a second since the oldest mark; 0 before anything is known."""
        if not self._marks or now <= self._marks[0][0]:
            return 0.0, 0.0
        then, worked, others = self._marks[0]
        ours = (self._worked - worked) / (now - then)
        return ours, ours + (self._others - others) / (now - then)


class Pacer(Deaf):
    """Says the estimate after the first shard, then tells `to` how it goes, at most every `every_seconds`."""

    def __init__(
        self,
        to: Watcher,
        *,
        every_seconds: float = _EVERY_SECONDS,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], datetime.datetime] = lambda: datetime.datetime.now(datetime.UTC),
        say: Callable[[str], None] = note,
    ) -> None:
        self._to, self._every, self._clock, self._wall, self._say = to, every_seconds, clock, wall, say
        self._meter: Meter | None = None
        self._last = 0.0
        self._staged: dict[int, int] = {}
        self._filled: dict[int, float] = {}
        """Seconds from the first sample to the last of each shard that waits for its commit."""
        self._said = False

    def run_started(self, facts: RunFacts) -> None:
        self._meter = Meter(facts)
        self._last = self._clock()

    @property
    def pace(self) -> Pace | None:
        """None before the run began."""
        return self._meter.pace(self._clock()) if self._meter else None

    def sample_sent(self, source_index: int) -> None:
        if self._meter:
            self._meter.start(self._clock())

    def sample_done(self, source_index: int, n_tokens: int, ok: bool) -> None:
        if self._meter:
            self._meter.done(self._clock(), n_tokens)
            self._tell()

    def shard_staged(self, shard: int, n_samples: int, n_tokens: int) -> None:
        self._staged[shard] = n_tokens

    def shard_filled(self, shard: int) -> None:
        if self._meter and not self._said:
            self._filled[shard] = self._meter.pace(self._clock()).seconds

    def shard_dropped(self, shard: int, n_samples: int, n_tokens: int, reason: str) -> None:
        self._staged.pop(shard, None)
        self._filled.pop(shard, None)
        if self._meter:
            self._meter.dropped(n_samples, n_tokens)

    def shard_done(self, record: ShardRecord | None) -> None:
        if self._meter and record is not None:
            self._say_first(record.shard, self._meter.pace(self._clock()))
            self._staged.pop(record.shard, None)
            self._tell(always=True)

    def shard_elsewhere(self, shard: int, n_samples: int, n_tokens: int) -> None:
        if self._meter:
            self._meter.elsewhere(self._clock(), n_samples, n_tokens)
            self._tell()

    def waiting(self, n_shards: int) -> None:
        self._tell()

    def _tell(self, *, always: bool = False) -> None:
        now = self._clock()
        if self._meter and (always or now - self._last >= self._every):
            self._last = now
            self._to.paced(self._meter.pace(now))

    def _say_first(self, shard: int, pace: Pace) -> None:
        seconds = self._filled.pop(shard, 0.0)
        n_tokens = self._staged.get(shard, 0)
        if self._said or not n_tokens:
            return
        self._said = True
        self._filled.clear()
        if pace.tokens_left:
            self._say(first_shard_words(n_tokens, seconds, pace, self._wall()))


def first_shard_words(n_tokens: int, seconds: float, pace: Pace, now: datetime.datetime) -> str:
    """'first shard: 65,536 tokens in 64 s (1,024 tok/s); 86.2 M tokens left: about 23 h, done around … UTC; …'."""
    rate = f" ({human_count(round(n_tokens / seconds))} tok/s)" if seconds > 0 else ""
    first = f"first shard: {counted(n_tokens, 'token')} in {roughly(seconds)}{rate}"
    left = f"{short_count(pace.tokens_left)} tokens left{eta_words(pace.eta_seconds, now)}"
    return f"{first}; {left}; {human_bytes(pace.bytes_left)} to write"


def eta_words(eta_seconds: float | None, now: datetime.datetime) -> str:
    """': about 23 h, done around 2026-12-02 09:10 UTC', "" while nothing is known."""
    if eta_seconds is None:
        return ""
    try:
        done = now.astimezone(datetime.UTC) + datetime.timedelta(seconds=eta_seconds)
    except OverflowError:  # beyond the year 9999
        return ": longer than a calendar holds"
    return f": about {roughly(eta_seconds)}, done around {done:%Y-%m-%d %H:%M} UTC"


def roughly(seconds: float) -> str:
    """A time as one number: 64 s, 48 min, 23 h, 4.5 days."""
    if seconds < 120:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    if seconds < 2 * 3600:
        return f"{seconds / 60:.0f} min"
    if seconds < 48 * 3600:
        return f"{seconds / 3600:.0f} h"
    return f"{seconds / 86400:,.1f} days"


def short_count(n: int) -> str:
    """86,200,000 → '86.2 M'; smaller counts in full."""
    return f"{n / 1e6:,.1f} M" if n >= 1_000_000 else human_count(n)
