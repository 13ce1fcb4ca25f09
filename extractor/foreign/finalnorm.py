"""The model's final norm, computed on stored states: the one translation of an export that is not bit-exact.

From before the norm to after it, in float32 and then bfloat16, as transformers' RMSNorm does. An engine's fused kernel
rounds elsewhere, so the result is close to what it would have given (a unit or two in the last place), never equal.
The other way is impossible: the norm forgets the length of each vector.

Letters: T tokens, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from extractor.foreign.normfamilies import ONE_PLUS_WEIGHT, PLAIN_ELSEWHERE, PLAIN_WEIGHT
from extractor.foreign.outgoing import bfloat16
from extractor.foreign.pickles import need_torch
from extractor.foreign.sample import Rows
from extractor.modelfiles import json_object, read
from extractor.tensors import NORMS, find
from extractor.verifier import Verifier
from hsstore.errors import ConflictError, UsageError
from hsstore.records import Capture

if TYPE_CHECKING:
    import torch

_NESTED = ("text_config", "llm_config", "language_config")


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalNorm:
    weight: torch.Tensor
    """float32 [H], what the normalised vector is multiplied by."""
    epsilon: float
    one_plus: bool = False
    """Whether the checkpoint holds the weight less one."""

    def apply(self, rows: Rows) -> Rows:
        """bfloat16 patterns [T, H] after the norm."""
        torch = need_torch()
        x = bfloat16(rows).to(torch.float32)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.epsilon)
        if self.one_plus:  # these families multiply in float32 and round once
            out = (x * self.weight).to(torch.bfloat16)
        else:
            out = x.to(torch.bfloat16) * self.weight.to(torch.bfloat16)
        result: Rows = out.view(torch.int16).numpy().view("u2")
        return result


def load(verifier: Verifier, capture: Capture) -> FinalNorm:
    """Raises `ConflictError` for another model than the store's, `UsageError` for a norm that is not known here."""
    if verifier.config_sha256 != capture.config_sha256 or verifier.hidden_size != capture.hidden_size:
        raise ConflictError(
            f"the store was captured from {capture.model}, --model {verifier.path} has another config.json",
            hint="give the model that the states are of",
        )
    return of_model(verifier)


def of_model(verifier: Verifier) -> FinalNorm:
    """The norm of a model directory. Raises `UsageError` for one that is not known here."""
    path = verifier.path / "config.json"
    config = json_object(read(path), path)
    inner: Any = next((config[key] for key in _NESTED if isinstance(config.get(key), dict)), config)
    epsilon = inner.get("rms_norm_eps")
    if not isinstance(epsilon, float):
        raise UsageError(f"{path} has no rms_norm_eps: its final norm is of a kind that is not known here")
    family = str(inner.get("model_type") or config.get("model_type") or "")
    one_plus = family in ONE_PLUS_WEIGHT
    if not one_plus and family not in PLAIN_WEIGHT | PLAIN_ELSEWHERE:
        raise UsageError(f"{path} is of the family {family[:40]!r}, whose final norm is not known here")
    weight = _weight(verifier)
    return FinalNorm(weight=1 + weight if one_plus else weight, epsilon=epsilon, one_plus=one_plus)


def _weight(verifier: Verifier) -> torch.Tensor:
    need_torch()
    import torch

    place = find(verifier.path, NORMS)
    if place is None:
        raise UsageError(f"{verifier.path} has no {NORMS[0]}: its final norm is not known here")
    if place.shape != (verifier.hidden_size,):
        raise UsageError(f"{place.name} in {place.file} is {place.shape}, expected ({verifier.hidden_size},)")
    return place.rows(0, verifier.hidden_size).to(torch.float32)
