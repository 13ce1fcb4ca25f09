"""The shape of the drafter's decoder layer: written out, never derived in passing.

Responsible for: the rule that gives each family of verifiers its default layer, a `--draft-config` file that replaces
it, and the `LlamaConfig` both become. Leaves to `drafter` the model built from it.

The rule, by what the verifier's config.json says:

| verifier                                    | heads | kv heads | head_dim            | MLP | rotary                  |
|---------------------------------------------|-------|----------|---------------------|-----|-------------------------|
| plain attention (Llama, Qwen, SmolLM2 …)    | its   | its      | its, or H / heads   | its | its                     |
| latent attention (kv_lora_rank: DeepSeek-V3,| its   | = heads  | 128                 | its | its theta, no scaling   |
| Kimi-K2, Kimi-K2.5)                         |       |          |                     |     |                         |

Latent attention has no Llama-like head: its 192-wide queries, its one latent key and the 64 that transformers reports
as head_dim describe other matrices. 64 heads of 128 give the origin run's 807,403,520 parameters. Its YaRN scaling
comes with a softmax factor that Llama attention lacks, so only the base is taken over.
"""

from __future__ import annotations

import difflib
import reprlib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hsstore.errors import ConflictError, NotFoundError, UsageError
from trainer.verifier import JsonFields, VerifierFacts, is_number, load_object, rope_parameters

if TYPE_CHECKING:
    from transformers import LlamaConfig

LATENT_HEAD_DIM = 128

# What other trainers' draft configs carry besides the layer's own shape; checked elsewhere or without meaning here.
# fmt: off
IGNORED_KEYS = frozenset((
    "architectures", "attention_dropout", "auto_map", "bos_token_id", "draft_vocab_size", "dtype", "eagle_config",
    "eos_token_id", "initializer_range", "max_window_layers", "model_type", "num_aux_hidden_states", "pad_token_id",
    "pretraining_tp", "target_hidden_size", "target_model_type", "tie_word_embeddings", "torch_dtype",
    "transformers_version", "use_cache",
))
# fmt: on
# What transformers computes without parameters of its own: a prelu or xielu would be trained beside the layer.
ACTIVATIONS = frozenset(
    (
        "gelu",
        "gelu_10",
        "gelu_accurate",
        "gelu_fast",
        "gelu_new",
        "gelu_python",
        "gelu_python_tanh",
        "gelu_pytorch_tanh",
        "hardswish",
        "laplace",
        "leaky_relu",
        "linear",
        "mish",
        "quick_gelu",
        "relu",
        "relu2",
        "relu6",
        "sigmoid",
        "silu",
        "sqrtsoftplus",
        "swish",
        "tanh",
    )
)  # fmt: skip
# The rotary types of a Llama layer, with the numbers and the lists that each needs.
ROPE_TYPES: dict[str, tuple[str, ...]] = {
    "default": (), "linear": ("factor",), "dynamic": ("factor",), "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "longrope": ("short_factor", "long_factor"),
}  # fmt: skip
ROPE_LISTS = ("short_factor", "long_factor")
ROPE_NUMBERS = (
    "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings", "attention_factor",
    "beta_fast", "beta_slow", "mscale", "mscale_all_dim",
)  # fmt: skip
RULE_HINT = "give the layer with --draft-config FILE"
FILE_HINT = "the keys are those of a Llama config.json; docs/audit.md has their bounds"
ROPE_KEYS = ("rope_parameters", "rope_scaling", "rope_theta")


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftLayer:
    """A Llama decoder layer as eagle3.md §2 counts it: q, k, v read 2H."""

    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    rope_parameters: dict[str, Any]
    """`rope_type`, `rope_theta` and the scaling's fields."""
    rms_norm_eps: float
    max_position_embeddings: int
    hidden_act: str = "silu"
    attention_bias: bool = False
    mlp_bias: bool = False


def default_layer(facts: VerifierFacts) -> DraftLayer:
    """The layer by the rule in this module's docstring. Raises `UsageError` where the rule has no answer."""
    if facts.intermediate_size is None:
        raise UsageError(
            f"{facts.where} has no intermediate_size: the width of the drafter's MLP is a choice",
            hint=RULE_HINT,
        )
    latent = facts.kv_lora_rank is not None
    rope = {"rope_type": "default", "rope_theta": facts.rope_parameters["rope_theta"]}
    layer = DraftLayer(
        num_attention_heads=facts.num_attention_heads,
        num_key_value_heads=facts.num_attention_heads if latent else facts.num_key_value_heads,
        head_dim=LATENT_HEAD_DIM if latent else facts.head_dim or facts.hidden_size // facts.num_attention_heads,
        intermediate_size=facts.intermediate_size,
        rope_parameters=rope if latent else facts.rope_parameters,
        rms_norm_eps=facts.rms_norm_eps,
        max_position_embeddings=facts.max_position_embeddings,
        hidden_act=facts.hidden_act,
    )
    _check_layer(layer, facts.hidden_size, facts.where, RULE_HINT)
    return layer


def read_draft_config(path: str | Path, facts: VerifierFacts) -> DraftLayer:
    """Read a layer from JSON in the spelling of a Llama config.json; it must name every size.

    `hidden_size`, `vocab_size` and `num_hidden_layers`, where given, must be the verifier's, the verifier's and 1.
    Raises `UsageError` for an unknown or missing key, `ConflictError` for another verifier's sizes.
    """
    file = Path(path)
    if not file.exists():
        raise NotFoundError(f"no draft config at {file}")
    given = load_object(file)
    _check_keys(given, file)
    for name, expected in (
        ("hidden_size", facts.hidden_size),
        ("vocab_size", facts.vocab_size),
        ("num_hidden_layers", 1),
        ("model_type", "llama"),
    ):
        found = given.get(name, expected)
        if type(found) is not type(expected) or found != expected:
            raise ConflictError(f"{file}: {name} is {reprlib.repr(found)}, expected {expected!r} with {facts.where}")
    missing = [
        n for n in ("num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size") if n not in given
    ]
    if missing:
        raise UsageError(
            f"{file} lacks {', '.join(missing)}: the drafter's layer is written out, never derived", hint=FILE_HINT
        )
    layer = _layer_of(JsonFields(given, str(file), FILE_HINT), facts)
    _check_layer(layer, facts.hidden_size, str(file), FILE_HINT)
    return layer


def llama_config(facts: VerifierFacts, layer: DraftLayer, attention: str) -> LlamaConfig:
    """The layer as the one-layer `LlamaConfig` that speculators' class takes."""
    from transformers import LlamaConfig

    config = LlamaConfig(
        vocab_size=facts.vocab_size,
        hidden_size=facts.hidden_size,
        num_hidden_layers=1,
        tie_word_embeddings=False,
        pad_token_id=None,  # as padding_idx it would zero the gradient of, and initialise, a row that is the verifier's
        **{field.name: getattr(layer, field.name) for field in fields(layer)},
    )
    config._attn_implementation = attention
    return config


def _layer_of(given: JsonFields, facts: VerifierFacts) -> DraftLayer:
    has_rope = any(name in given.values for name in ROPE_KEYS)
    return DraftLayer(
        num_attention_heads=given.integer("num_attention_heads"),
        num_key_value_heads=given.integer("num_key_value_heads"),
        head_dim=given.integer("head_dim"),
        intermediate_size=given.integer("intermediate_size"),
        rope_parameters=rope_parameters(given) if has_rope else facts.rope_parameters,
        rms_norm_eps=given.number("rms_norm_eps", facts.rms_norm_eps, largest=1.0),
        max_position_embeddings=given.integer("max_position_embeddings", facts.max_position_embeddings),
        hidden_act=given.text("hidden_act", facts.hidden_act),
        attention_bias=given.flag("attention_bias", False),
        mlp_bias=given.flag("mlp_bias", False),
    )


def _check_layer(layer: DraftLayer, hidden_size: int, where: str, hint: str) -> None:
    """What the fields must be to one another, and the names that transformers looks up."""
    heads, kv_heads = layer.num_attention_heads, layer.num_key_value_heads
    if heads % kv_heads:
        raise UsageError(
            f"{where}: num_key_value_heads is {kv_heads}, expected a divisor of num_attention_heads {heads}", hint=hint
        )
    if hidden_size % heads:  # transformers insists, although head_dim is given
        raise UsageError(
            f"{where}: num_attention_heads is {heads}, expected a divisor of hidden_size {hidden_size}", hint=hint
        )
    if layer.head_dim < 2 or layer.head_dim % 2:
        raise UsageError(f"{where}: head_dim is {layer.head_dim}, expected an even number, for rotary pairs", hint=hint)
    if layer.hidden_act not in ACTIVATIONS:
        names = ", ".join(sorted(ACTIVATIONS))
        raise UsageError(f"{where}: hidden_act is {reprlib.repr(layer.hidden_act)}, expected one of {names}", hint=hint)
    _check_rope(JsonFields(layer.rope_parameters, f"{where}: rotary embedding", hint), layer.head_dim)


def _check_rope(rope: JsonFields, head_dim: int) -> None:
    needed = ROPE_TYPES.get(rope.values["rope_type"])
    if needed is None:
        raise rope.refuse("rope_type", f"one of {', '.join(ROPE_TYPES)}")
    for name in ROPE_NUMBERS:
        if name in needed or rope.values.get(name) is not None:
            rope.number(name)
    for name in ROPE_LISTS:
        value = rope.values.get(name)
        if name not in needed and value is None:
            continue
        if not isinstance(value, list) or len(value) != head_dim // 2 or not all(is_number(x) and x > 0 for x in value):
            raise rope.refuse(name, f"a list of {head_dim // 2} positive numbers, half of head_dim")
    if rope.values["rope_type"] == "llama3" and rope.values["low_freq_factor"] >= rope.values["high_freq_factor"]:
        raise rope.refuse("low_freq_factor", "less than high_freq_factor")


def _check_keys(given: dict[str, Any], file: Path) -> None:
    known = {field.name for field in fields(DraftLayer)} | set(ROPE_KEYS)
    known |= {"hidden_size", "vocab_size", "num_hidden_layers"}
    for name in given:
        if name not in known and name not in IGNORED_KEYS:
            near = difflib.get_close_matches(name, sorted(known), n=1)
            raise UsageError(
                f"{file}: unknown key {reprlib.repr(name)}", hint=f"did you mean {near[0]}?" if near else FILE_HINT
            )
