"""A sample that is checked, in memory.

Letters: T tokens of a sample, H hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from extractor.foreign.sample import Rows
from hsstore.statistics import to_float32


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """Ids, mask and stored states of one sample, or of its first tokens: states are causal, so a cut is exact."""

    source_index: int
    input_ids: npt.NDArray[np.int32]
    """[T]"""
    loss_mask: npt.NDArray[np.uint8]
    """[T], 1 = assistant token."""
    states: Mapping[str, Rows]
    """bfloat16 patterns [T, H] by state name."""
    shard: int | None = None

    @property
    def n_tokens(self) -> int:
        return len(self.input_ids)

    def cut(self, n_tokens: int | None) -> Checked:
        """Its first tokens, copied: nothing of the caller's memory is held."""
        n = self.n_tokens if n_tokens is None else min(n_tokens, self.n_tokens)
        return Checked(
            source_index=self.source_index,
            input_ids=np.array(self.input_ids[:n], np.int32),
            loss_mask=np.array(self.loss_mask[:n], np.uint8),
            states={name: np.array(rows[:n]) for name, rows in self.states.items()},
            shard=self.shard,
        )

    def values(self, state: str) -> npt.NDArray[np.float32]:
        """float32 [T, H] of a state."""
        return to_float32(self.states[state])


def first_difference(one: npt.NDArray[np.int32], two: npt.NDArray[np.int32]) -> int:
    """How many first ids are equal: there, and only there, two samples have equal states."""
    n = min(len(one), len(two))
    differ = np.flatnonzero(one[:n] != two[:n])
    return int(differ[0]) if differ.size else n


def spread(n: int, most: int) -> npt.NDArray[np.intp]:
    """At most so many of 0 … n-1, evenly spaced, first and last included."""
    if n <= most:
        return np.arange(n)
    return np.unique(np.linspace(0, n - 1, most).round().astype(np.intp))
