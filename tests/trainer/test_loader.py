"""Order, errors and reuse of the loader's threads."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest

from hsstore.errors import ServiceError
from trainer.loader import Loader


class Maker:
    """A function as a maker that knows whether it was closed."""

    def __init__(self, make: Callable[[int, list[int]], Any]) -> None:
        self.make = make
        self.closed_by: int | None = None

    def __call__(self, job: int, buffers: list[int]) -> Any:
        return self.make(job, buffers)

    def close(self) -> None:
        self.closed_by = threading.get_ident()


def loader(n: int, workers: int, make: Callable[[int, list[int]], list[int]]) -> Loader[int, list[int], list[int]]:
    return Loader(range(n), workers=workers, new_buffers=list, new_maker=lambda: Maker(make))


@pytest.mark.parametrize("workers", [0, 1, 4])
def test_results_come_in_order_whoever_is_faster(workers: int) -> None:
    rng = random.Random(1)

    def make(job: int, buffers: list[int]) -> list[int]:
        time.sleep(rng.random() / 500)
        buffers[:] = [job]
        return buffers

    with loader(40, workers, make) as loading:
        assert [made[0] for made in loading] == list(range(40))


@pytest.mark.parametrize("workers", [0, 3])
def test_a_result_stays_as_it_is_until_the_next_one_is_asked_for(workers: int) -> None:
    """Its buffers go back only then: a worker that wrote into them earlier would change a batch in training."""

    def make(job: int, buffers: list[int]) -> list[int]:
        buffers[:] = [job]
        return buffers

    with loader(30, workers, make) as loading:
        for expected, made in enumerate(loading):
            time.sleep(0.002)
            assert made == [expected]


def test_there_are_no_more_buffers_than_workers_need() -> None:
    made = count()

    def new() -> list[int]:
        next(made)
        return []

    with Loader(range(50), workers=3, new_buffers=new, new_maker=lambda: Maker(lambda job, buffers: job)) as loading:
        assert list(loading) == list(range(50))
    assert next(made) == 5


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_arrives_as_it_was_raised_and_where_it_belongs(workers: int) -> None:
    """With its class and hint: it is what the user will read."""

    def make(job: int, buffers: list[int]) -> list[int]:
        if job == 5:
            raise ServiceError("no complete answer", hint="is the service running?")
        return [job]

    seen: list[list[int]] = []
    with loader(20, workers, make) as loading, pytest.raises(ServiceError) as caught:
        seen.extend(loading)
    assert seen == [[0], [1], [2], [3], [4]]
    assert caught.value.hint == "is the service running?"


def test_each_worker_has_a_maker_of_its_own() -> None:
    """Sources hold sockets and caches that two threads must not share."""
    makers: list[Maker] = []
    users: list[set[int]] = []

    def new_maker() -> Maker:
        mine: set[int] = set()

        def make(job: int, buffers: list[int]) -> int:
            time.sleep(0.001)
            mine.add(threading.get_ident())
            return job

        users.append(mine)
        makers.append(Maker(make))
        return makers[-1]

    with Loader(range(40), workers=4, new_buffers=list, new_maker=new_maker) as loading:
        assert list(loading) == list(range(40))
    assert len(users) > 1
    assert all(len(threads) == 1 for threads in users)
    assert {m.closed_by for m in makers} == {t for threads in users for t in threads}, "closed by its own thread"


def test_leaving_early_ends_the_threads() -> None:
    before = threading.active_count()
    with loader(1000, 3, lambda job, buffers: [job]) as loading:
        for made in loading:
            if made == [3]:
                break
    assert threading.active_count() == before
