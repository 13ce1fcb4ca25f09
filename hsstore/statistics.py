"""Statistics of bfloat16 rows as they pass: rms, largest magnitude, NaN and Inf counts. numpy only.

Letters: C rows of a block, H hidden size.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from hsstore.records import ArraySpec, ArrayStatistics

_PIECE = 1 << 15
"""Values at a time: their float32 stay in the cache, and a float32 sum of so many squares is good to 1e-6."""
_MAGNITUDE = np.uint16(0x7FFF)


def _power(exponent: int) -> int:
    """Bit pattern of 2**exponent as bfloat16."""
    return (127 + exponent) << 7


def to_float32(bfloat16: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    """bfloat16 bit patterns (any shape) to float32, exactly: bfloat16 is the upper half of a float32."""
    return (bfloat16.astype(np.uint32) << np.uint32(16)).view(np.float32)


class Accumulator:
    """Collects over the blocks of one array file; padding rows behind `n_rows` do not count."""

    def __init__(self, n_rows: int, chunk_rows: int, spec: ArraySpec) -> None:
        self._n_rows, self._chunk_rows, self._row_bytes = n_rows, chunk_rows, spec.row_bytes
        self._squares, self._count, self._absmax, self._nan, self._inf = 0.0, 0, 0.0, 0, 0
        self._magnitudes, self._wide = np.empty(_PIECE, np.uint16), np.empty(_PIECE, np.uint32)

    def add(self, block: int, data: memoryview) -> None:
        """Take block number `block`, its raw bytes in little-endian uint16."""
        rows = min(self._chunk_rows, self._n_rows - block * self._chunk_rows)
        values = np.frombuffer(data[: rows * self._row_bytes], "<u2")
        for start in range(0, values.size, _PIECE):
            self._add(values[start : start + _PIECE])

    def _add(self, values: npt.NDArray[np.uint16]) -> None:
        # Magnitudes of floats are ordered as their bits, and the dot product runs in SIMD: 3.5 x faster than float64.
        magnitudes = np.bitwise_and(values, _MAGNITUDE, out=self._magnitudes[: values.size])
        largest = magnitudes.max(keepdims=True)
        if not _power(-50) <= int(largest[0]) <= _power(50):
            self._add_exactly(values)  # zeros, not finite, or squares that float32 does not hold
            return
        wide = self._wide[: values.size]
        wide[...] = values
        floats = np.left_shift(wide, np.uint32(16), out=wide).view(np.float32)
        self._absmax = max(self._absmax, float(to_float32(largest)[0]))
        self._squares += float(np.dot(floats, floats))
        self._count += values.size

    def _add_exactly(self, bits: npt.NDArray[np.uint16]) -> None:
        values = to_float32(bits)
        finite = np.isfinite(values)
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
