"""Rows of a training sequence against speculators' own shift, and noise as a function of the sample alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from trainer.data import ROW_MULTIPLE, HostBatch, Noise, RowBuffers, RowLayout, empty, fill, noise_rows

# speculators pulls in extensions made with an old SWIG; nothing of ours.
pytestmark = pytest.mark.filterwarnings("ignore:builtin type .* has no __module__ attribute:DeprecationWarning")

H = 8
LAYOUT = RowLayout(max_rows=128, layers=("after_2", "after_3"), hidden_size=H, guard_rows=0, fixed=False)
NOISE = Noise(std=0.05, seed=3, epoch=1)


def batch_of(lengths: list[int], *, seed: int = 0, sources: list[int] | None = None) -> dict[str, np.ndarray]:
    """A batch as the wire gives it: bf16 as uint16, samples end to end."""
    total, rng = sum(lengths), np.random.default_rng(seed)

    def states() -> np.ndarray:
        return (rng.standard_normal((total, H)).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)

    return {
        "hidden.after_2": states(),
        "hidden.after_3": states(),
        "hidden.final": states(),
        "input_ids": rng.integers(0, 1000, total, dtype=np.int32),
        "loss_mask": rng.integers(0, 2, total).astype(np.uint8),
        "position_ids": np.concatenate([np.arange(n, dtype=np.int32) for n in lengths]),
        "cu_seqlens": np.cumsum([0, *lengths]).astype(np.int32),
        "source_index": np.array(sources or range(len(lengths)), np.int64),
    }


def rows_of(
    batch: dict[str, np.ndarray], layout: RowLayout = LAYOUT, noise: Noise | None = None, buffers: Any = None
) -> HostBatch:
    return fill(batch, layout, buffers or RowBuffers.allocate(layout, pinned=False), noise)


def bf16(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)


def test_rows_are_those_of_speculators_shift() -> None:
    """Its `shift_batch` defines EAGLE-3's rows; one position off trains a drafter that guesses the past."""
    from speculators.models.eagle3.data import shift_batch

    lengths = [9, 2, 30, 17]
    batch = batch_of(lengths)
    made = rows_of(batch)
    at = row = 0
    for document, n in enumerate(lengths):
        piece = slice(at, at + n)
        expected = shift_batch(
            {
                "input_ids": torch.from_numpy(batch["input_ids"][piece]).long(),
                "hidden_states": torch.cat([bf16(batch[f"hidden.{k}"][piece]) for k in LAYOUT.layers], dim=1),
                "verifier_last_hidden_states": bf16(batch["hidden.final"][piece]),
                "loss_mask": torch.from_numpy(batch["loss_mask"][piece]).bool(),
                "lengths": torch.tensor([n]),
                "position_ids": torch.arange(n),
            }
        )
        rows = slice(row, row + n - 1)
        for name in ("input_ids", "hidden_states", "verifier_last_hidden_states", "loss_mask", "position_ids"):
            assert torch.equal(made.tensors[name][0, rows], expected[name]), name
        assert (made.tensors["document_ids"][0, rows] == document).all()
        at, row = at + n, row + n - 1
    assert made.n_rows == row == sum(lengths) - len(lengths)
    assert made.n_counted == int(made.tensors["loss_mask"].sum()) > 0


def test_what_is_behind_the_rows_is_padding_even_in_used_buffers() -> None:
    """Buffers are used again: a row left over from the batch before would be trained on twice."""
    buffers = RowBuffers.allocate(LAYOUT, pinned=False)
    rows_of(batch_of([60, 60]), buffers=buffers)
    made = rows_of(batch_of([20]), buffers=buffers)
    assert made.tensors["input_ids"].shape == (1, ROW_MULTIPLE)
    for name, tensor in made.tensors.items():
        padding = tensor[0, made.n_rows :].float()
        assert (padding == (-1 if name == "document_ids" else 0)).all(), name


def test_an_empty_bin_is_padding_only() -> None:
    buffers = RowBuffers.allocate(LAYOUT, pinned=False)
    rows_of(batch_of([60, 60]), buffers=buffers)
    made = empty(LAYOUT, buffers)
    assert (made.n_rows, made.n_counted, made.source_index) == (0, 0, ())
    assert (made.tensors["document_ids"] == -1).all()
    assert not made.tensors["loss_mask"].any()


def test_a_gpu_sees_one_shape() -> None:
    layout = RowLayout(max_rows=100, layers=("after_2",), hidden_size=H, guard_rows=0, fixed=True)
    assert {rows_of(batch_of(lengths), layout).tensors["input_ids"].shape for lengths in ([5], [50, 40])} == {(1, 100)}


def test_the_first_rows_of_every_document_never_count() -> None:
    """At step k, row j is scored against row j + k: with these rows out, never against another document's."""
    layout = RowLayout(max_rows=128, layers=("after_2",), hidden_size=H, guard_rows=2, fixed=False)
    batch = batch_of([10, 2, 20])
    batch["loss_mask"][:] = 1
    made = rows_of(batch, layout)
    mask, documents = made.tensors["loss_mask"][0], made.tensors["document_ids"][0]
    for document, n_rows in enumerate((9, 1, 19)):
        expected = [i >= 2 for i in range(n_rows)]
        assert mask[documents == document].tolist() == expected
    assert made.n_guarded == 2 + 1 + 2
    counted = [int(mask[k:].sum()) for k in range(3)]
    assert counted == [made.n_counted] * 3, "every step has the same denominator"


def test_noise_depends_on_seed_epoch_and_sample_and_on_nothing_else() -> None:
    """A resumed run, another rank or another packing must see the same noise on the same sample."""
    alone = rows_of(batch_of([12, 20], sources=[70, 71]), noise=NOISE)
    clean = rows_of(batch_of([12, 20], sources=[70, 71]))
    packed = batch_of([12, 20], sources=[70, 71])
    swapped = {**packed, "cu_seqlens": np.array([0, 20, 32], np.int32), "source_index": np.array([71, 70])}
    for name in ("hidden.after_2", "hidden.after_3", "hidden.final", "input_ids", "loss_mask", "position_ids"):
        swapped[name] = np.concatenate([packed[name][12:], packed[name][:12]])
    other = rows_of(swapped, noise=NOISE)
    name = "hidden_states"
    assert torch.equal(other.tensors[name][0, :19], alone.tensors[name][0, 11:30])
    assert torch.equal(other.tensors[name][0, 19:30], alone.tensors[name][0, :11])
    assert not torch.equal(alone.tensors[name], clean.tensors[name])
    for changed in (Noise(std=0.05, seed=4, epoch=1), Noise(std=0.05, seed=3, epoch=2)):
        assert not torch.equal(noise_rows(changed, 70, 5, H), noise_rows(NOISE, 70, 5, H))
    assert not torch.equal(noise_rows(NOISE, 71, 5, H), noise_rows(NOISE, 70, 5, H))


def test_noise_is_on_the_auxiliary_states_only() -> None:
    """On the targets it would teach the drafter a verifier that does not exist."""
    noisy, clean = rows_of(batch_of([30, 40]), noise=NOISE), rows_of(batch_of([30, 40]))
    for name in clean.tensors.keys() - {"hidden_states"}:
        assert torch.equal(noisy.tensors[name], clean.tensors[name]), name
    n = clean.n_rows
    moved = (noisy.tensors["hidden_states"].float() - clean.tensors["hidden_states"].float()).abs()[0]
    assert moved[:n].max() > 0.03
    assert moved[n:].max() == 0, "padding stays zero"


def test_noise_is_uniform_in_its_bounds() -> None:
    values = noise_rows(NOISE, 5, 500, 100)
    assert values.abs().max() < 0.05
    assert float(values.abs().max()) > 0.0499
    assert abs(float(values.mean())) < 5e-4
    assert float(values.std()) == pytest.approx(0.05 / 3**0.5, rel=0.01)
    assert torch.equal(noise_rows(NOISE, 5, 7, 100), values[:7]), "a cut sample has the start of the whole one's noise"


def test_the_noise_of_this_version_is_that_of_the_first() -> None:
    """Pinned bits: a run saved before an upgrade is resumed after it with the same noise."""
    got = noise_rows(Noise(std=1.0, seed=0, epoch=0), 0, 1, 4)[0] * 32768 - 0.5
    assert got.to(torch.int64).tolist() == PINNED


PINNED = [7841, -30408, -5602, -6997]
