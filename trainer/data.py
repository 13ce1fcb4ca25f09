"""From a batch as the store gives it to the rows a drafter is trained on.

Responsible for: the shift by one inside every sample, packing samples into documents of one sequence, padding, noise,
and the reusable host buffers all of that is written into. Leaves to `loader` when and on which thread it happens, to
the plan which samples form a batch.

Noise is a function of (seed, epoch, source_index) alone: not of the rank, the worker or the bin a sample lands in.

Letters: T tokens of a batch, R rows of the training sequence, n samples, L auxiliary states, H hidden size,
K TTT steps.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

# On the CPU a padded row costs what a real one does: 512 rows of SmolLM2's size, K = 3, take 2.6 CPU seconds a step,
# the same rows padded to 1,024 take 3.9, and an empty bin 0.8 instead of 4.3. A GPU compiles one fixed shape once.
ROW_MULTIPLE = 64
_NOISE_TAG = 0x6E6F697365  # keeps this stream apart from every other use of the same seed


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLayout:
    """Shape of the training sequence, the same for every batch of a run."""

    max_rows: int
    """Most rows of a sequence: max_seq_len."""
    layers: tuple[str, ...]
    """The L auxiliary states in the order they are concatenated, e.g. after_2, after_15, after_27."""
    hidden_size: int
    """H."""
    guard_rows: int
    """K − 1: leading rows of each document that never count.

    At TTT step k row j is compared with the target of row j + k, which near the end of a document lies in the next
    one. speculators relies on documents beginning with uncounted rows; here they always do. It follows that every
    step k has the same number of counted rows, so one factor makes the loss a true mean over all ranks' tokens.
    """
    fixed: bool
    """Always pad to max_rows; otherwise to a multiple of ROW_MULTIPLE."""

    def padded(self, n_rows: int) -> int:
        return self.max_rows if self.fixed else max(ROW_MULTIPLE, -(-n_rows // ROW_MULTIPLE) * ROW_MULTIPLE)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowBuffers:
    """Host memory for one sequence, allocated once; page-locked when it will be copied to a GPU."""

    hidden: torch.Tensor
    """[max_rows, L·H] bf16: g, noise included."""
    final: torch.Tensor
    """[max_rows, H] bf16: y."""
    input_ids: torch.Tensor
    """[max_rows] i64"""
    loss_mask: torch.Tensor
    """[max_rows] bool"""
    document_ids: torch.Tensor
    """[max_rows] i64, −1 on padding"""
    position_ids: torch.Tensor
    """[max_rows] i64"""

    @classmethod
    def allocate(cls, layout: RowLayout, *, pinned: bool) -> RowBuffers:
        rows = layout.padded(layout.max_rows)

        def new(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(*shape, dtype=dtype, pin_memory=pinned)

        return cls(
            hidden=new(rows, len(layout.layers) * layout.hidden_size, dtype=torch.bfloat16),
            final=new(rows, layout.hidden_size, dtype=torch.bfloat16),
            input_ids=new(rows, dtype=torch.int64),
            loss_mask=new(rows, dtype=torch.bool),
            document_ids=new(rows, dtype=torch.int64),
            position_ids=new(rows, dtype=torch.int64),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """Uniform ±std on the auxiliary states of one epoch."""

    std: float
    seed: int
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HostBatch:
    """One training sequence in host memory; its tensors are views of buffers that the loader uses again."""

    tensors: dict[str, torch.Tensor]
    """The arguments of the drafter's forward, each [1, R, …]."""
    n_rows: int
    """Rows that are no padding."""
    n_counted: int
    """Rows with a loss."""
    n_guarded: int
    """Rows of trained tokens that do not count, because they are among the first K − 1 of a document."""
    source_index: tuple[int, ...]
    """[n]"""


def fill(
    batch: Mapping[str, npt.NDArray[np.generic]], layout: RowLayout, out: RowBuffers, noise: Noise | None
) -> HostBatch:
    """Write a batch's rows into `out`.

    Sample of T tokens → T − 1 rows: input x_{j+1}, features g_j, target y_{j+1}, mask l_{j+1}, position j + 1.
    """
    bounds = batch["cu_seqlens"].tolist()
    sources = [int(i) for i in batch["source_index"]]
    hidden = [_bfloat16(batch[f"hidden.{name}"]) for name in layout.layers]
    final, ids = _bfloat16(batch["hidden.final"]), torch.from_numpy(batch["input_ids"])
    mask, positions = torch.from_numpy(batch["loss_mask"]), torch.from_numpy(batch["position_ids"])
    row = guarded = 0
    for document, (start, stop) in enumerate(itertools.pairwise(bounds)):
        n = stop - start - 1
        if n < 1:
            continue  # a sample of one token has nothing to predict
        rows = slice(row, row + n)
        _copy_features([h[start : stop - 1] for h in hidden], out.hidden[rows], layout, noise, sources[document])
        out.final[rows] = final[start + 1 : stop]
        out.input_ids[rows] = ids[start + 1 : stop]
        out.loss_mask[rows] = mask[start + 1 : stop].bool()
        out.position_ids[rows] = positions[start + 1 : stop]
        out.document_ids[rows] = document
        guard = out.loss_mask[row : row + min(n, layout.guard_rows)]
        guarded += int(guard.sum())
        guard.zero_()
        row += n
    return _finish(out, layout, n_rows=row, n_guarded=guarded, sources=sources)


def empty(layout: RowLayout, out: RowBuffers) -> HostBatch:
    """A sequence of padding only: no loss, no gradient, but every rank takes part in the step."""
    return _finish(out, layout, n_rows=0, n_guarded=0, sources=[])


def noise_rows(noise: Noise, source_index: int, n_rows: int, width: int) -> torch.Tensor:
    """[n_rows, width] f32, uniform in (−std, std) on a grid of 65,536; the first rows of a longer sample's noise.

    The raw 64-bit words of the counter-based Philox are taken, four values each: numpy promises this stream for
    ever, and it is 5 times as fast as `Generator.random` in float32 (532 against 100 million values a second).
    """
    sequence = np.random.SeedSequence([_NOISE_TAG, noise.seed, noise.epoch, source_index])
    n = n_rows * width
    words = np.random.Philox(sequence).random_raw(-(-n // 4))
    values = torch.from_numpy(words.view(np.int16)[:n]).to(torch.float32)
    return values.add_(0.5).mul_(noise.std / 32768).view(n_rows, width)


def _copy_features(
    parts: Sequence[torch.Tensor], out: torch.Tensor, layout: RowLayout, noise: Noise | None, source_index: int
) -> None:
    width = layout.hidden_size
    for k, part in enumerate(parts):
        out[:, k * width : (k + 1) * width] = part
    if noise is not None and noise.std > 0:
        out.copy_(noise_rows(noise, source_index, len(out), out.shape[1]).add_(out))


def _finish(out: RowBuffers, layout: RowLayout, *, n_rows: int, n_guarded: int, sources: list[int]) -> HostBatch:
    size = layout.padded(n_rows)
    for tensor in (out.hidden, out.final, out.input_ids, out.loss_mask, out.position_ids):
        tensor[n_rows:size].zero_()
    out.document_ids[n_rows:size].fill_(-1)
    tensors = {
        "hidden_states": out.hidden[:size][None],
        "verifier_last_hidden_states": out.final[:size][None],
        "input_ids": out.input_ids[:size][None],
        "loss_mask": out.loss_mask[:size][None],
        "document_ids": out.document_ids[:size][None],
        "position_ids": out.position_ids[:size][None],
    }
    n_counted = int(out.loss_mask[:size].sum())
    return HostBatch(
        tensors=tensors, n_rows=n_rows, n_counted=n_counted, n_guarded=n_guarded, source_index=tuple(sources)
    )


def _bfloat16(array: npt.NDArray[np.generic]) -> torch.Tensor:
    """The stored 16 bits as bfloat16, without a copy."""
    return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
