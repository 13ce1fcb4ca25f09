"""Statistics of bfloat16 rows as they pass: rms, largest magnitude, NaN and Inf counts. numpy only.

Letters: C rows of a block, H hidden size.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from hsstore.records import ArraySpec, ArrayStatistics


def to_float32(bfloat16: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    """bfloat16 bit patterns (any shape) to float32, exactly: bfloat16 is the upper half of a float32."""
    return (bfloat16.astype(np.uint32) << np.uint32(16)).view(np.float32)


class Accumulator:
    """Collects over the blocks of one array file; padding rows behind `n_rows` do not count."""

    def __init__(self, n_rows: int, chunk_rows: int, spec: ArraySpec) -> None:
        self._n_rows, self._chunk_rows, self._row_bytes = n_rows, chunk_rows, spec.row_bytes
        self._squares, self._count, self._absmax, self._nan, self._inf = 0.0, 0, 0.0, 0, 0

    def add(self, block: int, data: memoryview) -> None:
        """Take block number `block`, its raw bytes in little-endian uint16."""
        rows = min(self._chunk_rows, self._n_rows - block * self._chunk_rows)
        values = to_float32(np.frombuffer(data[: rows * self._row_bytes], "<u2"))
        finite = np.isfinite(values)
        if not finite.all():
            self._nan += int(np.isnan(values).sum())
            self._inf += int(np.isinf(values).sum())
            values = values[finite]
        if values.size:
            self._absmax = max(self._absmax, float(np.abs(values).max()))
            self._squares += float(np.square(values, dtype=np.float64).sum())
            self._count += values.size

    def result(self) -> ArrayStatistics:
        """Over the finite values; NaN and Inf are counted beside."""
        rms = math.sqrt(self._squares / self._count) if self._count else 0.0
        return ArrayStatistics(rms=rms, absmax=self._absmax, nan=self._nan, inf=self._inf)
