"""SIGTERM as an exception, so that a batch system's signal ends a run in as good an order as Ctrl-C does.

Leaves to the command what can be said about continuing.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from hsstore.errors import EXIT_INTERRUPTED

EXIT_TERMINATED = 143


class TerminatedError(BaseException):
    """SIGTERM came."""


@contextmanager
def sigterm_raises() -> Iterator[None]:
    """SIGTERM raises `TerminatedError` in the main thread meanwhile, once: batch systems send it again and again, and
    what the first one began, dropping open shards and giving back leases, must end."""
    previous = signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def until_stopped(work: Callable[[], int], say_how_to_go_on: Callable[[], None]) -> int:
    """Exit code of `work`, or that of the signal which ended it, once it was said how to go on."""
    try:
        with sigterm_raises():
            return work()
    except (KeyboardInterrupt, TerminatedError) as stop:
        say_how_to_go_on()
        return exit_code(stop)


def exit_code(stop: BaseException) -> int:
    """Of a run that a signal ended."""
    return EXIT_TERMINATED if isinstance(stop, TerminatedError) else EXIT_INTERRUPTED


def _terminate(_signal: int, _frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise TerminatedError
