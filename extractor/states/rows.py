"""What single wrong rows are, where most rows of a sample are right: zeros, another layer's, another place's, another
sample's.

That is how chunked prefill, a reused cache or a lost write goes wrong: from some token on, or for some tokens. Each
wrong row is compared with the same tokens' states at every layer, and with all rows of its state, of its own sample and
of the other ones that are checked. Leaves which rows are wrong to `errors`, samples that are wrong as a whole to
`layers`.

Letters: T tokens, H hidden size, B wrong rows, n decoder layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from extractor.states.agreement import words
from extractor.states.errors import Indexes, Numbers, Values
from extractor.states.finding import Finding, damage
from extractor.states.sample import spread

_LOOKED_AT = 64  # wrong rows of a sample and state; those between them are named alike
_NAMED = 0.5  # a better explanation leaves less than half of the error, and less than half of the row
_RANGES = 6

Label = tuple[str, str]
"""Kind of damage, and `layer`, shift or sample."""
UNKNOWN: Label = ("rows", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrong:
    """The wrong rows of one state of one sample."""

    state: str
    place: str
    """Where transformers has this state: `final`, `after_k`."""
    sample: int
    """source_index"""
    stored: Values
    """[T, H]"""
    reference: Values
    """[T, H]"""
    others: Mapping[int, Values]
    """[T', H] of the other samples, by source_index."""
    at: Indexes
    """[B]"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    findings: tuple[Finding, ...]
    unknown: Indexes
    """Rows that are nothing known."""


def name(wrong: Wrong, every_layer: Callable[[Indexes], Mapping[str, Values]]) -> Named:
    """`every_layer`: states of the sample's given rows, at every layer; asked once, if at all."""
    is_zero = ~wrong.stored[wrong.at].any(axis=1)
    labels: dict[Label, list[int]] = {}
    if is_zero.any():
        labels["rows", "zeros"] = wrong.at[is_zero].tolist()
    rest = wrong.at[~is_zero]
    if len(rest):
        looked_at = rest[spread(len(rest), _LOOKED_AT)]
        found = _labels(wrong, looked_at, every_layer(looked_at))
        nearest = np.abs(rest[:, None] - looked_at[None, :]).argmin(axis=1)
        for row, i in zip(rest.tolist(), nearest.tolist(), strict=True):
            labels.setdefault(found[i], []).append(row)
    unknown = np.array(labels.pop(UNKNOWN, []), np.intp)
    said = [_finding(wrong, label, rows) for label, rows in labels.items()]
    return Named(findings=tuple(said), unknown=unknown)


def nothing_known(wrong: Wrong, rows: Indexes) -> Finding:
    what = "nothing that this model gives at any layer, nor another checked sample's; the other rows are right"
    return damage("rows", f"{ranges(rows.tolist())} {_be(len(rows))} {what}", wrong.state, samples=(wrong.sample,))


def _labels(wrong: Wrong, rows: Indexes, layers: Mapping[str, Values]) -> list[Label]:
    """What each row is nearest to, `UNKNOWN` where that is not near."""
    stored = wrong.stored[rows]
    here = _relative(stored, wrong.reference[rows])
    best, labels = _NAMED * np.minimum(here, 1.0), [UNKNOWN] * len(rows)

    def offer(error: Numbers, label: Callable[[int], Label]) -> None:
        for i in np.flatnonzero(error < best):
            best[i], labels[i] = error[i], label(int(i))

    for layer, values in layers.items():
        if layer != wrong.place:
            offer(_relative(stored, values), lambda _i, layer=layer: ("layer", layer))  # type: ignore[misc]
    places, error = _nearest(stored, wrong.reference)
    offer(error, lambda i: ("shift", str(places[i] - rows[i])))
    for sample, reference in wrong.others.items():
        _, error = _nearest(stored, reference)
        offer(error, lambda _i, sample=sample: ("sample", str(sample)))  # type: ignore[misc]
    return labels


def _nearest(stored: Values, reference: Values) -> tuple[Indexes, Numbers]:
    """For each row the nearest of the reference's, and the relative error there."""
    lengths = np.square(reference).sum(axis=1)
    places = (lengths[None, :] - 2 * (stored @ reference.T)).argmin(axis=1)
    return places, _relative(stored, reference[places])


def _relative(one: Values, two: Values) -> Numbers:
    off = np.square(one - two, dtype=np.float64).sum(axis=1)
    error: Numbers = np.sqrt(off / np.maximum(np.square(two, dtype=np.float64).sum(axis=1), 1e-30))
    return error


def _finding(wrong: Wrong, label: Label, rows: list[int]) -> Finding:
    kind, which = label
    of = f"{ranges(rows)} of {len(wrong.stored)}"
    if which == "zeros":
        what = f"{of} {_be(len(rows))} zeros"
    elif kind == "layer":
        what = f"{of} {_hold(len(rows))} what {which} should be"
    elif kind == "shift":
        what = f"{of} {_be(len(rows))} {words(int(which))}"
    else:
        what = f"{of} {_hold(len(rows))} rows of sample {which}"
    return damage(kind, what, wrong.state, samples=(wrong.sample,))


def _be(n: int) -> str:
    return "is" if n == 1 else "are"


def _hold(n: int) -> str:
    return "holds" if n == 1 else "hold"


def ranges(rows: list[int]) -> str:
    """`row 5`, `rows 3-7 and 9`, with a count where there are many."""
    cuts = [i for i in range(1, len(rows)) if rows[i] != rows[i - 1] + 1]
    runs = [rows[i:j] for i, j in zip([0, *cuts], [*cuts, len(rows)], strict=True)]
    shown = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs[:_RANGES]]
    more = sum(len(run) for run in runs[_RANGES:])
    if more:
        shown.append(f"{more} more")
    text = shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"
    return f"{'row' if len(rows) == 1 else 'rows'} {text}"
