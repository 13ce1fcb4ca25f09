"""A verifier small enough to write in a test: its three tensors and its config.json, as checkpoints spell them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

HIDDEN, VOCAB, N_LAYERS = 16, 50, 8

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "vocab_size": VOCAB,
    "num_hidden_layers": N_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "intermediate_size": 24,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    """embed, lm_head and norm in bf16."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(torch.bfloat16)

    return {"embed": draw(VOCAB, HIDDEN), "lm_head": draw(VOCAB, HIDDEN), "norm": 1 + 0.1 * draw(HIDDEN)}


def write_verifier(
    directory: Path,
    *,
    prefix: str = "model.",
    head: str | None = "lm_head.weight",
    config: dict[str, Any] | None = None,
    sharded: bool = False,
) -> dict[str, torch.Tensor]:
    """Write a checkpoint and return its tensors. `head=None` leaves the head out."""
    directory.mkdir(parents=True, exist_ok=True)
    made = tensors()
    named = {f"{prefix}embed_tokens.weight": made["embed"], f"{prefix}norm.weight": made["norm"]}
    if head is not None:
        named[head] = made["lm_head"]
    named[f"{prefix}layers.0.mlp.up_proj.weight"] = torch.zeros(2, 2)
    _write_weights(directory, named, sharded)
    (directory / "config.json").write_text(json.dumps(CONFIG if config is None else config))
    return made


def _write_weights(directory: Path, named: dict[str, torch.Tensor], sharded: bool) -> None:
    if not sharded:
        save_file(named, directory / "model.safetensors")
        return
    weight_map = {}
    for i, (name, tensor) in enumerate(named.items()):
        file = f"model-{i + 1:05d}-of-{len(named):05d}.safetensors"
        save_file({name: tensor}, directory / file)
        weight_map[name] = file
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def sample(n_tokens: int, trained: Sequence[int], seed: int, n_layers: int = 3) -> dict[str, torch.Tensor]:
    """One sample as a store holds it; `trained` are the offsets with l = 1."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.zeros(n_tokens, dtype=torch.bool)
    mask[list(trained)] = True
    return {
        "input_ids": torch.randint(0, VOCAB, (n_tokens,), generator=generator),
        "hidden_states": torch.randn(n_tokens, n_layers * HIDDEN, generator=generator).to(torch.bfloat16),
        "verifier_last_hidden_states": torch.randn(n_tokens, HIDDEN, generator=generator).to(torch.bfloat16),
        "loss_mask": mask,
        "lengths": torch.tensor([n_tokens]),
        "position_ids": torch.arange(n_tokens),
    }
