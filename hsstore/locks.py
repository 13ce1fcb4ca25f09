"""A lock that a forked child finds free.

A thread that holds a plain `threading.Lock` while another one forks does not exist in the child, so the child would
wait for it for ever. What these locks guard (caches, changed one whole step at a time) is sound at any instant.
"""

from __future__ import annotations

import os
import threading
import weakref

_all: weakref.WeakSet[ForkLock] = weakref.WeakSet()


class ForkLock:
    """Use as a context manager, as `threading.Lock`."""

    __slots__ = ("__weakref__", "_lock")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        _all.add(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def _renew(self) -> None:
        self._lock = threading.Lock()


def _renew_all() -> None:
    for lock in list(_all):
        lock._renew()


os.register_at_fork(after_in_child=_renew_all)
