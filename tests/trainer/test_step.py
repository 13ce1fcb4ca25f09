"""The law of the token mean: W ranks learn what one rank would learn from all their rows together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from tests.trainer.test_data import batch_of
from tests.trainer.tiny import HIDDEN, VOCAB, write_verifier
from trainer.data import HostBatch, RowBuffers, RowLayout, empty, fill
from trainer.drafter import DrafterOptions, build_drafter, forward
from trainer.step import as_floats, rank_weight
from trainer.verifier import load_verifier
from trainer.vocabulary import build_vocabulary

# speculators pulls in extensions made with an old SWIG; nothing of ours.
pytestmark = pytest.mark.filterwarnings("ignore:builtin type .* has no __module__ attribute:DeprecationWarning")

K = 3
OPTIONS = DrafterOptions(layers=(2, 4), norm="post", draft_vocab_size=20, ttt_steps=K, compute_dtype="float32")
LAYOUT = RowLayout(max_rows=256, layers=("after_2", "after_4"), hidden_size=HIDDEN, guard_rows=K - 1, fixed=False)
LENGTHS = [[30, 12, 9], [25], [40, 3, 2]]


@dataclass
class Drafter:
    """A fresh drafter and its gradients."""

    model: torch.nn.Module

    def gradients(self, loss: torch.Tensor) -> list[torch.Tensor]:
        self.model.zero_grad()
        loss.backward()
        return [p.grad.clone() for p in self.model.parameters() if p.grad is not None]


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Drafter:
    directory = tmp_path_factory.mktemp("verifier")
    write_verifier(directory)
    vocabulary = build_vocabulary(np.arange(VOCAB), 20)
    return Drafter(build_drafter(load_verifier(directory), vocabulary, OPTIONS, seed=1))


def bins() -> list[dict[str, np.ndarray]]:
    """Three bins with very different numbers of counted rows, and trained tokens from the first one on."""
    made = []
    for i, lengths in enumerate(LENGTHS):
        batch = _wide(batch_of(lengths, seed=i))
        batch["input_ids"] %= VOCAB
        batch["loss_mask"] = (np.random.default_rng(i).random(sum(lengths)) < (0.9, 0.2, 0.6)[i]).astype(np.uint8)
        batch["loss_mask"][:3] = 1
        made.append(batch)
    return made


def _wide(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    wide = {k: v for k, v in batch.items() if not k.startswith("hidden.")}
    for name in ("after_2", "after_4", "final"):
        source = batch["hidden.after_3" if name == "after_4" else f"hidden.{name}"]
        wide[f"hidden.{name}"] = np.concatenate([source, source], axis=1)
    return wide


def _joined(parts: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    names = parts[0].keys() - {"cu_seqlens"}
    whole = {name: np.concatenate([p[name] for p in parts]) for name in names}
    lengths = np.concatenate([np.diff(p["cu_seqlens"]) for p in parts])
    return {**whole, "cu_seqlens": np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)}


def made(batch: dict[str, np.ndarray]) -> HostBatch:
    return fill(batch, LAYOUT, RowBuffers.allocate(LAYOUT, pinned=False), None)


def run(drafter: Drafter, batch: HostBatch) -> tuple[torch.Tensor, dict[str, Any]]:
    loss, pairs = forward(drafter.model, batch.tensors, OPTIONS)
    return loss, as_floats(pairs)


def mean_of_ranks(drafter: Drafter, batches: list[HostBatch], weight: Callable[[HostBatch], float]) -> list[Any]:
    """What DDP leaves on every rank: the mean over ranks of each one's gradient."""
    parts = [drafter.gradients(run(drafter, b)[0] * weight(b)) for b in batches]
    return [torch.stack(list(same)).mean(0) for same in zip(*parts, strict=True)]


def test_three_ranks_learn_what_one_learns_from_all_rows(drafter: Drafter) -> None:
    batches = [made(b) for b in bins()]
    counted = sum(b.n_counted for b in batches)
    whole = made(_joined(bins()))
    assert whole.n_counted == counted
    assert len({b.n_counted for b in batches}) == 3, "equal counts would prove nothing"
    # one rank with everything, by the same rule: its own mean, freed of the library's epsilon
    expected = drafter.gradients(run(drafter, whole)[0] * rank_weight(counted, counted, 1))
    got = mean_of_ranks(drafter, batches, lambda b: rank_weight(b.n_counted, counted, len(batches)))
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    plain = mean_of_ranks(drafter, batches, lambda b: 1.0)
    assert any(not torch.allclose(a, b, rtol=1e-2) for a, b in zip(plain, expected, strict=True)), (
        "without the weights DDP's mean of means is another gradient"
    )


def test_a_rank_without_a_bin_changes_nothing(drafter: Drafter) -> None:
    """The last step of an epoch has fewer bins than ranks; the mean must not be thinned by the missing ones."""
    batches = [made(b) for b in bins()]
    counted = sum(b.n_counted for b in batches)
    three = mean_of_ranks(drafter, batches, lambda b: rank_weight(b.n_counted, counted, 3))
    batches.append(empty(LAYOUT, RowBuffers.allocate(LAYOUT, pinned=False)))
    four = mean_of_ranks(drafter, batches, lambda b: rank_weight(b.n_counted, counted, 4))
    for a, b in zip(four, three, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_metrics_of_parts_add_up_to_those_of_the_whole(drafter: Drafter) -> None:
    """Also the loss, whose mean the library gives per sequence, and whatever the order of the documents."""
    whole = run(drafter, made(_joined(bins())))[1]
    parts = [run(drafter, made(b))[1] for b in bins()]
    for name, (value, total) in whole.items():
        assert sum(p[name][1] for p in parts) == total, name
        assert sum(p[name][0] for p in parts) == pytest.approx(value, rel=1e-4, abs=1e-4), name
    assert whole["full_acc_0"][1] == whole["full_acc_2"][1] == made(_joined(bins())).n_counted
