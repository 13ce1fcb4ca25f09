"""Does the verifier's head, on the stored final states, predict the next token? Under the declared norm and the others.

A row at t predicts token t+1. What finds nearly every mistake: the declared side of the norm must do better than the
other ones and than chance, the rows where they lie better than moved ones, and a sample's own rows better than those of
its neighbours. Leaves the head's arithmetic to `head`, the verdict over random weights to `check`.

Letters: T tokens of a sample, N positions, H hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from extractor.foreign.finalnorm import FinalNorm
from extractor.foreign.sample import Norm, Rows
from extractor.states.finding import Finding, damage, note
from extractor.states.head import Head
from extractor.states.sample import Checked, first_difference, spread
from hsstore.statistics import to_float32

SHIFTS = (-2, -1, 1, 2)
_FEW = 32  # positions; fewer decide nothing about chance
_SIGMAS = 3.0
_RENUMBERED = 0.2

Ids = npt.NDArray[np.int64]
Neighbours = Callable[[Checked], Mapping[int, npt.NDArray[np.int32]]]
"""Ids of the samples that lie near one, by source_index."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The positions of one sample whose next token is compared."""

    sample: Checked
    positions: Ids
    """[N] t, at most T-2."""
    tokens: Ids
    """[N] what the head says on the stored rows as declared."""

    @property
    def hits(self) -> int:
        return int((self.tokens == self.sample.input_ids[self.positions + 1]).sum())

    def against(self, ids: npt.NDArray[np.int32], first: int) -> npt.NDArray[np.bool_]:
        """Whether the predictions are the tokens of another sample, from token `first` on."""
        at = self.positions + 1
        inside = (at >= first) & (at < len(ids))
        right: npt.NDArray[np.bool_] = self.tokens[inside] == ids[at[inside]]
        return right


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """What the head says, over all samples."""

    n: int
    over: str
    """`assistant tokens`, or `tokens` where no sample has any of those."""
    rates: dict[str, float]
    """Share of right predictions by how `final` was read; the declared reading first."""
    chance: float
    """What predictions and tokens of these frequencies would share if they had nothing to do with each other."""
    confidence: float
    """Mean probability of the predicted token."""
    asked: tuple[Asked, ...]
    left_out: tuple[int, ...]
    """Samples without such a token."""
    losses: tuple[str, ...]
    """Readings that do significantly better than the declared one."""

    @property
    def declared(self) -> float:
        return next(iter(self.rates.values()))

    @property
    def is_decided(self) -> bool:
        return self.n >= _FEW

    @property
    def at_chance(self) -> bool:
        return all(_at_chance(rate * self.n, self.n, self.chance) for rate in self.rates.values())


def _at_chance(hits: float, n: int, chance: float) -> bool:
    return hits <= n * chance + _SIGMAS * math.sqrt(n * chance * (1 - chance)) + 1


def _better(one: npt.NDArray[np.bool_], two: npt.NDArray[np.bool_]) -> bool:
    """Whether the first is right significantly more often where the two differ (a sign test)."""
    more, less = int((one & ~two).sum()), int((two & ~one).sum())
    return more - less > _SIGMAS * math.sqrt(more + less)


def positions_of(samples: Sequence[Checked], most: int) -> tuple[str, dict[int, Ids]]:
    """t of each sample where token t+1 is an assistant's; of any token when no sample has one of those."""
    marked = {s.source_index: np.flatnonzero(s.loss_mask[1:]) for s in samples}
    over = "assistant tokens"
    if not any(len(found) for found in marked.values()):
        over, marked = "tokens", {s.source_index: np.arange(s.n_tokens - 1) for s in samples}
    return over, {i: found[spread(len(found), most)].astype(np.int64) for i, found in marked.items()}


def ask(samples: Sequence[Checked], head: Head, norm: FinalNorm | None, declared: Norm, most: int) -> Agreement | None:
    """Ask the head about at most `most` positions of each sample. None when there is no next token at all.

    Raises `UsageError` when `final` is before a norm that is not known.
    """
    import torch

    over, positions = positions_of(samples, most)
    chosen = [s for s in samples if len(positions[s.source_index])]
    if not chosen:
        return None
    rows = np.concatenate([s.states["final"][positions[s.source_index]] for s in chosen])
    readings = dict(_readings(rows, norm, declared))
    n = len(rows)
    said = head.predict(torch.from_numpy(np.concatenate(list(readings.values()))))
    tokens = {name: said.tokens[i * n : (i + 1) * n] for i, name in enumerate(readings)}
    after = np.concatenate([s.input_ids[positions[s.source_index] + 1] for s in chosen]).astype(np.int64)
    right = {name: found == after for name, found in tokens.items()}
    first = next(iter(tokens))
    ends = np.cumsum([len(positions[s.source_index]) for s in chosen])
    pieces = np.split(tokens[first], ends[:-1])
    return Agreement(
        n=n,
        over=over,
        rates={name: float(hit.mean()) for name, hit in right.items()},
        chance=_chance(tokens[first], after),
        confidence=float(said.confidence[:n].mean()),
        asked=tuple(
            Asked(sample=s, positions=positions[s.source_index], tokens=piece)
            for s, piece in zip(chosen, pieces, strict=True)
        ),
        left_out=tuple(s.source_index for s in samples if not len(positions[s.source_index])),
        losses=tuple(name for name, hit in right.items() if _better(hit, right[first])),
    )


ONCE, AGAIN, UNDONE, BARE = "as it is", "norm applied again", "norm undone", "norm not applied"
APPLIED = "norm applied"


def _readings(rows: Rows, norm: FinalNorm | None, declared: Norm) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
    """What the head may be given, the declared reading first."""
    plain = to_float32(rows)
    if declared == "pre":
        assert norm is not None
        yield APPLIED, to_float32(norm.apply(rows))
        yield BARE, plain
        return
    yield ONCE, plain
    if norm is not None:
        yield AGAIN, to_float32(norm.apply(rows))
        # A norm that was applied twice cannot be taken back but for each row's length, which no argmax sees.
        weight = norm.weight.numpy()
        yield UNDONE, plain / np.where(weight == 0, 1, weight)


def _chance(tokens: Ids, after: Ids) -> float:
    values, counts = np.unique(after, return_counts=True)
    frequency = dict(zip(values.tolist(), (counts / len(after)).tolist(), strict=True))
    said, times = np.unique(tokens, return_counts=True)
    return float(
        sum(frequency.get(v, 0.0) * n / len(tokens) for v, n in zip(said.tolist(), times.tolist(), strict=True))
    )


def judge(found: Agreement, declared: Norm, neighbours: Neighbours) -> list[Finding]:
    """What is wrong by the head alone. Whether being at chance counts, `check` decides."""
    out = []
    if moved := _moved(found.asked):
        out.append(damage("shift", f"rows are {words(moved)}", "final"))
    elif found.losses:
        best = max(found.losses, key=lambda name: found.rates[name])
        out.append(damage("norm", f"{_NORM_WORDS[declared, best]}: {_against(found, best)}", "final"))
    elif found.at_chance and found.is_decided:
        out += [o for a in found.asked if (o := _owned(a, found.chance, neighbours))] or [_by_chance(found)]
    else:
        for asked in found.asked:
            out += _one_sample(found, asked, neighbours)
    if not found.is_decided:
        few = f"only {found.n} {found.over} to predict: they decide nothing about chance"
        out.append(note("undecided", few, "final"))
    return out


_NORM_WORDS = {
    ("post", AGAIN): "final is before the norm though the capture says post",
    ("post", UNDONE): "the norm was applied to final more than once",
    ("pre", BARE): "final is after the norm though the capture says pre",
}


def _against(found: Agreement, best: str) -> str:
    return f"{best} {found.rates[best]:.1%} of {found.n} {found.over} are predicted, as declared {found.declared:.1%}"


def words(shift: int) -> str:
    """`shifted by one`: row t holds the state of the token before."""
    many = {1: "one", 2: "two"}.get(abs(shift), str(abs(shift)))
    which = "a later" if shift > 0 else "an earlier"
    return f"shifted by {many}: each row holds the state of {which} token"


def _moved(several: Sequence[Asked]) -> int:
    """By how many tokens the rows are off, 0 when where they lie is best."""
    best, most = 0, 0
    for shift in SHIFTS:
        there, here = [], []
        for a in several:
            at = a.positions + 1 + shift
            inside = (at >= 0) & (at < a.sample.n_tokens)
            there.append(a.tokens[inside] == a.sample.input_ids[at[inside]])
            here.append(a.tokens[inside] == a.sample.input_ids[a.positions[inside] + 1])
        one, two = np.concatenate(there), np.concatenate(here)
        if _better(one, two) and int(one.sum()) > most:
            best, most = shift, int(one.sum())
    return best


def _one_sample(found: Agreement, asked: Asked, neighbours: Neighbours) -> Iterator[Finding]:
    """A sample that does far worse than the others: whose rows does it hold?"""
    n, others = len(asked.positions), found.n - len(asked.positions)
    if n < _FEW // 2 or others < _FEW or not _at_chance(asked.hits, n, found.chance):
        return
    rest = (found.declared * found.n - asked.hits) / others
    if rest < 0.1 or _at_chance(n * rest, n, found.chance):
        return
    own = (asked.sample.source_index,)
    if moved := _moved([asked]):
        yield damage("shift", f"rows are {words(moved)}", "final", samples=own)
    elif owned := _owned(asked, found.chance, neighbours):
        yield owned
    else:
        detail = (
            f"the head predicts {asked.hits / n:.1%} of its {found.over}, no better than chance, and {rest:.1%} of the"
            " other samples': rows of another sample, or text that no model predicts"
        )
        yield damage("agreement", detail, "final", samples=own)


def _owned(asked: Asked, chance: float, neighbours: Neighbours) -> Finding | None:
    """Names the sample whose tokens the rows predict, among those that lie near."""
    best: tuple[int, int | None] = (asked.hits, None)
    for index, ids in neighbours(asked.sample).items():
        if index == asked.sample.source_index:
            continue
        right = asked.against(ids, first_difference(asked.sample.input_ids, ids))
        n, hits = len(right), int(right.sum())
        if n >= _FEW // 2 and hits > best[0] and not _at_chance(hits / 2, n, chance):
            best = (hits, index)
    if best[1] is None:
        return None
    return damage("sample", f"holds the rows of sample {best[1]}", "final", samples=(asked.sample.source_index,))


def _by_chance(found: Agreement) -> Finding:
    rates = ", ".join(f"{name} {rate:.1%}" for name, rate in found.rates.items())
    base = f"the head predicts no more of {found.n} {found.over} than chance, {found.chance:.1%} ({rates})"
    if (share := renumbered(found)) >= _RENUMBERED:
        how = f"its predictions follow the ids under another numbering ({share:.0%} of them beyond chance)"
        return damage("tokenizer", f"{base}; {how}: the ids are of another tokenizer", "final")
    return damage("agreement", f"{base}: ids of another tokenizer, states of another model, or a wrong mask", "final")


def renumbered(found: Agreement) -> float:
    """How far each id goes with one predicted token, whichever, beyond what shuffled pairs show; 0 to 1."""
    tokens = np.concatenate([a.tokens for a in found.asked])
    after = np.concatenate([a.sample.input_ids[a.positions + 1] for a in found.asked]).astype(np.int64)
    shuffled = np.random.default_rng(0).permutation(tokens)
    return _purity(tokens, after) - _purity(shuffled, after)


def _purity(tokens: Ids, after: Ids) -> float:
    """Share of the pairs that have their id's most frequent partner, over ids that occur four times or more."""
    values, counts = np.unique(after, return_counts=True)
    pure = total = 0
    for value in values[counts >= 4]:
        partners = np.unique(tokens[after == value], return_counts=True)[1]
        pure, total = pure + int(partners.max()), total + int(partners.sum())
    return pure / total if total >= _FEW else 0.0
