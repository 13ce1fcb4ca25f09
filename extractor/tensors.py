"""Single tensors of a checkpoint, found by name through the files' headers: the model itself is never built.

Responsible for the names under which checkpoints keep embedding, head and final norm, and for reading pieces of them.
Leaves to `extractor.weights` which files there are and whether they are whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from extractor.modelfiles import COMPLETE, json_object, read
from extractor.weights import weight_files
from hsstore.errors import MissingExtraError, UsageError, extra_hint

if TYPE_CHECKING:
    import torch

# Where checkpoints keep the language model: plain models, Kimi-K2.5 and other wrapped ones, newer multimodal ones.
PREFIXES = ("model.", "language_model.model.", "model.language_model.")
NORMS = tuple(f"{prefix}norm.weight" for prefix in PREFIXES)
EMBEDDINGS = tuple(f"{prefix}embed_tokens.weight" for prefix in PREFIXES)
HEADS = ("lm_head.weight", "language_model.lm_head.weight", "model.lm_head.weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPlace:
    """Where one tensor of a checkpoint lies."""

    file: Path
    name: str
    shape: tuple[int, ...]

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Rows of it in the checkpoint's dtype; no other byte is read. Raises `UsageError`."""
        with _opened(self.file) as tensors:
            piece: torch.Tensor = tensors.get_slice(self.name)[start:stop]
        return piece


def find(model: Path, names: Sequence[str]) -> TensorPlace | None:
    """The first of the names that a *.safetensors file of the model holds."""
    for file in _holders(model, names):
        with _opened(file) as tensors:
            there = set(tensors.keys())
            for name in names:
                if name in there:
                    return TensorPlace(file=file, name=name, shape=tuple(tensors.get_slice(name).get_shape()))
    return None


def _holders(model: Path, names: Sequence[str]) -> list[Path]:
    """The files that may hold one of them: by the index those that do, else all."""
    files = [file for file in weight_files(model) if file.suffix == ".safetensors"]
    index = model / "model.safetensors.index.json"
    places = json_object(read(index), index)["weight_map"] if index.is_file() else {}
    named = {places[name] for name in names if name in places}
    return [file for file in files if file.name in named] or ([] if places else files)


def _opened(file: Path) -> Any:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise MissingExtraError("reading weights needs safetensors and torch", hint=extra_hint("hf")) from None
    try:
        return safe_open(file, framework="pt", device="cpu")
    except SafetensorError as error:
        raise UsageError(f"{file} is no safetensors file: {str(error)[:120]}", hint=COMPLETE) from None
