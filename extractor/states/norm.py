"""On which side of the final norm are stored rows? Told by their length alone: no id, no head, no forward.

An RMS norm gives every vector length √H and then multiplies it by its weight. So a row divided by the weight has a root
mean square of 1 behind the norm, and some other, changing one before it. That holds for random weights and samples of
one token too; what it does not see is a norm applied twice, which the head does.

Letters: T tokens, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from extractor.foreign.finalnorm import FinalNorm
from extractor.foreign.sample import Norm
from extractor.states.finding import Finding, damage
from extractor.states.sample import Checked, spread

_ROWS = 256  # of a sample
_TOLERANCE = 0.02  # bfloat16 rounds each value by up to 0.4 %; a row's mean square is far steadier


@dataclass(frozen=True, slots=True)
class Lengths:
    """Root mean square of the rows of `final` divided by the norm's weight."""

    median: float
    by_sample: dict[int, float]
    """Share of rows that have the length of a normalised one, by source_index."""

    @property
    def normalised(self) -> float:
        """Share over all samples."""
        return float(np.mean(list(self.by_sample.values())))


def measure(samples: Sequence[Checked], norm: FinalNorm) -> Lengths | None:
    """None when the weight has zeros or there is no row: nothing can be told then."""
    weight: npt.NDArray[np.float32] = norm.weight.numpy()
    if not samples or not np.all(np.abs(weight) > 1e-6):
        return None
    lengths = {}
    for sample in samples:
        rows = sample.values("final")[spread(sample.n_tokens, _ROWS)]
        with np.errstate(invalid="ignore", over="ignore"):
            lengths[sample.source_index] = np.sqrt(np.mean(np.square(rows / weight), axis=1, dtype=np.float64))
    near = {index: float(np.mean(np.abs(rms - 1) <= _TOLERANCE)) for index, rms in lengths.items()}
    return Lengths(float(np.median(np.concatenate(list(lengths.values())))), near)


def judge(lengths: Lengths, declared: Norm) -> list[Finding]:
    """A sample is wrong when most of its rows are on the other side."""
    wrong = tuple(i for i, near in lengths.by_sample.items() if (near < 0.5) == (declared == "post"))
    if not wrong:
        return []
    samples = () if len(wrong) == len(lengths.by_sample) else wrong
    if declared == "post":
        what = "final is not after the norm though the capture says post: its rows have not the length the norm gives"
    else:
        what = "final is after the norm though the capture says pre: its rows have the length that the norm gives"
    return [damage("norm", what, "final", samples=samples)]
