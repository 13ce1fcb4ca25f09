"""What an engine's start needs to know of a verifier, from its config.json, and which states can be asked for."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from hsstore.errors import NotFoundError, UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifierConfig:
    architecture: str
    n_layers: int
    hidden_size: int
    context_tokens: int
    """Positions the model was made for."""


def read_config(model_path: Path) -> VerifierConfig:
    """Raises `NotFoundError` without a config.json, `UsageError` for one that is no language model's."""
    path = model_path / "config.json"
    try:
        document: Any = msgspec.json.decode(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise NotFoundError(f"{model_path} is not a model directory: it has no config.json") from None
    except msgspec.DecodeError as error:
        raise UsageError(f"{path} is not JSON: {error}") from None
    text = document.get("text_config") or document  # multimodal models nest the language model's
    try:
        return VerifierConfig(
            architecture=str(document["architectures"][0]),
            n_layers=int(text["num_hidden_layers"]),
            hidden_size=int(text["hidden_size"]),
            context_tokens=int(text.get("max_position_embeddings") or 32768),
        )
    except (KeyError, IndexError, TypeError) as error:
        raise UsageError(f"{path} does not describe a language model: no {error}") from None


def layer_numbers(layers: Sequence[str], n_layers: int) -> tuple[int, ...]:
    """k of each `after_k` in the names, ascending. Raises `UsageError` for a state that SGLang cannot deliver."""
    numbers = []
    for name in layers:
        if name == "final":
            continue
        match = re.fullmatch(r"after_(\d+)", name)
        if match is None:
            raise UsageError(f"no state is called {name!r}; expected after_1 … after_{n_layers - 1} or final")
        k = int(match[1])
        if not 1 <= k < n_layers:
            what = "the embedding" if k == 0 else f"not before the last of the {n_layers} layers"
            raise UsageError(
                f"SGLang cannot capture {name} ({what}); it offers after_1 … after_{n_layers - 1} and final",
                hint="leave it out, or use --engine transformers",
            )
        numbers.append(k)
    return tuple(sorted(set(numbers)))
