"""On which side of the final norm are stored rows? Told by their length alone: no id, no head, no forward.

An RMS norm gives every vector length √H and then multiplies it by its weight. So a row divided by the weight has a root
mean square of 1 behind the norm, and some other, changing one before it. That holds for random weights and samples of
one token too; what it does not see is a norm applied twice, which the head does.

Letters: T tokens, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

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
    otherwise: dict[int, float] = field(default_factory=dict)
    """The same if the family added one to the weight, or did not, other than its name says."""

    @property
    def normalised(self) -> float:
        """Share over all samples."""
        return float(np.mean(list(self.by_sample.values())))


def measure(samples: Sequence[Checked], norm: FinalNorm) -> Lengths | None:
    """None when the weight has zeros, there is no row, or the states are so small that epsilon makes a difference."""
    weight: npt.NDArray[np.float32] = norm.weight.numpy()
    if not samples or not np.all(np.abs(weight) > 1e-6):
        return None
    if _is_small(samples, norm.epsilon):
        return None
    lengths = _lengths(samples, weight)
    other = weight - 1 if norm.one_plus else weight + 1
    otherwise = _near(_lengths(samples, other)) if np.all(np.abs(other) > 1e-6) else {}
    return Lengths(float(np.median(np.concatenate(list(lengths.values())))), _near(lengths), otherwise)


def _lengths(samples: Sequence[Checked], weight: npt.NDArray[np.float32]) -> dict[int, npt.NDArray[np.float64]]:
    """Root mean square of the rows divided by a weight."""
    out = {}
    for sample in samples:
        rows = sample.values("final")[spread(sample.n_tokens, _ROWS)]
        with np.errstate(invalid="ignore", over="ignore"):
            out[sample.source_index] = np.sqrt(np.mean(np.square(rows / weight), axis=1, dtype=np.float64))
    return out


def _near(lengths: dict[int, npt.NDArray[np.float64]]) -> dict[int, float]:
    return {index: float(np.mean(np.abs(rms - 1) <= _TOLERANCE)) for index, rms in lengths.items()}


def _is_small(samples: Sequence[Checked], epsilon: float) -> bool:
    """Whether the norm's epsilon shortens its rows, by the last state before it that is stored."""
    before = max((int(name[6:]) for name in samples[0].states if name.startswith("after_")), default=None)
    if before is None:
        return False
    rows = np.concatenate([s.values(f"after_{before}")[spread(s.n_tokens, _ROWS)] for s in samples])
    with np.errstate(invalid="ignore", over="ignore"):
        squares = np.mean(np.square(rows, dtype=np.float64), axis=1)
    return bool(np.median(squares) < epsilon / _TOLERANCE)


def judge(lengths: Lengths, declared: Norm) -> list[Finding]:
    """A sample is wrong when most of its rows are on the other side."""
    found = lengths.by_sample
    if declared == "post":  # a weight that is read wrongly here is no fault of the store
        found = {i: max(near, lengths.otherwise.get(i, 0.0)) for i, near in found.items()}
    wrong = tuple(i for i, near in found.items() if (near < 0.5) == (declared == "post"))
    if not wrong:
        return []
    samples = () if len(wrong) == len(lengths.by_sample) else wrong
    if declared == "post":
        what = "final is not after the norm though the capture says post: its rows have not the length the norm gives"
    else:
        what = "final is after the norm though the capture says pre: its rows have the length that the norm gives"
    return [damage("norm", what, "final", samples=samples)]
