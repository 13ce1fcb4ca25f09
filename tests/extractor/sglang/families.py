"""Tiny random checkpoints of every family that is compared, as real ones lie on disk, and what to compare them with.

Weights are drawn so that every layer moves the residual stream: a state of another layer is far off, not nearly right.
Responsible for configurations as their makers publish them; leaves running and judging to `table`.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SEED = 7
"""No row of the compared prompts then lies between two experts: rounding alone would decide where it goes."""
N_LAYERS = 8
HIDDEN = 64
VOCABULARY = 512
CONTEXT = 512

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": N_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "tie_word_embeddings": False,
}
_EXPERTS: dict[str, Any] = {"moe_intermediate_size": 32, "num_experts_per_tok": 2, "norm_topk_prob": True}
# MLA with yarn, one dense layer before the mixtures, grouped routing with a bias: as DeepSeek-V3 and Kimi have it.
_DEEPSEEK: dict[str, Any] = {
    **_COMMON,
    **_EXPERTS,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "routed_scaling_factor": 1.5,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "rope_theta": 10000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}
_KIMI: dict[str, Any] = {**_DEEPSEEK, "n_group": 1, "topk_group": 1, "rope_theta": 50000.0}
_KIMI_VISION = {
    "model_type": "kimi_k25",
    "patch_size": 14,
    "init_pos_emb_height": 4,
    "init_pos_emb_width": 4,
    "init_pos_emb_time": 2,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "vt_hidden_size": 32,
    "vt_num_hidden_layers": 1,
    "vt_num_attention_heads": 2,
    "vt_intermediate_size": 32,
    "mm_hidden_size": 32,
    "text_hidden_size": HIDDEN,
    "merge_kernel_size": [2, 2],
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    name: str
    architecture: str
    """Class that config.json names."""
    model_type: str
    """As config.json names it."""
    config: Mapping[str, Any]
    reference: str
    """Configuration class of transformers that computes the same, without the suffix `Config`."""
    note: str = ""
    """How the reference differs from the checkpoint by name."""
    trap: bool = False
    """EAGLE3 layer ids mean other layers here when the first of them is not 1."""
    vision: Mapping[str, Any] = field(default_factory=dict)
    """Configuration beside a nested text model, of which only the text part is captured."""
    tensor_prefix: str = ""
    """Before the names of the text model's tensors."""


_RENAMED = "transformers has no class of this name; compared with its DeepseekV3 on the same tensors"
FAMILIES = (
    Family(name="Llama", architecture="LlamaForCausalLM", model_type="llama", config=_COMMON, reference="Llama"),
    Family(name="Qwen2", architecture="Qwen2ForCausalLM", model_type="qwen2", config=_COMMON, reference="Qwen2"),
    Family(
        name="Qwen3",
        architecture="Qwen3ForCausalLM",
        model_type="qwen3",
        config={**_COMMON, "head_dim": 32},
        reference="Qwen3",
    ),
    Family(
        name="Qwen3-MoE",
        architecture="Qwen3MoeForCausalLM",
        model_type="qwen3_moe",
        config={**_COMMON, **_EXPERTS, "num_experts": 8, "head_dim": 32, "decoder_sparse_step": 1},
        reference="Qwen3Moe",
    ),
    Family(
        name="DeepSeek-V3",
        architecture="DeepseekV3ForCausalLM",
        model_type="deepseek_v3",
        config=_DEEPSEEK,
        reference="DeepseekV3",
        trap=True,
    ),
    Family(
        name="Kimi-K2",
        architecture="DeepseekV3ForCausalLM",
        model_type="kimi_k2",
        config=_KIMI,
        reference="DeepseekV3",
        note=_RENAMED,
        trap=True,
    ),
    Family(
        name="Kimi-K2.5 text",
        architecture="KimiK25ForConditionalGeneration",
        model_type="kimi_k25",
        config=_KIMI,
        reference="DeepseekV3",
        note=_RENAMED,
        trap=True,
        vision=_KIMI_VISION,
        tensor_prefix="language_model.",
    ),
)
GPT_OSS = Family(
    name="gpt-oss",
    architecture="GptOssForCausalLM",
    model_type="gpt_oss",
    config={**_COMMON, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 128},
    reference="GptOss",
)


def build(family: Family, directory: Path, *, seed: int = SEED) -> Any:
    """Write the checkpoint, and return transformers' own model of the same weights, in float32."""
    import torch
    import transformers
    from safetensors.torch import save_file

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = getattr(transformers, f"{family.reference}Config")(**family.config)
        torch.manual_seed(seed)
        network = transformers.AutoModelForCausalLM.from_config(config).eval().float()
    _draw(network)
    directory.mkdir()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        network.save_pretrained(directory)
    tensors = _load(directory)
    for file in directory.glob("*.safetensors*"):
        file.unlink()
    save_file(
        {family.tensor_prefix + name: tensor for name, tensor in tensors.items()}, directory / "model.safetensors"
    )
    (directory / "config.json").write_text(json.dumps(published_config(family), indent=1))
    return network


def routing_margin(network: Any, run: Callable[[], object]) -> float:
    """Smallest distance, over every row that `run` sends, between what a router took and what it left."""
    import torch

    margins: list[float] = []

    def look(router: Any, arguments: tuple[Any, ...], _: object) -> None:
        rows = arguments[0].reshape(-1, HIDDEN).float()
        logits = rows @ router.weight.float().T
        if not hasattr(router, "e_score_correction_bias"):
            margins.append(_margin(logits.softmax(-1), 2))
            return
        scores = logits.sigmoid() + router.e_score_correction_bias
        n_groups = network.config.n_group
        if n_groups > 1:
            grouped = scores.view(len(rows), n_groups, -1)
            strength = grouped.topk(2, -1).values.sum(-1)
            margins.append(_margin(strength, 1))
            scores = grouped[torch.arange(len(rows)), strength.argmax(-1)]
        margins.append(_margin(scores, 2))

    routers = [module for name, module in network.named_modules() if name.endswith("mlp.gate")]
    handles = [router.register_forward_hook(look) for router in routers]
    run()
    for handle in handles:
        handle.remove()
    return min(margins)


def _margin(scores: Any, n_taken: int) -> float:
    ordered = scores.sort(-1, descending=True).values
    return float((ordered[:, n_taken - 1] - ordered[:, n_taken]).min())


def published_config(family: Family) -> dict[str, Any]:
    """config.json as the maker of the family would have it."""
    outer = {"architectures": [family.architecture], "model_type": family.model_type, "torch_dtype": "float32"}
    if not family.vision:
        return {**family.config, **outer}
    text = {**family.config, "architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2"}
    return {**outer, "text_config": text, "vision_config": dict(family.vision), "pad_token_id": 0}


def _draw(network: Any) -> None:
    """Weights that keep the size of what passes through, so that each layer adds as much as there is."""
    import torch

    with torch.no_grad():
        for name, weight in network.named_parameters():
            if weight.dim() == 1:
                weight.copy_(1 + 0.1 * torch.randn_like(weight) if "norm" in name else 0.1 * torch.randn_like(weight))
            elif "embed" in name:
                weight.copy_(torch.randn_like(weight))
            else:
                weight.copy_(torch.randn_like(weight) * 1.5 / weight.shape[-1] ** 0.5)
        for name, bias in network.named_buffers():
            if name.endswith("e_score_correction_bias"):
                bias.copy_(0.1 * torch.randn_like(bias))


def _load(directory: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}
