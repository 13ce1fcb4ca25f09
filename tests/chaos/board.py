"""A few numbers per writer in shared memory: what it is doing, what it has done. They survive its death."""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import numpy as np

PHASES = (
    *("idle", "open", "lease", "grow", "stage", "fill", "seal", "sealed", "record", "committed"),
    *("publish", "clean", "manifest", "quarantine", "gc"),
)
"""In the order of a commit: `sealed` is before the record has its name, `committed` behind that."""
COUNTERS = ("commits", "races_lost", "rolled_forward", "taken_over", "layouts_added", "quarantined", "removed", "read")
_FIELDS = ("phase", "shard", *COUNTERS)


class Board:
    """Rows of int64, one per slot; a slot has one process at a time."""

    def __init__(self, slots: int) -> None:
        self._memory = mmap.mmap(-1, (slots + 1) * len(_FIELDS) * 8)
        table = np.frombuffer(self._memory, np.int64).reshape(slots + 1, len(_FIELDS))
        self._table, self._flags = table[:-1], table[-1]
        self._table[:, 1] = -1

    @property
    def quarantines_left(self) -> int:
        """Writers go on until there are none: what is quarantined must be written again."""
        return int(self._flags[0])

    @quarantines_left.setter
    def quarantines_left(self, n: int) -> None:
        self._flags[0] = n

    @property
    def over(self) -> bool:
        """The sweeper may end."""
        return bool(self._flags[1])

    @over.setter
    def over(self, value: bool) -> None:
        self._flags[1] = value

    def set(self, slot: int, phase: str) -> None:
        self._table[slot, 0] = PHASES.index(phase)

    def phase(self, slot: int) -> str:
        return PHASES[int(self._table[slot, 0])]

    def work_on(self, slot: int, shard: int) -> None:
        """-1: on none."""
        self._table[slot, 1] = shard

    def shard(self, slot: int) -> int:
        return int(self._table[slot, 1])

    def count(self, slot: int, counter: str, n: int = 1) -> None:
        self._table[slot, _FIELDS.index(counter)] += n

    def totals(self, counters: Sequence[str] = COUNTERS) -> dict[str, int]:
        return {c: int(self._table[:, _FIELDS.index(c)].sum()) for c in counters}
