"""Makes the next sequences while the current one is trained on: in order, into buffers that are used again.

Responsible for: the worker threads, their order, passing on their errors as they were raised. Leaves to `data` what a
sequence is and to `schedule` which ones are wanted.

Threads, not processes: what a worker does (a socket read, copies, noise) runs outside the interpreter lock, a pinned
buffer is filled in place instead of being sent through /dev/shm (235 MB a batch at full size), nothing is forked
beside CUDA or gloo threads, and an error arrives with its own class and hint. Each worker has its own source.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue
from types import TracebackType
from typing import Generic, Protocol, TypeVar

Job = TypeVar("Job")
Buffers = TypeVar("Buffers")
Made = TypeVar("Made")
JobIn = TypeVar("JobIn", contravariant=True)
BuffersIn = TypeVar("BuffersIn", contravariant=True)
MadeOut = TypeVar("MadeOut", covariant=True)


class Maker(Protocol[JobIn, BuffersIn, MadeOut]):
    """What a worker does; one per thread."""

    def __call__(self, job: JobIn, buffers: BuffersIn) -> MadeOut:
        """Make the result of a job in the given buffers."""

    def close(self) -> None:
        """Called by the thread that used it."""


class Loader(Generic[Job, Buffers, Made]):
    """Iterate once over the results of `jobs`, in their order.

    A result is valid until the next one is asked for: its buffers then go back to the workers.
    """

    def __init__(
        self,
        jobs: Sequence[Job],
        *,
        workers: int,
        new_buffers: Callable[[], Buffers],
        new_maker: Callable[[], Maker[Job, Buffers, Made]],
    ) -> None:
        """`new_maker` is called once on each worker thread; with `workers` = 0 everything happens in the caller's."""
        self.last_wait_seconds = 0.0
        """How long the caller waited for the result it holds."""
        self._jobs = jobs
        self._new_maker = new_maker
        self._free: SimpleQueue[Buffers | None] = SimpleQueue()
        self._made: dict[int, Made | BaseException] = {}
        self._used: dict[int, Buffers] = {}
        self._next = 0
        self._closed = False
        self._ready = threading.Condition()
        self._own = new_maker() if workers == 0 else None
        for _ in range(workers + 2 if workers else 1):  # one in use, one ready, one in the hands of each worker
            self._free.put(new_buffers())
        self._threads = [threading.Thread(target=self._work, daemon=True, name=f"loader-{i}") for i in range(workers)]
        for thread in self._threads:
            thread.start()

    def __iter__(self) -> Iterator[Made]:
        for index in range(len(self._jobs)):
            started = time.perf_counter()
            made = self._take(index) if self._own is None else self._make_here(index)
            self.last_wait_seconds = time.perf_counter() - started
            if isinstance(made, BaseException):
                raise made
            yield made
            self._free.put(self._used.pop(index))

    def __enter__(self) -> Loader[Job, Buffers, Made]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let the workers end. One that hangs in a read is left to end with the process."""
        with self._ready:
            self._closed = True
            self._ready.notify_all()
        for _ in self._threads:
            self._free.put(None)
        for thread in self._threads:
            thread.join(timeout=2.0)
        if self._own is not None:
            self._own.close()

    def _take(self, index: int) -> Made | BaseException:
        with self._ready:
            while index not in self._made:
                self._ready.wait(timeout=1.0)  # bounded, so that a signal handler gets its turn
            return self._made.pop(index)

    def _make_here(self, index: int) -> Made:
        buffers = self._free.get()
        assert self._own is not None
        assert buffers is not None
        self._used[index] = buffers
        return self._own(self._jobs[index], buffers)

    def _work(self) -> None:
        maker: Maker[Job, Buffers, Made] | None = None
        try:
            while (claimed := self._claim()) is not None:
                index, buffers = claimed
                made: Made | BaseException
                try:
                    maker = maker or self._new_maker()
                    made = maker(self._jobs[index], buffers)
                except BaseException as error:  # noqa: BLE001
                    made = error  # raised again where the caller reaches this job
                with self._ready:
                    self._made[index] = made
                    self._ready.notify_all()
        finally:
            if maker is not None:
                maker.close()

    def _claim(self) -> tuple[int, Buffers] | None:
        """The next job and buffers for it; None when there is nothing more to do."""
        buffers = self._free.get()
        with self._ready:
            # The buffers come first and the job second: whoever holds buffers makes the earliest job left, so the one
            # the caller waits for can never starve behind later ones.
            if buffers is None or self._closed or self._next >= len(self._jobs):
                return None
            index = self._next
            self._next += 1
            self._used[index] = buffers
            return index, buffers
