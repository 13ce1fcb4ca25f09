"""How far stored rows are from a reference, and how far they may be.

Two measures, because one row with an outlier of 25,000 outweighs all others in the first: the relative error over all
rows, and the error of each row by its own length, of which the median and the ninth decile are looked at. A bound is
what transformers' own 16-bit forward differs from its float32 one on the same ids, times two; for states computed in
float32 it is the rounding of the stored copy, 0.003 (0.0017 are measured).

Letters: T tokens, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FLOAT32_BOUND = 0.003
FACTOR = 2.0
_ROUNDING = 1.2  # of float32: where one value makes up the row, its rounding alone can be 0.0039

Values = npt.NDArray[np.float32]
Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Errors:
    """Of some rows against their reference."""

    squares: Numbers
    """[T] ‖a-b‖²"""
    lengths: Numbers
    """[T] ‖b‖²"""
    cosines: Numbers
    """[T]"""

    @property
    def relative(self) -> float:
        """‖a-b‖ / ‖b‖ over all rows."""
        return float(np.sqrt(self.squares.sum() / max(self.lengths.sum(), 1e-30)))

    @property
    def rows(self) -> Numbers:
        """[T] ‖a-b‖ / ‖b‖ of each row."""
        rows: Numbers = np.sqrt(self.squares / np.maximum(self.lengths, 1e-30))
        return rows

    @property
    def measures(self) -> tuple[float, float, float]:
        """Relative error, median and ninth decile of the rows' errors."""
        rows = self.rows
        return self.relative, float(np.median(rows)), float(np.quantile(rows, 0.9))

    @property
    def median_cosine(self) -> float:
        return float(np.median(self.cosines))


def errors(stored: Values, reference: Values) -> Errors:
    """Stored rows that are not finite are as wrong as can be."""
    with np.errstate(invalid="ignore", over="ignore"):
        squares = np.square(stored - reference, dtype=np.float64).sum(axis=1)
        lengths = np.square(reference, dtype=np.float64).sum(axis=1)
        own = np.square(stored, dtype=np.float64).sum(axis=1)
        products = np.multiply(stored, reference, dtype=np.float64).sum(axis=1)
        cosines = products / np.maximum(np.sqrt(lengths * own), 1e-30)
    bad = ~np.isfinite(squares)
    squares[bad], cosines[bad] = 1e12 * np.maximum(lengths[bad], 1e-30), -1.0
    return Errors(squares, lengths, cosines)


def pooled(several: Sequence[Errors]) -> Errors:
    return Errors(
        np.concatenate([e.squares for e in several]),
        np.concatenate([e.lengths for e in several]),
        np.concatenate([e.cosines for e in several]),
    )


def bounds(own: Sequence[Errors], *, float32: bool) -> tuple[float, float, float]:
    """For each measure: of the largest of the reference's own errors (of the sample, and of all samples)."""
    factor = _ROUNDING if float32 else FACTOR
    measures = [e.measures for e in own]
    relative, median, decile = (max(FLOAT32_BOUND, factor * max(column)) for column in zip(*measures, strict=True))
    return relative, median, decile


def within(found: Errors, bound: tuple[float, float, float]) -> bool:
    return all(value <= limit for value, limit in zip(found.measures, bound, strict=True))


def to_bfloat16(values: Values) -> Values:
    """Rounded as a stored copy is: to the nearest, ties to even."""
    bits = values.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)
    return rounded.view(np.float32)
