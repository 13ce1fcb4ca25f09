"""The verifier's head on stored rows: which token each row predicts. Three tensors of the checkpoint, never the model.

The head is read in slices of the vocabulary, so a verifier of a trillion parameters costs some hundred megabytes of
memory and one pass over its head (2.3 GB for Kimi-K2.5).

Letters: N rows, H hidden size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from extractor import tensors
from extractor.modelfiles import json_object, read
from extractor.tensors import TensorPlace
from extractor.verifier import Verifier
from hsstore.errors import UsageError

if TYPE_CHECKING:
    import torch

_VALUES = 1 << 24
"""Of a slice's weights, and of its logits: 64 MiB of float32 each."""
_NESTED = ("text_config", "llm_config", "language_config")


@dataclass(frozen=True, slots=True)
class Predictions:
    tokens: npt.NDArray[np.int64]
    """[N] argmax of the logits."""
    confidence: npt.NDArray[np.float32]
    """[N] probability of that token."""
    surprise: npt.NDArray[np.float32]
    """[N] nats by which the token that follows is less likely than the head itself expects: -log p less the entropy.

    About 0 on average where rows and ids belong together, however hard the text is, and for a head that knows nothing.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """lm_head, or the embedding of a tied model."""

    weight: TensorPlace
    """[V, H]"""
    bias: TensorPlace | None
    """[V]"""

    def predict(self, rows: torch.Tensor, after: torch.Tensor) -> Predictions:
        """`rows`: float32 [N, H], as the head reads them; `after`: int64 [N], what follows. One pass over the head."""
        import torch

        n, (vocabulary, width) = len(rows), self.weight.shape
        best, at = torch.full((n,), -torch.inf), torch.zeros(n, dtype=torch.int64)
        total, first = (
            torch.zeros(n),
            torch.zeros(n),
        )  # Σ e and Σ e·d of the slices so far, d = logit - best, e = exp(d)
        followed = torch.full((n,), -torch.inf)
        step = max(1, _VALUES // max(n, width))
        for start in range(0, vocabulary, step):
            logits = rows @ self._slice(self.weight, start, start + step).T
            if self.bias is not None:
                logits += self._slice(self.bias, start, start + step)
            here = torch.nonzero((after >= start) & (after < start + logits.shape[1]))[:, 0]
            followed[here] = logits[here, after[here] - start]
            top, where = logits.max(dim=1)
            new = torch.maximum(best, top)
            at = torch.where(top > best, where + start, at)
            if start:
                first, total = (first + total * (best - new)) * torch.exp(best - new), total * torch.exp(best - new)
            logits -= new[:, None]
            weights = torch.exp(logits)
            total, first = total + weights.sum(dim=1), first + (weights * logits).sum(dim=1)
            best = new
        # -log p = log Σ - (followed - best); entropy = log Σ - Σ e·d / Σ e
        surprise = first / total - (followed - best)
        return Predictions(at.numpy(), (1 / total).numpy(), surprise.numpy())

    def _slice(self, place: TensorPlace, start: int, stop: int) -> torch.Tensor:
        import torch

        piece = place.rows(start, min(stop, place.shape[0]))
        if not piece.is_floating_point():
            raise UsageError(f"{place.name} in {place.file} holds {piece.dtype}: a quantised head is not read here")
        return piece.to(torch.float32)


def load_head(verifier: Verifier) -> Head:
    """Locate it. Raises `UsageError` for a checkpoint without one, or with one of another shape."""
    own = tensors.find(verifier.path, tensors.HEADS)
    # An engine that ties never reads a head that the files may still carry.
    weight = tensors.find(verifier.path, tensors.EMBEDDINGS) if own is None or _tied(verifier) else own
    if weight is None:
        raise UsageError(f"{verifier.path} has neither {tensors.HEADS[0]} nor {tensors.EMBEDDINGS[0]}")
    if len(weight.shape) != 2 or weight.shape[1] != verifier.hidden_size:
        raise UsageError(f"{weight.name} in {weight.file} is {weight.shape}, expected (V, {verifier.hidden_size})")
    biases = [name.replace(".weight", ".bias") for name in tensors.HEADS]
    bias = tensors.find(verifier.path, biases)
    if bias is not None and bias.shape != weight.shape[:1]:
        raise UsageError(f"{bias.name} in {bias.file} is {bias.shape}, expected {weight.shape[:1]}")
    return Head(weight=weight, bias=bias)


def _tied(verifier: Verifier) -> bool:
    file = verifier.path / "config.json"
    config = json_object(read(file), file)
    inner: Any = next((config[key] for key in _NESTED if isinstance(config.get(key), dict)), {})
    return bool(config.get("tie_word_embeddings", inner.get("tie_word_embeddings", False)))
