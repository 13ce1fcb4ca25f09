"""The bounds of options, in the words of the command line."""

from __future__ import annotations

from typing import Any

import pytest

from hsstore.errors import UsageError
from trainer.options import TrainOptions


def options(**changes: Any) -> TrainOptions:
    return TrainOptions(source="store", verifier="model", out="run", **changes)


def test_the_defaults_are_the_origin_runs() -> None:
    o = options()
    assert (o.max_seq_len, o.lr, o.epochs, o.ttt_steps, o.noise_std, o.num_workers) == (4096, 3e-5, 5, 3, 0.05, 4)
    assert (o.draft_vocab, o.grad_clip, o.train_head, o.ttt_decay) == (32000, 1.0, True, 1.0)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"lr": 0.0}, "--lr is 0.0"),
        ({"lr": float("nan")}, "--lr is nan"),
        ({"epochs": 0}, "--epochs is 0, expected at least 1"),
        ({"max_steps": 0}, "--max-steps is 0"),
        ({"noise_std": -0.1}, "--noise-std is -0.1"),
        ({"noise_std": float("nan")}, "--noise-std is nan"),
        ({"num_workers": -1}, "--num-workers is -1"),
        ({"ttt_decay": 1.5}, "--ttt-decay is 1.5"),
        ({"max_seq_len": 3}, "leaves no rows"),
        ({"keep": 0}, "--keep is 0"),
        ({"lr": float("inf")}, "--lr is inf"),
        ({"noise_std": float("inf")}, "--noise-std is inf"),
        ({"draft_vocab": 1}, "--draft-vocab is 1, expected at least 2, or 0"),
        ({"draft_vocab": -1}, "--draft-vocab is -1"),
        ({"epochs": 100_001}, "--epochs is 100001, expected at most 100000"),
    ],
)
def test_a_value_out_of_bounds_is_named(change: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        options(**change)
    assert said in caught.value.message
