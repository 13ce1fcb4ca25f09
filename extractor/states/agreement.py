"""Does the verifier's head, on the stored final states, predict the next token? Under the declared norm and the others.

A row at t predicts token t+1. What finds nearly every mistake: the declared side of the norm must do better than the
other ones and than chance, the rows where they lie better than moved ones, and a sample's own rows better than those of
its neighbours. Leaves the head's arithmetic to `head`, the verdict over random weights to `check`.

Letters: T tokens of a sample, N positions, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from extractor.foreign.finalnorm import FinalNorm
from extractor.foreign.sample import Norm, Rows
from extractor.states import doubt
from extractor.states.doubt import FEW, Hits, Ids, Nats
from extractor.states.finding import Finding, damage
from extractor.states.head import Head
from extractor.states.sample import Checked, first_difference, spread
from hsstore.statistics import to_float32

SHIFTS = (-2, -1, 1, 2)
_RENUMBERED = 0.2
# Mean probability of the predicted token: random weights give a few times 1/V, real ones some percent even where the
# ids mean nothing to them.
_FLAT, _FLAT_TIMES = 0.005, 4

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
    surprise: Nats
    """[N] see `Predictions`."""

    @property
    def after(self) -> Ids:
        """[N] the tokens that follow."""
        return self.sample.input_ids[self.positions + 1].astype(np.int64)

    @property
    def hits(self) -> int:
        return int((self.tokens == self.after).sum())

    def late(self) -> Asked:
        """Its second half: a resumed prefill, or a copied row too many, spoils only that."""
        half = slice(len(self.positions) // 2, None)
        return replace(self, positions=self.positions[half], tokens=self.tokens[half], surprise=self.surprise[half])

    def against(self, ids: npt.NDArray[np.int32], first: int) -> Hits:
        """Whether the predictions are the tokens of another sample, from token `first` on."""
        at = self.positions + 1
        inside = (at >= first) & (at < len(ids))
        right: Hits = self.tokens[inside] == ids[at[inside]]
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
    vocabulary: int
    left_out: tuple[int, ...]
    """Samples without such a token."""
    losses: tuple[str, ...]
    """Readings that do significantly better than the declared one."""

    @property
    def declared(self) -> float:
        return next(iter(self.rates.values()))

    @property
    def at_chance(self) -> bool:
        return all(doubt.at_chance(rate * self.n, self.n, self.chance) for rate in self.rates.values())

    @property
    def is_flat(self) -> bool:
        """Whether the head is not sure of anything."""
        return self.confidence < max(_FLAT, _FLAT_TIMES / self.vocabulary)

    @property
    def is_hopeless(self) -> bool:
        """Whether the rows, or the ids, are clearly not what this head expects."""
        tokens, after = self._pairs()
        surprise = np.concatenate([a.surprise for a in self.asked])
        return not self.is_flat and doubt.hopeless(tokens == after, surprise, after, self.chance)

    @property
    def is_decided(self) -> bool:
        return self.n >= FEW and (not self.at_chance or self.is_hopeless)

    @property
    def undecided(self) -> str:
        """Why the head cannot tell, "" when it can."""
        if self.is_decided:
            return ""
        if self.n < FEW:
            return f"only {self.n} {self.over} to predict: they decide nothing about chance"
        what = f"{self.n} {self.over}: {self.declared:.1%}, chance {self.chance:.1%}"
        if self.is_flat:
            return f"the head predicts nothing ({what}), and is not sure of anything: random weights"
        return f"the head predicts no more than chance ({what}), as it expects: nobody can predict such tokens"

    def renumbered(self) -> float:
        return doubt.renumbered(*self._pairs())

    def _pairs(self) -> tuple[Ids, Ids]:
        return np.concatenate([a.tokens for a in self.asked]), np.concatenate([a.after for a in self.asked])


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
    after = np.concatenate([s.input_ids[positions[s.source_index] + 1] for s in chosen]).astype(np.int64)
    said = head.predict(
        torch.from_numpy(np.concatenate(list(readings.values()))), torch.from_numpy(np.tile(after, len(readings)))
    )
    tokens = {name: said.tokens[i * n : (i + 1) * n] for i, name in enumerate(readings)}
    right = {name: found == after for name, found in tokens.items()}
    first = next(iter(tokens))
    ends = np.cumsum([len(positions[s.source_index]) for s in chosen])
    pieces, surprises = np.split(tokens[first], ends[:-1]), np.split(said.surprise[:n], ends[:-1])
    return Agreement(
        n=n,
        over=over,
        rates={name: float(hit.mean()) for name, hit in right.items()},
        chance=doubt.chance_of(tokens[first], after),
        confidence=float(said.confidence[:n].mean()),
        asked=tuple(
            Asked(sample=s, positions=positions[s.source_index], tokens=piece, surprise=nats)
            for s, piece, nats in zip(chosen, pieces, surprises, strict=True)
        ),
        vocabulary=head.weight.shape[0],
        left_out=tuple(s.source_index for s in samples if not len(positions[s.source_index])),
        losses=tuple(name for name, hit in right.items() if doubt.better(hit, right[first])),
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


def judge(found: Agreement, declared: Norm, neighbours: Neighbours) -> list[Finding]:
    """What is wrong by the head alone; what it cannot tell, `Agreement.undecided` says."""
    if found.is_flat:
        return []
    if moved := _moved(found.asked, found.chance):
        return [damage("shift", f"rows are {words(moved)}", "final")]
    if found.losses and not found.at_chance:
        best = max(found.losses, key=lambda name: found.rates[name])
        return [damage("norm", f"{_NORM_WORDS[declared, best]}: {_against(found, best)}", "final")]
    if found.at_chance:
        owned = [o for a in found.asked if (o := _owned(a, found.chance, neighbours))]
        return owned or ([_by_chance(found)] if found.is_hopeless else [])
    return [f for asked in found.asked for f in _one_sample(found, asked, neighbours)]


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


def _moved(several: Sequence[Asked], chance: float) -> int:
    """By how many tokens the rows are off, 0 when where they lie is best, or moved ones are no better than chance."""
    best, most = 0, 0
    for shift in SHIFTS:
        there, here = [], []
        for a in several:
            at = a.positions + 1 + shift
            inside = (at >= 0) & (at < a.sample.n_tokens)
            there.append(a.tokens[inside] == a.sample.input_ids[at[inside]])
            here.append(a.tokens[inside] == a.sample.input_ids[a.positions[inside] + 1])
        one, two = np.concatenate(there), np.concatenate(here)
        hits = int(one.sum())
        if hits > most and doubt.better(one, two) and not doubt.at_chance(hits, len(one), chance):
            best, most = shift, hits
    return best


def _one_sample(found: Agreement, asked: Asked, neighbours: Neighbours) -> Iterator[Finding]:
    """A sample, or its second half, that does far worse than all else: whose rows does it hold?"""
    for part, where in ((asked, ""), (asked.late(), "from its middle on ")):
        n, others = len(part.positions), found.n - len(part.positions)
        if n < FEW // 2 or others < FEW or not doubt.at_chance(part.hits, n, found.chance):
            continue
        rest = (found.declared * found.n - part.hits) / others
        if rest < 0.1 or doubt.at_chance(n * rest, n, found.chance):
            continue
        own = (asked.sample.source_index,)
        if moved := _moved([part], found.chance):
            yield damage("shift", f"{where}rows are {words(moved)}", "final", samples=own)
        elif owned := _owned(part, found.chance, neighbours):
            yield replace(owned, detail=f"{where}{owned.detail}")
        elif doubt.unexpected(part.surprise):
            detail = (
                f"{where}the head predicts {part.hits / n:.1%} of its {found.over}, no better than chance and far less"
                f" than it expects, and {rest:.1%} of all others: rows of another sample"
            )
            yield damage("agreement", detail, "final", samples=own)
        else:
            continue
        return


def _owned(asked: Asked, chance: float, neighbours: Neighbours) -> Finding | None:
    """Names the sample whose tokens the rows predict, among those that lie near."""
    best: tuple[int, int | None] = (asked.hits, None)
    for index, ids in neighbours(asked.sample).items():
        if index == asked.sample.source_index:
            continue
        right = asked.against(ids, first_difference(asked.sample.input_ids, ids))
        n, hits = len(right), int(right.sum())
        if n >= FEW // 2 and hits > best[0] and not doubt.at_chance(hits / 2, n, chance):
            best = (hits, index)
    if best[1] is None:
        return None
    return damage("sample", f"holds the rows of sample {best[1]}", "final", samples=(asked.sample.source_index,))


def _by_chance(found: Agreement) -> Finding:
    rates = ", ".join(f"{name} {rate:.1%}" for name, rate in found.rates.items())
    base = f"the head predicts no more of {found.n} {found.over} than chance, {found.chance:.1%} ({rates})"
    if (share := found.renumbered()) >= _RENUMBERED:
        how = f"its predictions follow the ids under another numbering ({share:.0%} of them beyond chance)"
        return damage("tokenizer", f"{base}; {how}: the ids are of another tokenizer", "final")
    return damage("agreement", f"{base}: ids of another tokenizer, states of another model, or a wrong mask", "final")
