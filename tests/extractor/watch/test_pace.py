"""The estimate of the time that is left: only this run's work and what others commit meanwhile counts."""

from __future__ import annotations

import datetime
from types import SimpleNamespace
from typing import Any

import pytest

from extractor.watch.events import Deaf, Many, Pace, RunFacts
from extractor.watch.pace import WINDOW_SECONDS, Meter, Pacer, eta_words, first_shard_words, roughly, short_count

NOON = datetime.datetime(2026, 12, 1, 10, 0, tzinfo=datetime.UTC)


def facts(**changes: Any) -> RunFacts:
    known: dict[str, Any] = {
        "store": "s",
        "model": "m",
        "engine": "e",
        "samples": 100,
        "tokens": 10_000,
        "shards": 10,
        "bytes_per_token": 57_349,
    }
    return RunFacts(**known | changes)


def committed(shard: int) -> Any:
    return SimpleNamespace(shard=shard, statistics={}, failures={}, files={})


def test_nothing_is_known_before_the_first_sample() -> None:
    meter = Meter(facts())
    meter.start(5.0)
    pace = meter.pace(5.0)
    assert (pace.tokens_left, pace.tokens_per_second, pace.eta_seconds) == (10_000, 0.0, None)
    assert eta_words(pace.eta_seconds, NOON) == ""


def test_the_rate_is_this_runs_and_what_others_commit_shortens_the_rest() -> None:
    """What lay in the store before is in neither; the wait for the engine before the first sample is in neither."""
    meter = Meter(facts(samples_done=5_000))
    meter.start(1_000.0)
    meter.done(1_010.0, 1_000)
    meter.elsewhere(1_010.0, 30, 3_000)
    pace = meter.pace(1_010.0)
    assert (pace.tokens_per_second, pace.tokens_per_second_all) == (100.0, 400.0)
    assert (pace.samples_left, pace.tokens_left) == (69, 6_000)
    assert pace.eta_seconds == 15.0
    assert pace.bytes_left == 6_000 * 57_349


def test_work_that_was_lost_is_to_be_done_again_and_yet_took_its_time() -> None:
    meter = Meter(facts())
    meter.start(0.0)
    for _ in range(4):
        meter.done(10.0, 500)
    meter.dropped(4, 2_000)
    pace = meter.pace(10.0)
    assert (pace.samples_left, pace.tokens_left, pace.tokens_per_second) == (100, 10_000, 200.0)


def test_a_rate_that_changed_long_ago_is_forgotten() -> None:
    """Fast for an hour, then slow for an hour: the estimate is that of the slow one."""
    meter = Meter(facts(tokens=10**9, samples=10**6))
    meter.start(0.0)
    for second in range(0, 3600, 10):
        meter.done(float(second), 1_000)
    for second in range(3600, 7200, 10):
        meter.done(float(second), 10)
    assert meter.pace(7200.0).tokens_per_second == pytest.approx(1.0, rel=0.05)
    assert WINDOW_SECONDS < 3600


def test_an_end_is_an_end() -> None:
    meter = Meter(facts(tokens=10, samples=1))
    meter.done(1.0, 10)
    assert (meter.pace(2.0).tokens_left, meter.pace(2.0).eta_seconds) == (0, 0.0)


def test_words_after_the_first_shard() -> None:
    pace = Pace(
        samples_left=36_000,
        tokens_left=86_200_000,
        bytes_left=86_200_000 * 57_349,
        tokens_done=65_536,
        seconds=64.0,
        tokens_per_second=1_024.0,
        tokens_per_second_all=1_024.0,
        eta_seconds=83_400.0,
    )
    assert first_shard_words(65_536, 64.0, pace, NOON) == (
        "first shard: 65,536 tokens in 64 s (1,024 tok/s); 86.2 M tokens left: about 23 h, done around"
        " 2026-12-02 09:10 UTC; 4.94 TB to write"
    )
    elsewhere = NOON.astimezone(datetime.timezone(datetime.timedelta(hours=9)))
    assert eta_words(83_400.0, elsewhere) == ": about 23 h, done around 2026-12-02 09:10 UTC"
    assert "calendar" in eta_words(1e15, NOON)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.04, "0.0 s"), (9.94, "9.9 s"), (64, "64 s"), (600, "10 min"), (7_300, "2 h"), (2e5, "2.3 days")],
)
def test_times_as_one_number(seconds: float, words: str) -> None:
    assert roughly(seconds) == words


def test_large_counts() -> None:
    assert [short_count(n) for n in (0, 999_999, 86_230_000)] == ["0", "999,999", "86.2 M"]


class Story:
    """A run of ten shards of 1,000 tokens, told to a `Pacer` whose clock stands still unless it is moved."""

    def __init__(self) -> None:
        self.now = 0.0
        self.said: list[str] = []
        self.heard: list[Pace] = []
        story = self

        class Ear(Deaf):
            def paced(self, pace: Pace) -> None:
                story.heard.append(pace)

        self.pacer = Pacer(Ear(), clock=lambda: self.now, wall=lambda: NOON, say=self.said.append)
        self.tell = Many([self.pacer])
        self.tell.run_started(facts())

    def shard(self, number: int, seconds: float, *, won: bool = True) -> None:
        self.tell.shard_staged(number, 10, 1_000)
        for i in range(10):
            self.tell.sample_sent(number * 10 + i)
            self.now += seconds / 10
            self.tell.sample_done(number * 10 + i, 100, True)
        self.tell.shard_filled(number)
        self.now += 100.0  # sealing is slow, and no part of the first shard's rate
        self.tell.shard_done(committed(number) if won else None)


def test_the_first_shard_is_said_once() -> None:
    story = Story()
    story.now = 1_000.0  # the engine loads
    story.shard(3, 20.0)
    story.shard(1, 20.0)
    assert len(story.said) == 1
    assert story.said[0].startswith("first shard: 1,000 tokens in 20 s (50 tok/s); 9,000 tokens left: about ")
    assert story.said[0].endswith("; 516 MB to write")


def test_a_shard_that_another_one_won_is_not_the_first() -> None:
    story = Story()
    story.shard(0, 20.0, won=False)
    assert story.said == []
    story.shard(1, 20.0)
    assert len(story.said) == 1


def test_a_store_of_one_shard_needs_no_estimate() -> None:
    story = Story()
    story.tell.run_started(facts(tokens=1_000, samples=10))
    story.shard(0, 20.0)
    assert story.said == []


def test_the_estimate_is_told_now_and_then() -> None:
    """At each commit and about every half minute, not at each sample; a dropped shard is left to do."""
    story = Story()
    story.shard(0, 1.0)
    assert len(story.heard) == 1
    assert story.heard[-1].tokens_left == 9_000
    story.tell.sample_done(11, 100, True)
    assert len(story.heard) == 1
    story.now += 31.0
    story.tell.sample_done(12, 100, True)
    assert len(story.heard) == 2
    story.tell.shard_dropped(1, 2, 200, "the engine died")
    assert story.pacer.pace is not None
    assert story.pacer.pace.tokens_left == 9_000
