"""Which bins each step takes, and at what learning rate: pure functions, so that a resumed run repeats an unbroken one.

Responsible for: walking (epoch, bin) in steps of W bins, the empty bins that fill the last step of an epoch, the
number of steps, the learning rate. Leaves to the plan what lies in a bin.

Letters: W ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

ScheduleName = Literal["cosine", "constant"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """Place between two steps. Independent of W: any number of ranks can go on from it."""

    epoch: int
    bins_consumed: int
    """Bins of this epoch already trained on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBins:
    """What one step trains on: rank r takes `bins[r]`."""

    step: int
    """0-based."""
    epoch: int
    bins: tuple[int | None, ...]
    """[W]; None = an empty bin, because the epoch has no more."""
    after: Cursor
    """Where the next step begins; the start of the next epoch when this one is through."""

    @property
    def n_empty(self) -> int:
        return self.bins.count(None)

    @property
    def ends_epoch(self) -> bool:
        return self.after.epoch != self.epoch


def walk(batches: Sequence[int], start: Cursor, step: int, world: int) -> Iterator[StepBins]:
    """All steps from `start` on. `batches[e]` is the number of bins of epoch e, `step` the number of the next step."""
    epoch, first = start.epoch, start.bins_consumed
    while epoch < len(batches):
        n_bins = batches[epoch]
        while first < n_bins:
            stop = min(first + world, n_bins)
            bins = tuple(b if b < stop else None for b in range(first, first + world))
            after = (
                Cursor(epoch=epoch, bins_consumed=stop) if stop < n_bins else Cursor(epoch=epoch + 1, bins_consumed=0)
            )
            yield StepBins(step=step, epoch=epoch, bins=bins, after=after)
            step, first = step + 1, stop
        epoch, first = epoch + 1, 0


def steps_left(batches: Sequence[int], start: Cursor, world: int) -> int:
    """How many steps `walk` yields."""
    left = [n - (start.bins_consumed if e == start.epoch else 0) for e, n in enumerate(batches) if e >= start.epoch]
    return sum(math.ceil(n / world) for n in left)


def learning_rate(step: int, *, peak: float, warmup_steps: int, total_steps: int, schedule: ScheduleName) -> float:
    """Rate of the 0-based `step`: linear warm-up to `peak`, then constant, or half a cosine down to 0."""
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if schedule == "constant":
        return peak
    done = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    return peak * 0.5 * (1.0 + math.cos(math.pi * min(1.0, done)))
