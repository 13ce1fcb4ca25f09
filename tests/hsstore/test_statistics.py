"""Statistics over bfloat16 rows equal those of float64 arithmetic, whatever the values are."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from hsstore.records import ArraySpec, ArrayStatistics
from hsstore.statistics import Accumulator, to_float32

SPEC = ArraySpec(name="hidden/final", dtype="uint16", logical_dtype="bfloat16", row_shape=(96,))


def bits(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    return (np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16).astype("<u2")


def collected(rows: npt.NDArray[np.uint16], chunk: int = 512) -> ArrayStatistics:
    accumulator = Accumulator(len(rows), chunk, SPEC)
    for block in range(-(-len(rows) // chunk)):
        part = np.full((chunk, 96), 0x7F80, "<u2")  # padding that would show if it were counted
        part[: len(rows) - block * chunk] = rows[block * chunk : (block + 1) * chunk]
        accumulator.add(block, memoryview(part).cast("B"))
    return accumulator.result()


@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e-18, 1e-10, 1e10, 1e18, 3e37, 0.0])
def test_any_scale_is_as_exact_as_float64(scale: float) -> None:
    """A sum of squares in float32 would be inf above 1e19 and zero below 1e-19."""
    rows = bits(np.random.default_rng(1).uniform(-1, 1, (1300, 96)).astype(np.float32) * np.float32(scale))
    exact = to_float32(rows).astype(np.float64)
    found = collected(rows)
    assert found.rms == pytest.approx(float(np.sqrt(np.mean(exact**2))), rel=1e-6, abs=0)
    assert found.absmax == float(np.abs(exact).max())
    assert (found.nan, found.inf) == (0, 0)


def test_what_is_not_finite_is_counted_beside() -> None:
    rows = bits(np.random.default_rng(2).standard_normal((700, 96)).astype(np.float32))
    rows[3, 5], rows[3, 6], rows[699, 95] = 0x7FC0, 0xFFC1, 0x7F80
    rows[500, :2] = 0xFF80
    values = to_float32(rows).astype(np.float64)
    kept = values[np.isfinite(values)]
    found = collected(rows)
    assert (found.nan, found.inf) == (2, 3)
    assert found.rms == pytest.approx(float(np.sqrt(np.mean(kept**2))), rel=1e-6)
    assert found.absmax == float(np.abs(kept).max())


def test_a_mix_of_scales_keeps_the_large_ones() -> None:
    rows = bits(np.random.default_rng(3).standard_normal((1024, 96)).astype(np.float32))
    rows[:512] = bits(np.full((512, 96), 2.0**60, np.float32))
    exact = to_float32(rows).astype(np.float64)
    assert collected(rows).rms == pytest.approx(float(np.sqrt(np.mean(exact**2))), rel=1e-6)
