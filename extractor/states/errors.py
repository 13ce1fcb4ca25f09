"""How far stored rows are from a reference, and how far they may be.

Three measures of all rows: the relative error, and of the errors of each row by its own length the median and the ninth
decile. A bound is what transformers' own 16-bit forward differs from its float32 one on the same ids, times two; for
states computed in float32 it is the rounding of the stored copy, 0.003 (0.0017 are measured). They see a difference
that is everywhere. A few wrong rows they do not see, so every row has a bound of its own: four times the largest of its
own 16-bit error, of the ninth decile of those, and of 0.003. A scale that all rows share is looked for by itself.

Outliers (a first token with a value of 25,000 among tens) would outweigh all other rows: they are left out of the
measures, and have two bounds: as every row, and again without the values that make them outliers.

Letters: T tokens, H hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

FLOAT32_BOUND = 0.003
FACTOR = 2.0
ROW_FACTOR = 4.0
SCALE_BOUND = 0.003
_FAR = 0.5  # no row may be farther off than that, unless its own 16-bit error is as large
_AS_OWN = 1.2
_OUTLIER = 8.0  # times the median length
_DOMINATED = 0.9  # of a row's squared length in one value
_SMALL = 8.0  # times the median value of a row: those below that are what is left of an outlier
_ROUNDING = 1.2  # of float32: where one value makes up the row, its rounding alone can be 0.0039

Values = npt.NDArray[np.float32]
Numbers = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
Indexes = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Errors:
    """Of some rows against their reference."""

    squares: Numbers
    """[T] ‖a-b‖²"""
    lengths: Numbers
    """[T] ‖b‖²"""
    products: Numbers
    """[T] a·b"""
    cosines: Numbers
    """[T]"""
    zeros: Flags
    """[T] a is zero though b is not."""
    outliers: Flags
    """[T] b is far longer than the others, or is one value."""
    rests: Numbers
    """[T] of outliers, ‖a-b‖ / ‖b‖ without the values that make them so; 0 of other rows."""

    @property
    def rows(self) -> Numbers:
        """[T] ‖a-b‖ / ‖b‖ of each row."""
        rows: Numbers = np.sqrt(self.squares / np.maximum(self.lengths, 1e-30))
        return rows

    @property
    def plain(self) -> Flags:
        """[T] the rows that the measures are taken of: all but outliers, unless there are no others."""
        return np.ones_like(self.outliers) if self.outliers.all() else ~self.outliers

    @property
    def relative(self) -> float:
        """‖a-b‖ / ‖b‖."""
        plain = self.plain
        return float(np.sqrt(self.squares[plain].sum() / max(self.lengths[plain].sum(), 1e-30)))

    @property
    def scale(self) -> float:
        """a·b / b·b: what all rows were multiplied by."""
        plain = self.plain
        return float(self.products[plain].sum() / max(self.lengths[plain].sum(), 1e-30))

    @property
    def measures(self) -> tuple[float, float, float]:
        """Relative error, median and ninth decile of the rows' errors."""
        rows = self.rows[self.plain]
        return self.relative, float(np.median(rows)), float(np.quantile(rows, 0.9))

    @property
    def median_cosine(self) -> float:
        return float(np.median(self.cosines))

    def of(self, rows: Flags | Indexes) -> Errors:
        """Of some of the rows."""
        return Errors(*(getattr(self, f.name)[rows] for f in fields(self)))


def errors(stored: Values, reference: Values) -> Errors:
    """Stored rows that are not finite are as wrong as can be."""
    with np.errstate(invalid="ignore", over="ignore"):
        squares = np.square(stored - reference, dtype=np.float64).sum(axis=1)
        lengths = np.square(reference, dtype=np.float64).sum(axis=1)
        own = np.square(stored, dtype=np.float64).sum(axis=1)
        products = np.multiply(stored, reference, dtype=np.float64).sum(axis=1)
        cosines = products / np.maximum(np.sqrt(lengths * own), 1e-30)
    bad = ~np.isfinite(squares)
    squares[bad], cosines[bad], products[bad] = 1e12 * np.maximum(lengths[bad], 1e-30), -1.0, -lengths[bad]
    largest = np.square(np.abs(reference).max(axis=1), dtype=np.float64)
    outliers = (lengths > _OUTLIER**2 * np.median(lengths)) | (largest > _DOMINATED * lengths)
    rests = np.zeros(len(lengths))
    for row in np.flatnonzero(outliers & ~bad):
        rests[row] = _rest(stored[row], reference[row])
    return Errors(squares, lengths, products, cosines, (own == 0) & (lengths > 0), outliers, rests)


def _rest(stored: Values, reference: Values) -> float:
    sizes = np.abs(reference)
    small = sizes <= _SMALL * np.median(sizes)
    off = np.square((stored - reference)[small], dtype=np.float64).sum()
    return float(np.sqrt(off / max(np.square(reference[small], dtype=np.float64).sum(), 1e-30)))


def pooled(several: Sequence[Errors]) -> Errors:
    return Errors(*(np.concatenate([getattr(e, f.name) for e in several]) for f in fields(Errors)))


def beyond(found: Errors, own: Errors, every: Errors) -> Flags:
    """[T] rows that are wrong. `own`: the reference's own errors of the same rows, `every`: of all samples."""
    usual = max(FLOAT32_BOUND, own.measures[2], every.measures[2])
    rows = own.rows
    limit = np.minimum(ROW_FACTOR * np.maximum(rows, usual), np.maximum(_FAR, _AS_OWN * rows))
    rest = ROW_FACTOR * np.maximum(own.rests, usual)
    wrong: Flags = (found.rows > limit) | (found.rests > rest) | found.zeros
    return wrong


def scale_bound(own: Errors) -> float:
    """How far from 1 a scale may be. Few rows leave more to chance."""
    chance = FACTOR * own.relative / math.sqrt(int(own.plain.sum()))
    return max(SCALE_BOUND, FACTOR * abs(own.scale - 1), chance)


def bounds(own: Sequence[Errors], *, float32: bool) -> tuple[float, float, float]:
    """For each measure: of the largest of the reference's own errors (of the sample, and of all samples)."""
    factor = _ROUNDING if float32 else FACTOR
    measures = [e.measures for e in own]
    # Of rows that are one value, the stored copy may be off by a unit of that value, 0.0078.
    floor = FLOAT32_BOUND * (ROW_FACTOR if own[0].outliers.all() else 1)
    relative, median, decile = (max(floor, factor * max(column)) for column in zip(*measures, strict=True))
    return relative, median, decile


def within(found: Errors, bound: tuple[float, float, float]) -> bool:
    return all(value <= limit for value, limit in zip(found.measures, bound, strict=True))


def to_bfloat16(values: Values) -> Values:
    """Rounded as a stored copy is: to the nearest, ties to even."""
    bits = values.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)
    return rounded.view(np.float32)
