"""One optimizer step, and one pass without one.

The loss of a step is the mean over all counted rows of all ranks: each rank's own mean is weighted by its counted rows
× W / all counted rows, which DDP's average of gradients turns into that mean. `data.RowLayout.guard_rows` gives every
TTT step the same number of counted rows, so the one factor is exact for all K terms of the loss.

Letters: W ranks, K TTT steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from hsstore.errors import HsstoreError
from trainer.data import HostBatch, RowBuffers, empty
from trainer.drafter import MEAN_EPSILON, Pair, forward
from trainer.metrics import Floats
from trainer.prepare import Setup


def update(setup: Setup, batch: HostBatch, counted: int, rate: float) -> tuple[float, Floats]:
    """Forward, backward, clip, step. Returns the gradient's norm before clipping, and this rank's metrics.

    `counted`: counted rows of all ranks. Raises `HsstoreError` when the gradient is not finite; nothing has moved then.
    """
    setup.optimizer.zero_grad()
    loss, pairs = forward(setup.net, to_device(setup, batch), setup.drafter)
    if not counted:  # no rank has anything to learn from: Adam's momentum must not act either
        return 0.0, as_floats(pairs)
    (loss * rank_weight(batch.n_counted, counted, setup.ranks.world)).backward()  # type: ignore[no-untyped-call]
    norm = float(torch.nn.utils.clip_grad_norm_(setup.trained, setup.options.grad_clip or math.inf))
    if not math.isfinite(norm):
        raise HsstoreError(
            f"the gradient's norm is {norm}; the loss is {loss.item():.4g} on samples"
            f" {', '.join(map(str, batch.source_index)) or '(none)'} of rank {setup.ranks.rank}",
            hint="check the store with `hsstore verify manifest STORE --full`, or start again with a lower --lr",
        )
    for group in setup.optimizer.param_groups:
        group["lr"] = rate
    setup.optimizer.step()
    return norm, as_floats(pairs)


def rank_weight(own: int, counted: int, world: int) -> float:
    """Factor of a rank's loss. speculators divides by own rows + ε: that is taken out again."""
    return (own + MEAN_EPSILON) * world / counted


def evaluate(setup: Setup, batch: HostBatch) -> Floats:
    """This rank's metrics of one sequence, nothing learnt."""
    with torch.no_grad():
        return as_floats(forward(setup.model, to_device(setup, batch), setup.drafter)[1])


def settle_buckets(setup: Setup) -> None:
    """Let DDP arrange its gradient buckets before the first step that counts.

    It does so after the first backward pass it sees, and the arrangement decides in which order a ring adds up the
    ranks' gradients. Without this the first step after a resume could differ in its last bit.
    """
    if setup.ranks.world == 1:
        return
    nothing = empty(setup.rows, RowBuffers.allocate(setup.rows, pinned=False))
    forward(setup.net, to_device(setup, nothing), setup.drafter)[0].backward()  # type: ignore[no-untyped-call]
    setup.optimizer.zero_grad()


def to_device(setup: Setup, batch: HostBatch) -> dict[str, torch.Tensor]:
    return {name: t.to(setup.ranks.device, non_blocking=True) for name, t in batch.tensors.items()}


def as_floats(pairs: Mapping[str, Pair]) -> Floats:
    """All of them in one transfer from the device."""
    flat = torch.stack([x.detach().to(torch.float64) for pair in pairs.values() for x in pair]).tolist()
    return {name: (flat[2 * i], flat[2 * i + 1]) for i, name in enumerate(pairs)}
