"""Engines that die, come back, come back as another one, or never: no sample is lost, none is done twice."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from extractor.capture import ShardRun
from extractor.engines.base import Job, Ticket
from extractor.supervise import LONGEST_WAIT_SECONDS, Breaker, SupervisedEngine, wait_seconds
from hsstore.errors import IncompleteError, UsageError
from tests.extractor.test_capture import FakeEngine, Heard, Setup


@pytest.fixture
def setup(tmp_path: Path) -> Setup:
    return Setup(tmp_path / "store")


class Mortal(FakeEngine):
    """Takes `in_flight` jobs at a time, and dies of the samples and on the occasions that its house says."""

    def __init__(self, house: House) -> None:
        super().__init__(in_flight=house.in_flight, seed=house.started)
        self.house = house

    def capture(self, jobs: Iterable[Job]) -> Iterator[Ticket]:
        yield from super().capture(self._dying(jobs))

    def _dying(self, jobs: Iterable[Job]) -> Iterator[Job]:
        for job in jobs:
            self.house.sent.append(job.source_index)
            self.house.to_live -= 1
            if job.source_index in self.house.poison or self.house.to_live == 0:
                self.house.to_live = self.house.lifetimes.pop(0) if self.house.lifetimes else 1 << 30
                raise IncompleteError(f"the engine died of {job.source_index}")
            yield job

    def close(self) -> None:
        self.house.closed += 1


class House:
    """Makes engines. `lifetimes`: how many jobs each takes; `refusals`: starts that fail."""

    def __init__(self, *lifetimes: int, poison: Iterable[int] = (), in_flight: int = 4, refusals: int = 0) -> None:
        self.lifetimes, self.poison, self.in_flight, self.refusals = list(lifetimes), set(poison), in_flight, refusals
        self.to_live = self.lifetimes.pop(0) if self.lifetimes else 1 << 30
        self.sent: list[int] = []
        self.slept: list[float] = []
        self.started = self.closed = 0

    def start(self) -> Mortal:
        self.started += 1
        if self.started > 1 and self.refusals:
            self.refusals -= 1
            raise IncompleteError("CUDA out of memory")
        return Mortal(self)

    def run(self, setup: Setup, limit: int = 8) -> Heard:
        heard, breaker = Heard(), Breaker(limit)
        engine = SupervisedEngine("fake", self.start, breaker, heard, self.slept.append)
        try:
            ShardRun(setup.writer, setup.shards, setup.samples, engine, heard, breaker=breaker).run(setup.writer.todo())
        finally:
            engine.close()
        return heard


@pytest.mark.parametrize("in_flight", [1, 7, 64])
def test_an_engine_that_dies_now_and_then_costs_what_was_in_flight(setup: Setup, in_flight: int) -> None:
    house = House(9, 11, 15, in_flight=in_flight)
    heard = house.run(setup)
    assert heard.samples == [True] * 40
    assert len(heard.lost) == 3
    assert house.started == 4
    assert house.closed == 4
    again = len(house.sent) - 40
    assert 0 < again <= 3 * (in_flight + 1), "only what had no ticket is sent again"
    setup.check()


@pytest.mark.parametrize("in_flight", [1, 5, 64])
def test_a_sample_that_kills_engines_is_found_and_costs_itself_only(setup: Setup, in_flight: int) -> None:
    """It takes two engines with it, the second one alone; the rest come through, its reason is in the record."""
    house = House(poison={20, 50}, in_flight=in_flight)
    heard = house.run(setup)
    assert heard.samples.count(False) == 2
    assert len(heard.lost) == 4
    setup.check(failed={20, 50})
    reasons = {k: v for record in heard.shards if record for k, v in record.failures.items()}
    assert set(reasons) == {"20", "50"}
    assert "two engines were lost on it" in reasons["20"]


def test_starts_that_fail_are_tried_again_after_longer_waits(setup: Setup) -> None:
    house = House(9, refusals=5)
    heard = house.run(setup)
    assert house.started == 7
    assert len(house.slept) == 6
    assert house.slept == sorted(house.slept)
    assert heard.lost[1:] == ["CUDA out of memory"] * 5
    setup.check()


def test_the_breaker_ends_a_run_whose_engine_never_comes_back(setup: Setup) -> None:
    """What was committed stays, open shards leave nothing, and a resume ends it."""
    house = House(30, refusals=1 << 30, in_flight=1)
    with pytest.raises(IncompleteError, match=r"3 errors in a row \(--max-consecutive-errors\).*CUDA out of memory"):
        house.run(setup, limit=3)
    assert house.started == 3
    assert not list((setup.writer.root / "staging").iterdir())
    assert 0 < len(setup.writer.todo()) < len(setup.shards)
    House().run(setup)
    setup.check()


def test_the_first_start_is_not_tried_again(setup: Setup) -> None:
    """A model that does not load is told at once, not after eight loads of it."""

    def never() -> Mortal:
        raise IncompleteError("CUDA out of memory")

    with pytest.raises(IncompleteError, match="out of memory"):
        SupervisedEngine("fake", never, Breaker(), Heard())


def test_another_engine_in_its_place_is_refused(setup: Setup) -> None:
    house = House(9)
    real = house.start

    def start() -> Mortal:
        engine: Any = real()
        if house.started > 1:
            engine.info = type(engine.info)(
                **{n: getattr(engine.info, n) for n in engine.info.__slots__} | {"norm": "pre"}
            )
        return engine

    house.start = start  # type: ignore[method-assign]
    with pytest.raises(UsageError, match="another one"):
        house.run(setup)
    assert not list((setup.writer.root / "staging").iterdir())


def test_errors_of_the_runs_own_are_not_the_engines(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that fills while a shard is staged must not look like a dead engine, and start none."""
    house, calls = House(), []
    real = setup.writer.stage

    def stage(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 3:
            raise IncompleteError("not of the engine")
        return real(*args)

    monkeypatch.setattr(setup.writer, "stage", stage)
    with pytest.raises(IncompleteError, match="not of the engine"):
        house.run(setup)
    assert house.started == 1
    assert house.slept == []


def test_a_streak_of_bad_samples_opens_the_breaker(setup: Setup) -> None:
    """Good ones in between close it again: it counts errors in a row."""

    def fault(job: Job, _attempt: int) -> Any:
        return "tear" if 40 <= job.source_index <= 46 else None

    def run(limit: int) -> None:
        heard = Heard()
        breaker = Breaker(limit)
        ShardRun(setup.writer, setup.shards, setup.samples, FakeEngine(fault), heard, breaker=breaker).run(
            setup.writer.todo()
        )

    longest = _longest_streak(setup, range(40, 47, 2))
    with pytest.raises(IncompleteError, match=f"{longest} errors in a row"):
        run(longest)
    run(longest + 1)
    setup.check(failed={40, 42, 44, 46})


def _longest_streak(setup: Setup, bad: Iterable[int]) -> int:
    """Of failed samples, in the order in which one engine that takes a job at a time answers for the last time."""
    longest = streak = 0
    for entries in setup.shards.values():
        order = [e.source_index for e in entries]
        order = [i for i in order if i not in bad] + [i for i in order if i in bad]  # the second try comes last
        for i in order:
            streak = streak + 1 if i in bad else 0
            longest = max(longest, streak)
    assert longest >= 2
    return longest


def test_waits_grow_to_a_minute() -> None:
    assert [wait_seconds(n, jitter=lambda: 0.0) for n in (1, 2, 3, 7, 1000)] == [1, 2, 4, 60, 60]
    assert all(0.8 * LONGEST_WAIT_SECONDS <= wait_seconds(50) <= LONGEST_WAIT_SECONDS for _ in range(50))


def test_killers_at_the_very_beginning_do_not_look_like_a_sick_engine(setup: Setup) -> None:
    """Each is one error, however many engines it cost; the first three samples of a run may be such."""
    first = {e.source_index for e in setup.shards[0][:3]}
    house = House(poison=first, in_flight=1)
    heard = Heard()
    breaker = Breaker()
    with closing(SupervisedEngine("fake", house.start, breaker, heard, house.slept.append)) as engine:
        ShardRun(setup.writer, setup.shards, setup.samples, engine, heard, breaker=breaker).run(setup.writer.todo())
    assert heard.samples.count(False) == 3
    assert len(heard.lost) == 6
    setup.check(failed=first)


def test_a_limit_that_was_given_holds_from_the_first_sample_on(setup: Setup) -> None:
    first = {e.source_index for e in setup.shards[0]} | {e.source_index for e in setup.shards[1]}
    assert len(first) > 4
    House(poison=first, in_flight=1).run(setup, limit=100)
    setup.check(failed=first)
