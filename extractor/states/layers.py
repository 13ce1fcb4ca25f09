"""Stored states against transformers' forward of the same ids, layer by layer, and what wrong ones are instead.

Leaves the forward to `reference`, the arithmetic of errors to `errors`, the names of single wrong rows to `rows`.

Letters: T tokens, H hidden size, n decoder layers, k of `after_k`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from extractor.foreign.finalnorm import FinalNorm
from extractor.states import rows as wrong_rows
from extractor.states.agreement import SHIFTS, words
from extractor.states.errors import (
    SCALE_BOUND,
    Errors,
    Flags,
    Indexes,
    Values,
    beyond,
    bounds,
    errors,
    pooled,
    scale_bound,
    to_bfloat16,
    within,
)
from extractor.states.finding import Finding, damage, note
from extractor.states.reference import Given, Reference
from extractor.states.sample import Checked, first_difference, spread
from hsstore.records import Capture
from hsstore.statistics import to_float32

_SOME = 32  # rows of each sample that are compared with every layer
_NAMED = 0.5  # a better explanation leaves less than half of the error, and less than half of the row
_UNEXPLAINED = 0.02  # of the rows: as many may be off by no more than the reference's own worst, for no known reason
_ROUTED, _ROUTED_ERROR = 0.1, 0.7  # of the rows of a mixture of experts, and how far one may be off: others are at 1
NORMED_TWICE = "final, normed again"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One state over all samples, as the table shows it."""

    state: str
    relative: float
    relative_bound: float
    row_median: float
    row_median_bound: float
    row_decile: float
    row_decile_bound: float
    scale: float
    scale_bound: float
    """How far the scale may be from 1."""
    median_cosine: float
    rows_beyond: int
    """Rows that are wrong by their own bounds."""
    alike: str
    """A neighbouring layer whose states would pass as well: nothing is decided then. "" without one."""
    ok: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward:
    """The whole comparison."""

    version: str
    """Of transformers."""
    device: str
    yardstick: str
    """`float32`, or the 16-bit dtype whose own error is doubled."""
    n_tokens: int
    layers: tuple[Layer, ...]
    findings: tuple[Finding, ...]
    failed: frozenset[int]
    """source_index of samples with a wrong state."""
    final: dict[int, npt.NDArray[np.float32]]
    """[T, H] transformers' own `final`, after the norm, by source_index."""


@dataclass(frozen=True, slots=True)
class _Match:
    """Where a stored state fits best."""

    layer: str
    shift: int
    error: float
    here: float
    """Error where it should fit."""

    @property
    def is_elsewhere(self) -> bool:
        return self.error < _NAMED * self.here and self.error < _NAMED


@dataclass(slots=True)
class _State:
    """One state of one sample."""

    sample: Checked
    name: str
    reference: Values
    """[T, H]"""
    found: Errors
    match: _Match
    at: Indexes
    """Rows of which every layer is kept,"""
    neighbours: dict[str, Errors]
    """and the errors that the layers before and behind have there."""
    own: Errors | None = field(default=None)
    beyond: Flags = field(default_factory=lambda: np.empty(0, np.bool_))
    """[T] rows that are wrong by their own bounds."""

    @property
    def yardstick(self) -> Errors:
        assert self.own is not None
        return self.own


class Comparison:
    """Runs the forward over the samples and keeps what a verdict needs."""

    def __init__(self, capture: Capture, norm: FinalNorm | None, n_layers: int) -> None:
        self._capture, self._norm = capture, norm
        self._place = {name: name for name in capture.layers}
        if capture.norm == "pre":
            self._place["final"] = f"after_{n_layers}"
        self._last = f"after_{n_layers}"
        self._float32 = capture.compute_dtype == "float32"
        self._states: list[_State] = []
        self._final: dict[int, Values] = {}
        self._scales: dict[str, float] = {}

    def run(self, reference: Reference, samples: Sequence[Checked]) -> Forward:
        names = [name for name in self._capture.layers if name == "final" or _k(name) <= _k(self._last)]
        asked = sorted({"final", *(self._place[name] for name in names)})
        for sample in samples:
            rows = _some_rows(sample.n_tokens)
            given = reference.forward(sample.input_ids, asked, rows)
            self._final[sample.source_index] = given.full.get("final", given.some["final"])
            for name in names:
                self._states.append(self._compare(sample, name, given, rows))
        self._yardsticks(reference, samples, asked)
        return self._verdict(reference, names, sum(s.n_tokens for s in samples))

    def _compare(self, sample: Checked, name: str, given: Given, rows: Indexes) -> _State:
        place = self._place[name]
        expected = given.full[place]
        stored = sample.values(name)
        near = _beside(place) & given.some.keys()
        return _State(
            sample,
            name,
            expected,
            errors(stored, expected),
            self._match(name, stored, given, rows),
            rows,
            {other: errors(given.some[other], given.some[place]) for other in sorted(near)},
        )

    def _match(self, name: str, stored: Values, given: Given, rows: Indexes) -> _Match:
        """The layer and the shift under which stored rows are nearest, by the median over some rows."""
        candidates = dict(given.some)
        if self._norm is not None and name == "final":
            bits = (to_bfloat16(given.some["final"]).view(np.uint32) >> np.uint32(16)).astype(np.uint16)
            candidates[NORMED_TWICE] = to_float32(self._norm.apply(bits))
        here = _median(stored[rows], candidates[self._place[name]])
        best = _Match(self._place[name], 0, here, here)
        for shift in (0, *SHIFTS):
            # A row t that holds the state of token t + shift: the state of token r lies in row r - shift.
            inside = (rows - shift >= 0) & (rows - shift < len(stored))
            if not inside.any():
                continue
            moved = stored[rows[inside] - shift]
            for layer, expected in candidates.items():
                error = _median(moved, expected[inside])
                if error < best.error:
                    best = _Match(layer, shift, error, here)
        return best

    def _yardsticks(self, reference: Reference, samples: Sequence[Checked], asked: list[str]) -> None:
        """The reference's own error: of rounding the stored copy, or of computing in 16 bits as well."""
        if self._float32:
            for state in self._states:
                state.own = errors(to_bfloat16(state.reference), state.reference)
            return
        reference.to_bfloat16()
        for sample in samples:
            given = reference.forward(sample.input_ids, asked, np.empty(0, np.intp))
            for state in self._states:
                if state.sample is sample:
                    state.own = errors(to_bfloat16(given.full[self._place[state.name]]), state.reference)

    def _verdict(self, reference: Reference, names: list[str], n_tokens: int) -> Forward:
        layers, findings = [], []
        failed: set[int] = set()
        for name in names:
            layer, said = self._judge(reference, name, [s for s in self._states if s.name == name])
            layers.append(layer)
            findings += said
            failed |= {i for f in said if f.severity == "damage" for i in f.samples}
        beyond = [name for name in self._capture.layers if name not in names]
        findings += [damage("layer", f"the model has no state behind {self._last}", name) for name in beyond]
        return Forward(
            version=reference.version,
            device=reference.device,
            yardstick="float32" if self._float32 else "bfloat16",
            n_tokens=n_tokens,
            layers=tuple(layers),
            findings=tuple(findings),
            failed=frozenset(failed),
            final=self._final,
        )

    def _judge(self, reference: Reference, name: str, states: list[_State]) -> tuple[Layer, list[Finding]]:
        """One state of all samples, and what is wrong with it."""
        own, found = pooled([s.yardstick for s in states]), pooled([s.found for s in states])
        self._scales[name] = found.scale
        findings = []
        for state in states:
            state.beyond = beyond(state.found, state.yardstick, own)
            if state.beyond.any() or not self._passes(state.found, state.yardstick, own):
                findings += self._explain(reference, state, own)
        if not any(f.severity == "damage" for f in findings) and not self._passes(found, own, own):
            findings += self._together(name, states, found, own)
        wrong = any(f.severity == "damage" for f in findings)
        alike = "" if wrong else self._alike(states, own)
        if alike:
            what = f"{alike} would pass as well: so few tokens do not tell the two apart"
            findings.append(note("undecided", what, name))
        limit = bounds([own], float32=self._float32)
        relative, median, decile = found.measures
        layer = Layer(
            state=name,
            relative=relative,
            relative_bound=limit[0],
            row_median=median,
            row_median_bound=limit[1],
            row_decile=decile,
            row_decile_bound=limit[2],
            scale=found.scale,
            scale_bound=scale_bound(own),
            median_cosine=found.median_cosine,
            rows_beyond=sum(int(s.beyond.sum()) for s in states),
            alike=alike,
            ok=not wrong and not alike,
        )
        return layer, findings

    def _passes(self, found: Errors, own: Errors, every: Errors) -> bool:
        """Whether rows are within the bounds of all rows together."""
        near = within(found, bounds([own, every], float32=self._float32))
        return near and abs(found.scale - 1) <= scale_bound(own)

    def _alike(self, states: list[_State], own: Errors) -> str:
        """A layer before or behind that passes for this one in all samples."""
        for other in states[0].neighbours:
            for state in states:
                there, here = state.neighbours[other], state.yardstick.of(state.at)
                if beyond(there, here, own).any() or not self._passes(there, here, own):
                    break
            else:
                return other
        return ""

    def _explain(self, reference: Reference, state: _State, own: Errors) -> list[Finding]:
        """Name what a wrong state is, if it is something that was computed here."""
        match, name = state.match, state.name
        index = (state.sample.source_index,)
        if match.is_elsewhere:
            kind, what = self._elsewhere(name, match)
            return [damage(kind, what, name, samples=index)]
        other = self._other_sample(state)
        if other is not None:
            return [damage("sample", f"holds the rows of sample {other}", name, samples=index)]
        good = ~state.beyond
        if state.found.zeros.all():
            return [damage("rows", "all rows are zeros", name, samples=index)]
        rest = state.found.of(good)
        if state.beyond.any() and good.any() and self._passes(rest, state.yardstick.of(good), own):
            return self._rows(reference, state, own)
        if self._is_scaled(state, own):
            own_scale, shared = state.found.scale, self._scales[name]
            return [_scale(name, shared if abs(shared - own_scale) <= SCALE_BOUND else own_scale, index)]
        return [self._near(state)]

    def _rows(self, reference: Reference, state: _State, own: Errors) -> list[Finding]:
        """The wrong rows of a sample whose other rows are right."""
        ids = state.sample.input_ids
        wrong = wrong_rows.Wrong(
            state=state.name,
            place=self._place[state.name],
            sample=state.sample.source_index,
            stored=state.sample.values(state.name),
            reference=state.reference,
            others={
                s.sample.source_index: s.reference for s in self._states if s.name == state.name and s is not state
            },
            at=np.flatnonzero(state.beyond),
        )
        named = wrong_rows.name(wrong, lambda rows: reference.forward(ids, (), rows).some)
        findings, unknown = list(named.findings), named.unknown
        if len(unknown):
            routed = reference.is_routed and not self._float32
            share, most = _UNEXPLAINED, float(own.rows.max())
            if routed:
                share, most = _ROUTED, max(most, _ROUTED_ERROR)
            few = len(unknown) <= max(1, share * state.sample.n_tokens)
            if few and state.found.rows[unknown].max() <= most:
                why = "as if routed to other experts" if routed else "no more than transformers' own bfloat16 elsewhere"
                what = f"more than usual off in {wrong_rows.ranges(unknown.tolist())}, {why}"
                findings.append(note("undecided", what, state.name, samples=(wrong.sample,)))
            else:
                findings.append(wrong_rows.nothing_known(wrong, unknown))
        return findings

    def _together(self, name: str, states: list[_State], found: Errors, own: Errors) -> list[Finding]:
        """All samples are wrong together, though none of them is by itself."""
        if within(found, bounds([own], float32=self._float32)):
            return [_scale(name, found.scale, tuple(s.sample.source_index for s in states))]
        return [self._near(state) for state in states]

    def _is_scaled(self, state: _State, own: Errors) -> bool:
        """All rows times one number."""
        scale = state.found.scale
        if abs(scale - 1) <= scale_bound(state.yardstick) or abs(scale) < SCALE_BOUND:
            return False
        stored = state.sample.values(state.name) / np.float32(scale)
        return within(errors(stored, state.reference), bounds([state.yardstick, own], float32=self._float32))

    def _near(self, state: _State) -> Finding:
        if state.match.here < _NAMED:
            what = "is near what this model gives, not equal: other weights, another revision, or another dtype"
        else:
            what = "is nothing that this model gives for these ids, at any layer: another model, ids or sample"
        return damage("weights", what, state.name, samples=(state.sample.source_index,))

    def _elsewhere(self, name: str, match: _Match) -> tuple[str, str]:
        place = self._place[name]
        moved = f"rows are {words(match.shift)}" if match.shift else ""
        if match.layer == place:
            return "shift", moved
        also = f"; {moved}" if moved else ""
        if name == "final" and match.layer == NORMED_TWICE:
            return "norm", f"the norm was applied to final more than once{also}"
        if name == "final" and match.layer in ("final", self._last):
            side = "after" if match.layer == "final" else "before"
            return "norm", f"final is {side} the norm though the capture says {self._capture.norm}{also}"
        return "layer", f"{name} holds what {match.layer} should be{also}"

    def _other_sample(self, state: _State) -> int | None:
        """The checked sample whose states these rows are, behind the ids that both begin with."""
        stored, best = state.sample.values(state.name), (state.match.here, -1)
        for other in self._states:
            if other.name != state.name or other.sample is state.sample:
                continue
            start = first_difference(state.sample.input_ids, other.sample.input_ids)
            n = min(state.sample.n_tokens, other.sample.n_tokens)
            if n - start < 1:
                continue
            rows = start + spread(n - start, _SOME)
            error = _median(stored[rows], other.reference[rows])
            own = _median(stored[rows], state.reference[rows])
            if error < _NAMED * own and error < min(best[0] or _NAMED, _NAMED):
                best = (error, other.sample.source_index)
        return None if best[1] < 0 else best[1]


def _k(name: str) -> int:
    return int(name.removeprefix("after_"))


def _scale(state: str, scale: float, samples: tuple[int, ...]) -> Finding:
    what = f"is {scale:.4f} times what this model gives: a scale of the checkpoint or of the engine is another one"
    return damage("scale", what, state, samples=samples)


def _beside(place: str) -> set[str]:
    """The layers before and behind; none of `final`, which is behind a norm."""
    return set() if place == "final" else {f"after_{_k(place) + by}" for by in (-1, 1)}


def _some_rows(n_tokens: int) -> Indexes:
    """Rows to compare with every layer; the first two, whose outliers are alike in many layers, only without others."""
    skip = 2 if n_tokens > 4 else 0
    return skip + spread(n_tokens - skip, _SOME)


def _median(stored: Values, reference: Values) -> float:
    return float(np.median(errors(stored, reference).rows))
