"""How tokens are drawn: by the right chances, and without a look at the neighbours."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest

from extractor.generate.settings import Sampling
from extractor.generate.sources.transformers import draw, first_stop

CHANCES = [0.05, 0.4, 0.25, 0.0, 0.3]


def sampling(**options: Any) -> Sampling:
    plain = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_new_tokens": 1, "seed": 0, "stop": ()}
    return Sampling(**{**plain, **options})


def drawn(how: Sampling, n: int = 4000) -> dict[int, float]:
    import torch

    scores = torch.tensor([math.log(p) if p else -math.inf for p in CHANCES]).expand(n, -1)
    uniform = torch.tensor(np.random.default_rng(5).random(n))[:, None]
    found = Counter(draw(scores, uniform, how).flatten().tolist())
    return {token: count / n for token, count in found.items()}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {0: 0.05, 1: 0.4, 2: 0.25, 4: 0.3}),
        ({"top_k": 2}, {1: 4 / 7, 4: 3 / 7}),
        ({"top_k": 1}, {1: 1.0}),
        ({"top_p": 0.5}, {1: 4 / 7, 4: 3 / 7}),
        ({"top_p": 0.39}, {1: 1.0}),
        ({"top_p": 0.96, "top_k": 4}, {0: 0.05, 1: 0.4, 2: 0.25, 4: 0.3}),
        ({"temperature": 0.5}, {0: 0.0025 / 0.315, 1: 0.16 / 0.315, 2: 0.0625 / 0.315, 4: 0.09 / 0.315}),
    ],
)
def test_tokens_come_with_their_chances(options: dict[str, Any], expected: dict[int, float]) -> None:
    """A drafter trained on words that are too likely, or too rare, guesses worse."""
    found = drawn(sampling(**options))
    assert set(found) == set(expected)
    assert all(abs(found[token] - chance) < 0.03 for token, chance in expected.items())


def test_the_ends_of_the_line_are_possible_tokens() -> None:
    """Rounding at 0 and just below 1 must not draw what has no chance."""
    import torch

    scores = torch.tensor([[-math.inf, 0.0, 0.0, -math.inf]] * 2)
    for how in (sampling(), sampling(top_k=3), sampling(top_p=0.99)):
        found = draw(scores, torch.tensor([[0.0], [1.0 - 2**-53]], dtype=torch.float64), how)
        assert set(found.flatten().tolist()) == {1, 2}


def test_a_row_knows_nothing_of_its_neighbours() -> None:
    import torch

    generator = torch.Generator().manual_seed(1)
    scores = torch.randn((16, 300), generator=generator)
    uniform = torch.rand((16, 1), generator=generator, dtype=torch.float64)
    how = sampling(top_p=0.9, top_k=50)
    together = draw(scores, uniform, how)
    alone = [draw(scores[i : i + 1], uniform[i : i + 1], how) for i in range(16)]
    assert torch.equal(together, torch.cat(alone))
    assert len(set(together.flatten().tolist())) > 8


def test_a_flat_distribution_needs_more_than_the_first_candidates() -> None:
    """top_p of chances that are all alike is a share of the whole vocabulary."""
    import torch

    uniform = torch.linspace(0, 1 - 1e-9, 500, dtype=torch.float64)[:, None]
    found = draw(torch.zeros(500, 4000), uniform, sampling(top_p=0.9)).flatten().tolist()
    assert len(set(found)) == 500


def test_the_first_stop_string_counts() -> None:
    assert first_stop("one two three", ["three", "two"]) == 4
    assert first_stop("one", ["two"]) is None
