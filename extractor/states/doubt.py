"""How sure is a figure of the head's predictions: chance, significance, and what the head itself expected.

A rate at chance is no fault where nobody could predict: random digits, an identifier, a loop. There the true token is
about as likely as the head's own entropy says. Where rows and ids do not belong together it is some nats less likely,
for the head is sure of something else. On SmolLM2 texts as hard as random letters and random Chinese are 1.6 nats off,
digits and identifiers 0.1; shifted rows 6 to 12, ids of another numbering 3 to 5.

Letters: N positions.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

FEW = 32  # positions; fewer decide nothing about chance
_MANY = 64  # positions; fewer are no proof that the ids mean nothing to the model
_SIGMAS = 3.0
_NATS = 2.5
_LOWEST, _TIMES = 0.05, 3
_MOST_CHANCE, _DISTINCT = 0.5, 8

Ids = npt.NDArray[np.int64]
Hits = npt.NDArray[np.bool_]
Nats = npt.NDArray[np.float32]


def at_chance(hits: float, n: int, chance: float) -> bool:
    return hits <= n * chance + _SIGMAS * math.sqrt(n * chance * (1 - chance)) + 1


def better(one: Hits, two: Hits) -> bool:
    """Whether the first is right significantly more often where the two differ (a sign test)."""
    more, less = int((one & ~two).sum()), int((two & ~one).sum())
    return more - less > _SIGMAS * math.sqrt(more + less)


def unexpected(surprise: Nats) -> bool:
    """Whether the true tokens are clearly less likely than the head's own doubt allows."""
    n = len(surprise)
    return n > 1 and float(surprise.mean()) - _SIGMAS * float(surprise.std()) / math.sqrt(n) > _NATS


def hopeless(hits: Hits, surprise: Nats, after: Ids, chance: float) -> bool:
    """Whether these rows and tokens clearly do not belong together: neither rate nor likelihood leaves room."""
    if len(hits) < _MANY or chance > _MOST_CHANCE or len(np.unique(after)) < _DISTINCT:
        return False
    return float(hits.mean()) < max(_TIMES * chance, _LOWEST) and unexpected(surprise)


def chance_of(tokens: Ids, after: Ids) -> float:
    """What predictions and tokens of these frequencies would share if they had nothing to do with each other."""
    values, counts = np.unique(after, return_counts=True)
    frequency = dict(zip(values.tolist(), (counts / len(after)).tolist(), strict=True))
    said, times = np.unique(tokens, return_counts=True)
    return float(
        sum(frequency.get(v, 0.0) * n / len(tokens) for v, n in zip(said.tolist(), times.tolist(), strict=True))
    )


def renumbered(tokens: Ids, after: Ids) -> float:
    """How far each id goes with one predicted token, whichever, beyond what shuffled pairs show; 0 to 1."""
    shuffled = np.random.default_rng(0).permutation(tokens)
    return _purity(tokens, after) - _purity(shuffled, after)


def _purity(tokens: Ids, after: Ids) -> float:
    """Share of the pairs that have their id's most frequent partner, over ids that occur four times or more."""
    values, counts = np.unique(after, return_counts=True)
    pure = total = 0
    for value in values[counts >= 4]:
        partners = np.unique(tokens[after == value], return_counts=True)[1]
        pure, total = pure + int(partners.max()), total + int(partners.sum())
    return pure / total if total >= FEW else 0.0
