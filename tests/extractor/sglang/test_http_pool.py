"""Samples over several scripted servers: what is lost goes on elsewhere, and nothing waits for ever."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest

from extractor.engines import http_pool
from extractor.engines.base import Job, Ticket
from extractor.engines.http_link import ServerLost
from extractor.engines.http_pool import Dispatch, Member
from hsstore.answers import TransientError
from hsstore.errors import IncompleteError, NoSpaceError, UsageError


class FakeClient:
    def __init__(self) -> None:
        self.shutdowns = 0

    def shutdown(self) -> None:
        self.shutdowns += 1

    def end(self) -> None: ...

    def close(self) -> None: ...


class FakeLink:
    """Answers what `act` says for a job, in the pool's threads."""

    def __init__(self, url: str, act: Callable[[Job], None] = lambda job: None) -> None:
        self.url, self.client, self.act = url, FakeClient(), act
        self.taken: list[int] = []
        self.most = self.now = 0
        self.lock = threading.Lock()

    def capture(self, job: Job, stop: threading.Event) -> Ticket:
        with self.lock:
            self.taken.append(job.source_index)
            self.now += 1
            self.most = max(self.most, self.now)
        try:
            self.act(job)
        finally:
            with self.lock:
                self.now -= 1
        return Ticket(source_index=job.source_index, n_rows=len(job.input_ids), crc32c={})


def lost(job: Job) -> None:
    raise ServerLost("connection refused")


def dead(link: object) -> None:
    raise TransientError("refused")


def well(link: object) -> None: ...


def jobs(n: int) -> list[Job]:
    return [Job(source_index=i, input_ids=np.ones(1 + i % 3, np.int32), row=0, files={}) for i in range(n)]


class World:
    def __init__(self, links: Sequence[FakeLink], check: Callable[[object], None], in_flight: int = 4) -> None:
        self.members = [Member(link=link, in_flight=in_flight, check=check) for link in links]  # type: ignore[arg-type]

    def dispatch(self, *, longest: int = 100, outage_seconds: float = 60.0) -> Dispatch:
        return Dispatch(self.members, longest, outage_seconds)

    def close(self) -> None:
        for member in self.members:
            member.end()


@pytest.fixture
def worlds(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., World]]:
    monkeypatch.setattr(http_pool, "FIRST_WAIT_SECONDS", 0.01)
    made: list[World] = []

    def make(*links: FakeLink, check: Callable[[object], None] = well, in_flight: int = 4) -> World:
        made.append(World(links, check, in_flight))
        for member in made[-1].members:
            member.wait_seconds = 0.01
        return made[-1]

    yield make
    for world in made:
        world.close()


def indexes(tickets: Sequence[Ticket]) -> list[int]:
    return sorted(ticket.source_index for ticket in tickets)


def test_every_server_gets_its_share_and_none_too_much(worlds: Callable[..., World]) -> None:
    both = threading.Barrier(2)
    meet = threading.Event()

    def act(job: Job) -> None:
        if not meet.is_set() and job.source_index < 2:
            both.wait(300)
            meet.set()

    one, two = FakeLink("http://one", act), FakeLink("http://two", act)
    tickets = list(worlds(one, two).dispatch().tickets(iter(jobs(100))))
    assert indexes(tickets) == list(range(100))
    assert one.taken
    assert two.taken
    assert max(one.most, two.most) <= 4


def test_jobs_are_not_pulled_before_they_can_be_sent(worlds: Callable[..., World]) -> None:
    """Pulling a job stages a shard: all of them at once would need the space of the whole store."""
    pulled = 0

    def source() -> Iterator[Job]:
        nonlocal pulled
        for job in jobs(50):
            pulled += 1
            yield job

    hold = threading.Event()
    link = FakeLink("http://one", lambda job: None if job.source_index == 0 else _wait(hold))
    tickets = worlds(link).dispatch().tickets(source())
    next(tickets)
    assert pulled == 4
    hold.set()
    assert len(list(tickets)) == 49


def _wait(event: threading.Event) -> None:
    event.wait(300)


def test_the_samples_of_a_lost_server_go_to_the_others(worlds: Callable[..., World]) -> None:
    bad, good = FakeLink("http://bad", lost), FakeLink("http://good")
    tickets = list(worlds(bad, good, check=dead).dispatch().tickets(iter(jobs(40))))
    assert indexes(tickets) == list(range(40))
    assert not any(ticket.error for ticket in tickets)
    assert set(bad.taken) <= set(good.taken)


def test_a_server_that_comes_back_is_used_again(worlds: Callable[..., World]) -> None:
    """With one server alone, everything depends on it."""
    once = threading.Event()

    def act(job: Job) -> None:
        if job.source_index == 3 and not once.is_set():
            once.set()
            raise ServerLost("reset")

    asked: list[object] = []

    def check(link: object) -> None:
        asked.append(link)
        if len(asked) < 3:
            raise TransientError("still loading")

    link = FakeLink("http://one", act)
    tickets = list(worlds(link, check=check).dispatch().tickets(iter(jobs(20))))
    assert indexes(tickets) == list(range(20))
    assert len(asked) == 3
    assert link.taken.count(3) == 2


def test_one_that_comes_back_as_another_stays_out(
    worlds: Callable[..., World], capsys: pytest.CaptureFixture[str]
) -> None:
    """Its rows would mix with those of other weights."""

    asked = threading.Semaphore(0)

    def check(link: object) -> None:
        asked.release()
        raise UsageError("the weights are others")

    def wait_for_checks(job: Job) -> None:
        if job.source_index == 39:
            for _ in range(3):
                assert asked.acquire(timeout=300)

    bad, good = FakeLink("http://bad", lost), FakeLink("http://good", wait_for_checks)
    world = worlds(bad, good, check=check)
    assert len(list(world.dispatch().tickets(iter(jobs(40))))) == 40
    assert len(bad.taken) <= 4
    assert good.taken
    assert capsys.readouterr().err.count("http://bad stays out: the weights are others") == 1


def test_when_all_are_down_for_too_long_the_error_names_them(worlds: Callable[..., World]) -> None:
    one, two = FakeLink("http://one", lost), FakeLink("http://two", lost)
    with pytest.raises(IncompleteError, match=r"http://one \(.*refused.*http://two \(.*refused") as caught:
        list(worlds(one, two, check=dead).dispatch(outage_seconds=0.2).tickets(iter(jobs(30))))
    assert "--resume" in caught.value.hint


def test_a_sample_that_ends_every_server_is_given_up(worlds: Callable[..., World]) -> None:
    """Else one sick sample would go round for ever, and take every server with it."""

    def act(job: Job) -> None:
        if job.source_index == 5:
            raise ServerLost("crashed")

    tickets = list(worlds(FakeLink("http://one", act), in_flight=1).dispatch().tickets(iter(jobs(10))))
    assert indexes(tickets) == list(range(10))
    failed = [ticket for ticket in tickets if ticket.error]
    assert [ticket.source_index for ticket in failed] == [5]
    assert "3 times without an answer from a server, the last time: crashed" in failed[0].error


def test_an_error_that_no_server_mends_ends_the_run(worlds: Callable[..., World]) -> None:
    def act(job: Job) -> None:
        raise NoSpaceError("the disk is full")

    with pytest.raises(NoSpaceError):
        list(worlds(FakeLink("http://one", act)).dispatch().tickets(iter(jobs(3))))


def test_samples_that_cannot_fit_are_never_sent(worlds: Callable[..., World]) -> None:
    link = FakeLink("http://one")
    tickets = list(worlds(link).dispatch(longest=2).tickets(iter(jobs(6))))
    assert {t.source_index for t in tickets if "longest prompt, 2" in t.error} == {2, 5}
    assert sorted(link.taken) == [0, 1, 3, 4]


def test_what_an_abandoned_capture_left_disturbs_no_other(worlds: Callable[..., World]) -> None:
    hold = threading.Event()
    link = FakeLink("http://one", lambda job: None if job.source_index == 0 else _wait(hold))
    world = worlds(link)
    first = world.dispatch()
    tickets = first.tickets(iter(jobs(10)))
    next(tickets)
    first.close()
    assert first.stop.is_set()
    assert link.client.shutdowns == 1
    link.act = lambda job: None
    again = list(world.dispatch().tickets(iter(jobs(7))))  # while the old requests still hang
    assert indexes(again) == list(range(7))
    hold.set()
