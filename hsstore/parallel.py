"""Work on many things by threads, results as they come, an end at once when nobody wants more.

Leaves to the work itself to look at `stop` often enough that nobody waits for it.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")

TICK_SECONDS = 0.25


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0))


def unordered(
    work: Callable[[T], R],
    items: Iterable[T],
    *,
    jobs: int,
    stop: threading.Event,
    tick: Callable[[], None] = lambda: None,
) -> Generator[R, None, None]:
    """`work(item)` of every item by `jobs` threads, in the order in which they end. `tick` is called now and then.

    The first error that `work` raises is raised here. `stop` is set as soon as this ends, by whatever reason.
    """
    waiting = iter(items)
    lock = threading.Lock()
    results: queue.SimpleQueue[R | Future[None]] = queue.SimpleQueue()

    def loop() -> None:
        while not stop.is_set():
            with lock:
                try:
                    item = next(waiting)
                except StopIteration:
                    return
            results.put(work(item))

    with ThreadPoolExecutor(jobs, thread_name_prefix="hsstore") as pool:
        try:
            for _ in range(jobs):
                pool.submit(loop).add_done_callback(results.put)
            running = jobs
            while running:
                try:
                    result = results.get(timeout=TICK_SECONDS)
                except queue.Empty:
                    tick()
                    continue
                if isinstance(result, Future):
                    running -= 1
                    result.result()  # raises what ended that thread
                else:
                    yield result
        finally:
            stop.set()
