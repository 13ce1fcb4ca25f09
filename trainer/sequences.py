"""Reads a bin from the source and makes the training sequence of it, on whichever thread asks.

Responsible for: one source and one read buffer per worker. Leaves the rows to `data`, the threads to `loader`.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence

from hsstore.api import PlanInfo
from hsstore.source import BatchSource
from trainer.data import HostBatch, Noise, RowBuffers, RowLayout, empty, fill
from trainer.loader import Loader

Bin = tuple[int, int | None]
"""(epoch, batch); None = an empty bin."""
Sequences = Loader[Bin, RowBuffers, HostBatch]

_SLACK_BYTES = 1 << 20  # header of the file and small tensors; a larger batch gets a buffer of its own


class SequenceMaker:
    """Called with a bin and the buffers to fill."""

    def __init__(self, source: BatchSource, plan: PlanInfo, rows: RowLayout, *, noise_std: float) -> None:
        self._source, self._plan, self._rows, self._noise_std = source, plan, rows, noise_std
        row_bytes = 2 * rows.hidden_size * (len(rows.layers) + 1) + 16
        self._buffer = bytearray(rows.max_rows * row_bytes + _SLACK_BYTES)

    def __call__(self, job: Bin, buffers: RowBuffers) -> HostBatch:
        epoch, number = job
        if number is None:
            return empty(self._rows, buffers)
        batch = self._source.read_batch(self._plan.plan_id, epoch, number, self._buffer)
        noise = Noise(std=self._noise_std, seed=self._plan.parameters.seed, epoch=epoch) if self._noise_std else None
        return fill(batch.tensors, self._rows, buffers, noise)

    def close(self) -> None:
        self._source.close()


def maker_factory(
    source: BatchSource, plan: PlanInfo, rows: RowLayout, *, noise_std: float
) -> Callable[[], SequenceMaker]:
    """What a worker thread calls to get its own maker, with its own copy of the source and of the plans it knows."""
    packed = pickle.dumps(source)

    def new() -> SequenceMaker:
        return SequenceMaker(pickle.loads(packed), plan, rows, noise_std=noise_std)  # noqa: S301 (our own bytes)

    return new


def sequences(
    bins: Sequence[Bin], factory: Callable[[], SequenceMaker], rows: RowLayout, *, workers: int, pinned: bool
) -> Sequences:
    """A loader over `bins`, in their order."""
    return Loader(
        bins,
        workers=min(workers, len(bins)),
        new_buffers=lambda: RowBuffers.allocate(rows, pinned=pinned),
        new_maker=factory,
    )
