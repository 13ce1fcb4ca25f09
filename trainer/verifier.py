"""What a drafter takes from its verifier: a few facts of its config.json and three tensors of its checkpoint.

Responsible for: reading config.json as plain JSON (flat, or nested under `text_config`), finding the embedding, the
head and the final norm under the names checkpoints use, and reading only those. The verifier itself is never built.
Leaves to `drafter` what the facts mean for the drafter's layer.

Letters: V verifier vocabulary, V_d draft vocabulary, H hidden size.
"""

from __future__ import annotations

import json
import math
import reprlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hsstore.errors import ConflictError, DamagedError, MissingExtraError, NotFoundError, UsageError, extra_hint

if TYPE_CHECKING:
    import torch

# Where checkpoints keep the language model: plain models, Kimi-K2.5 and other wrapped ones, newer multimodal ones.
PREFIXES = ("model.", "language_model.model.", "model.language_model.")
HEAD_NAMES = ("lm_head.weight", "language_model.lm_head.weight", "model.lm_head.weight")
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
# Far above every model there is, far below what torch cannot count.
LARGEST_SIZE = 2**20
LARGEST = {
    "vocab_size": 2**24, "num_hidden_layers": 2**14, "num_attention_heads": 2**16, "num_key_value_heads": 2**16,
    "head_dim": 2**16, "max_position_embeddings": 2**31,
}  # fmt: skip
CONFIG_HINT = "take config.json as the model's publisher wrote it"


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifierFacts:
    """The verifier's config.json, reduced to what a drafter needs; values as written there, nothing derived."""

    where: str
    """File they were read from, for messages."""
    model_type: str
    """`model_type` of the language model (of `text_config` where there is one)."""
    architectures: tuple[str, ...]
    hidden_size: int
    """H."""
    vocab_size: int
    """V."""
    n_layers: int
    rms_norm_eps: float
    num_attention_heads: int
    num_key_value_heads: int
    """Equal to num_attention_heads when config.json has none."""
    head_dim: int | None
    """None when config.json has none."""
    intermediate_size: int | None
    """Width of the dense MLP; None when config.json has none."""
    kv_lora_rank: int | None
    """Set for multi-head latent attention (DeepSeek-V3, Kimi-K2), whose head sizes say nothing about a Llama layer."""
    hidden_act: str
    max_position_embeddings: int
    rope_parameters: dict[str, Any]
    """`rope_type`, `rope_theta` and the scaling's own fields, in the spelling of transformers 5."""
    tied: bool | None
    """`tie_word_embeddings`; None when config.json has none: then the checkpoint decides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPlace:
    """Where one tensor of the checkpoint lies."""

    path: Path
    """Its safetensors file."""
    name: str
    """Its name in the file."""
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.path.name}: {self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifierPlaces:
    """The three tensors, located by the files' headers alone."""

    embed: TensorPlace
    lm_head: TensorPlace
    """The embedding's place when the model is tied."""
    norm: TensorPlace
    tied: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifierWeights:
    """The verifier's part of a drafter, in the checkpoint's dtype, on the CPU."""

    facts: VerifierFacts
    places: VerifierPlaces
    embed: torch.Tensor
    """[V, H]"""
    lm_head: torch.Tensor
    """[V, H], or [V_d, H] when rows were selected."""
    norm: torch.Tensor
    """[H]"""


def read_config(path: str | Path) -> VerifierFacts:
    """Read the facts from a config.json or from the directory that holds one."""
    file = _config_file(Path(path))
    outer = load_object(file)
    inner = outer.get("text_config", outer)
    if not isinstance(inner, dict):
        raise UsageError(f"{file}: text_config is {type(inner).__name__}, expected an object")
    given = {name: value for name, value in inner.items() if value is not None}
    fields = JsonFields(given, str(file), CONFIG_HINT)
    heads = _required(fields, "num_attention_heads", nested=inner is not outer)
    return VerifierFacts(
        where=str(file),
        model_type=fields.text("model_type", ""),
        architectures=_architectures(outer, inner, file),
        hidden_size=_required(fields, "hidden_size", nested=inner is not outer),
        vocab_size=_required(fields, "vocab_size", nested=inner is not outer),
        n_layers=_required(fields, "num_hidden_layers", nested=inner is not outer),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6, largest=1.0),
        num_attention_heads=heads,
        num_key_value_heads=fields.integer("num_key_value_heads", heads),
        head_dim=_optional(fields, "head_dim"),
        intermediate_size=_optional(fields, "intermediate_size"),
        kv_lora_rank=_optional(fields, "kv_lora_rank"),
        hidden_act=fields.text("hidden_act", "silu"),
        max_position_embeddings=fields.integer("max_position_embeddings", 2048),
        rope_parameters=rope_parameters(fields),
        tied=_tied(outer, inner, file),
    )


def rope_parameters(fields: JsonFields) -> dict[str, Any]:
    """The rotary embedding of a config in one spelling: transformers 5's, or 4's `rope_theta` and `rope_scaling`.

    Checks the shape and the base; what a type needs besides is for `draft_layer`, which may not use it at all.
    """
    name = "rope_parameters" if fields.values.get("rope_parameters") else "rope_scaling"
    scaling = fields.values.get(name)
    if scaling is not None and not isinstance(scaling, dict):
        raise fields.refuse(name, "an object")
    found = dict(scaling or {})
    found.setdefault("rope_type", found.pop("type", "default"))
    inner = JsonFields(found, f"{fields.where}: {name}", fields.hint)
    found["rope_type"] = inner.text("rope_type", "default")
    found["rope_theta"] = inner.number("rope_theta") if "rope_theta" in found else fields.number("rope_theta", 10000.0)
    return found


def locate(path: str | Path, facts: VerifierFacts) -> VerifierPlaces:
    """Find the three tensors and check their shapes, reading nothing but the files' headers."""
    directory = _model_directory(Path(path))
    names = _weight_map(directory)
    embed_name = _first(names, [p + "embed_tokens.weight" for p in PREFIXES], directory, "input embedding")
    norm_name = _first(names, [p + "norm.weight" for p in PREFIXES], directory, "final norm")
    head_name = next((name for name in HEAD_NAMES if name in names), None)
    if head_name is None and facts.tied is False:
        raise NotFoundError(
            f"{directory} has no {HEAD_NAMES[0]} although {facts.where} says tie_word_embeddings is false"
        )
    tied = bool(facts.tied) or head_name is None
    if head_name is None or tied:  # an engine that ties never reads a head the file may still carry
        head_name = embed_name
    matrix, vector = (facts.vocab_size, facts.hidden_size), (facts.hidden_size,)
    return VerifierPlaces(
        embed=_place(directory, names, embed_name, matrix),
        lm_head=_place(directory, names, head_name, matrix),
        norm=_place(directory, names, norm_name, vector),
        tied=tied,
    )


def load_verifier(path: str | Path, *, t2d: Any = None) -> VerifierWeights:
    """Read embedding, head and final norm. With `t2d` (bool [V]) only those rows of the head are kept."""
    facts = read_config(path)
    places = locate(path, facts)
    embed = _read(places.embed)
    head = embed if places.tied else _read(places.lm_head)
    if t2d is not None:
        import torch

        head = head[torch.as_tensor(t2d, dtype=torch.bool)]
    return VerifierWeights(facts=facts, places=places, embed=embed, lm_head=head, norm=_read(places.norm))


@dataclass(frozen=True, slots=True)
class JsonFields:
    """Typed access to a JSON object with messages that name the file and the field. Nothing is converted.

    A method without a default refuses a missing field as it refuses one of another type.
    """

    values: dict[str, Any]
    where: str
    hint: str

    def integer(self, name: str, default: int | None = None) -> int:
        """A positive integer up to the field's entry in `LARGEST`."""
        value, largest = self.values.get(name, default), LARGEST.get(name, LARGEST_SIZE)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= largest:
            raise self.refuse(name, f"a positive integer up to {largest:,}")
        return value

    def number(self, name: str, default: float | None = None, *, largest: float = 1e30) -> float:
        """A finite positive number."""
        value = self.values.get(name, default)
        if not is_number(value) or not 0 < value <= largest:
            raise self.refuse(name, f"a positive number up to {largest:g}")
        return float(value)

    def text(self, name: str, default: str) -> str:
        value = self.values.get(name, default)
        if not isinstance(value, str):
            raise self.refuse(name, "a string")
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self.values.get(name, default)
        if not isinstance(value, bool):
            raise self.refuse(name, "true or false")
        return value

    def refuse(self, name: str, expected: str) -> UsageError:
        """The error for a field that is not what was expected, to be raised."""
        found = f"is {reprlib.repr(self.values[name])}" if name in self.values else "is missing"
        return UsageError(f"{self.where}: {name} {found}, expected {expected}", hint=self.hint)


def is_number(value: Any) -> bool:
    """Whether a JSON value is a finite number; Python's json also reads NaN, Infinity and integers no float holds."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) <= 1e300 if isinstance(value, int) else math.isfinite(value)


def load_object(file: Path) -> dict[str, Any]:
    """The object in a JSON file."""
    try:
        value = json.loads(file.read_bytes())
    except RecursionError:
        raise UsageError(f"{file} nests its JSON too deeply to be a config", hint=CONFIG_HINT) from None
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror}", hint="name a readable JSON file") from None
    except ValueError as error:  # not JSON, not UTF-8, or an integer of thousands of digits
        raise UsageError(f"{file} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise UsageError(f"{file} holds a JSON {type(value).__name__}, expected an object")
    return value


def _required(fields: JsonFields, name: str, *, nested: bool) -> int:
    if name not in fields.values:
        also = " (nor in its text_config)" if nested else ""
        raise UsageError(
            f"{fields.where} has no {name}{also}: it is not the config.json of a language model this version knows",
            hint=CONFIG_HINT,
        )
    return fields.integer(name)


def _optional(fields: JsonFields, name: str) -> int | None:
    return fields.integer(name) if name in fields.values else None


def _architectures(outer: dict[str, Any], inner: dict[str, Any], file: Path) -> tuple[str, ...]:
    value = outer.get("architectures") or inner.get("architectures") or []
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise JsonFields({"architectures": value}, str(file), CONFIG_HINT).refuse("architectures", "a list of strings")
    return tuple(value)


def _tied(outer: dict[str, Any], inner: dict[str, Any], file: Path) -> bool | None:
    """The wrapper's word counts where both speak: it is the one the engines read."""
    name = "tie_word_embeddings"
    value = outer.get(name, inner.get(name))
    return None if value is None else JsonFields({name: value}, str(file), CONFIG_HINT).flag(name, False)


def _config_file(path: Path) -> Path:
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        raise NotFoundError(
            f"no config.json at {path}; a verifier is a local directory as transformers saves it",
            hint="download the model first; hub ids are not resolved here",
        )
    return path


def _model_directory(path: Path) -> Path:
    if not path.is_dir():
        raise NotFoundError(f"{path} is not a directory with a model's weights")
    return path


def _weight_map(directory: Path) -> dict[str, str]:
    """File name by tensor name, from the index or from the only file's header."""
    index = directory / INDEX_NAME
    if index.is_file():
        found = load_object(index).get("weight_map")
        if not isinstance(found, dict):
            raise DamagedError(f"{index} has no weight_map")
        return found
    single = directory / SINGLE_NAME
    if not single.is_file():
        raise NotFoundError(f"{directory} has neither {INDEX_NAME} nor {SINGLE_NAME}: only safetensors are read")
    with _open(single) as file:
        return dict.fromkeys(file.keys(), SINGLE_NAME)


def _first(names: dict[str, str], candidates: list[str], directory: Path, what: str) -> str:
    for name in candidates:
        if name in names:
            return name
    raise NotFoundError(f"{directory} has no {what}: none of {', '.join(candidates)} is among its {len(names)} tensors")


def _place(directory: Path, names: dict[str, str], name: str, expected: tuple[int, ...]) -> TensorPlace:
    path = directory / names[name]
    if not path.is_file():
        raise NotFoundError(f"{path} is missing; {INDEX_NAME} says it holds {name}")
    with _open(path) as file:
        if name not in file.keys():  # noqa: SIM118 (safe_open is no mapping)
            raise DamagedError(f"{path} does not hold {name}; {INDEX_NAME} says it does")
        shape = tuple(file.get_slice(name).get_shape())
    if shape != expected:
        raise ConflictError(
            f"{path}: {name} has shape {list(shape)}, expected {list(expected)} from {directory / 'config.json'}"
        )
    return TensorPlace(path=path, name=name, shape=shape)


def _read(place: TensorPlace) -> torch.Tensor:
    with _open(place.path) as file:
        tensor: torch.Tensor = file.get_tensor(place.name)
    return tensor


def _open(path: Path) -> Any:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise MissingExtraError("reading a verifier needs safetensors and torch", hint=extra_hint("train")) from None
    try:
        return safe_open(path, framework="pt", device="cpu")
    except SafetensorError as error:
        raise DamagedError(f"{path} is not a safetensors file: {error}") from None
