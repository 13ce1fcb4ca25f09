"""What a model directory says of itself: sizes, digests, its tokenizer and template. Reads files, runs nothing.

Responsible for finding the directory behind `--model`, reading config.json (nested `text_config` too) and naming
what is missing before any engine starts. Leaves to `extractor.weights` the digest of the weights, to
`extractor.chat` the tokenizer, to the engines the model itself.

Letters: n decoder layers, H hidden size.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from extractor.modelfiles import COMPLETE, json_object, read, whole_number, wrong_field
from hsstore.errors import MissingExtraError, NotFoundError, UsageError, extra_hint
from hsstore.modeldigest import tokenizer_sha256

_NESTED = ("text_config", "llm_config", "language_config")
# Far beyond any model there is: what lies above is a broken file, and would ask for absurd memory later on.
_MOST_LAYERS = 10_000
_WIDEST = 1 << 20
_LARGEST_VOCABULARY = 1 << 24
_LONGEST_CONTEXT = (1 << 31) - 1
_DTYPES = ("bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2")
_LONGEST_LAYER_NUMBER = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class Verifier:
    """A model directory, read."""

    path: Path
    name: str
    """Hub id, or last component of the directory."""
    revision: str
    """Hub revision, "" for a plain directory."""
    architecture: str
    n_layers: int
    """n"""
    hidden_size: int
    """H"""
    vocab_size: int
    context_tokens: int
    """Longest context by its config, 0 when the config does not say."""
    dtype: str
    """dtype of the checkpoint by its config, "" when the config does not say."""
    config_sha256: str
    tokenizer_sha256: str
    """"" without a tokenizer: prompts must then be ids."""
    chat_template_sha256: str
    """"" without a template."""


def read_verifier(model: str) -> Verifier:
    """Read `--model`: a directory, or a hub id that the local cache holds.

    Raises `NotFoundError` when there is none, `UsageError` when it is no language model that can be captured.
    """
    path, name, revision = _locate(model)
    file = path / "config.json"
    raw = read(file, f"{path} is no model directory: it has no config.json")
    config = _language_config(json_object(raw, file), path)
    _check_tokenizer(path)
    return Verifier(
        path=path,
        name=name,
        revision=revision,
        architecture=_architecture(config, file),
        n_layers=_size(config, file, ("num_hidden_layers", "n_layer"), _MOST_LAYERS),
        hidden_size=_size(config, file, ("hidden_size", "n_embd"), _WIDEST),
        vocab_size=_size(config, file, ("vocab_size",), _LARGEST_VOCABULARY),
        context_tokens=whole_number(config, file, ("max_position_embeddings", "n_positions"), _LONGEST_CONTEXT) or 0,
        dtype=_dtype(config, file),
        config_sha256=hashlib.sha256(raw).hexdigest(),
        tokenizer_sha256=tokenizer_sha256(path),
        chat_template_sha256=_chat_template_sha256(path),
    )


def _locate(model: str) -> tuple[Path, str, str]:
    path = Path(model).expanduser()
    if path.is_dir():
        path = path.resolve()
        if path.parent.name == "snapshots" and path.parent.parent.name.startswith("models--"):  # the hub's cache
            return path, path.parent.parent.name.removeprefix("models--").replace("--", "/"), path.name
        return path, path.name, ""
    if path.exists():
        raise UsageError(f"{model} is a file, expected a model directory with config.json and *.safetensors")
    cached = _cached(model)
    if cached is None:
        hint = f"download it with `hf download {model} --local-dir DIR` and give --model DIR" if _hub_id(model) else ""
        raise NotFoundError(f"there is no model directory {model}", hint=hint)
    return cached, model, cached.name


def _hub_id(model: str) -> bool:
    return model.count("/") == 1 and not model.startswith((".", "/", "~"))


def _cached(model: str) -> Path | None:
    """Snapshot of a hub id in the local cache, without asking the network."""
    if not _hub_id(model):
        return None
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
    except ImportError:
        raise MissingExtraError(
            f"{model} is no directory; hub ids need huggingface_hub", hint=extra_hint("hf")
        ) from None
    try:
        return Path(snapshot_download(model, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        return None


def _language_config(config: dict[str, Any], path: Path) -> Mapping[str, Any]:
    """The part that describes the decoder, with what only the outer part says filled in."""
    for key in _NESTED:
        if isinstance(config.get(key), dict):
            # null inside says nothing, where the outer part may say something
            inner = {name: value for name, value in config[key].items() if value is not None}
            return {**config, **inner, "architectures": config.get("architectures")}
    if config.get("is_encoder_decoder"):
        raise UsageError(f"{path} is an encoder-decoder model, expected a decoder-only language model")
    return config


def _size(config: Mapping[str, Any], file: Path, names: tuple[str, ...], maximum: int) -> int:
    value = whole_number(config, file, names, maximum)
    if value is None:
        raise UsageError(f"{file} has no {names[0]}, expected a decoder-only language model", hint=COMPLETE)
    return value


def _architecture(config: Mapping[str, Any], file: Path) -> str:
    names = config.get("architectures") or ["unknown"]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        wrong_field(file, "architectures", names, "a list of class names")
    return str(names[0])


def _dtype(config: Mapping[str, Any], file: Path) -> str:
    name = "torch_dtype" if config.get("dtype") is None else "dtype"
    value = config.get(name)
    if value is None or value == "auto":
        return ""
    if not isinstance(value, str) or value.removeprefix("torch.") not in _DTYPES:
        wrong_field(file, name, value, f"one of {', '.join(_DTYPES)}")
    return value.removeprefix("torch.")


def _check_tokenizer(path: Path) -> None:
    """Raise `UsageError` for a tokenizer.json that is none."""
    whole = path / "tokenizer.json"
    if not whole.is_file():
        return
    try:
        msgspec.json.decode(read(whole), type=dict[str, msgspec.Raw])  # that it is an object; 10 MB take milliseconds
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise UsageError(f"{whole} is no tokenizer: {str(error)[:120]}", hint=COMPLETE) from None


def _chat_template_sha256(path: Path) -> str:
    """SHA-256 of the chat template, from its own file or from tokenizer_config.json; "" without one."""
    file = path / "tokenizer_config.json"
    template = json_object(read(file), file).get("chat_template") if file.is_file() else None
    if isinstance(template, list) and all(isinstance(named, dict) for named in template):
        template = next((named.get("template") for named in template if named.get("name") == "default"), None)
    if template is not None and not isinstance(template, str):
        wrong_field(file, "chat_template", template, "a string, or a list of named templates")
    if (path / "chat_template.jinja").is_file():
        return hashlib.sha256(read(path / "chat_template.jinja")).hexdigest()
    # A lone surrogate is no text, but its digest exists; what the tokenizer makes of it is seen when it is used.
    return hashlib.sha256(template.encode(errors="surrogatepass")).hexdigest() if template else ""


def parse_layers(text: str, verifier: Verifier) -> tuple[str, ...]:
    """`eagle3`, or comma-separated k of `after_k`, to state names in ascending order, `final` always last.

    Raises `UsageError` naming what the model has.
    """
    n = verifier.n_layers
    if text.strip().lower() == "eagle3":
        ks = [2, n // 2, n - 3]
        if not 2 < n // 2 < n - 3:
            raise UsageError(
                f"eagle3 means after_2, after_{n // 2} and after_{n - 3} for the {n} decoder layers of {verifier.name}:"
                " no three ascending layers",
                hint="name them, e.g. --layers 1,2",
            )
    else:
        ks = [_layer(part.strip(), n) for part in text.split(",")]
    if len(set(ks)) != len(ks):
        raise UsageError(f"--layers {_short(text)} names a layer twice", hint="name each layer once")
    return (*(f"after_{k}" for k in sorted(ks)), "final")


def _layer(text: str, n: int) -> int:
    number = text.removeprefix("after_")
    if not (number.isascii() and number.isdigit() and len(number) <= _LONGEST_LAYER_NUMBER):
        raise UsageError(
            f"--layers takes eagle3 or numbers like 2,15,27, found {_short(text)!r}",
            hint=f"give numbers from 0 to {n - 1}",
        )
    k = int(number)
    if k >= n:
        what = "the state after the last layer is `final`, always captured" if k == n else f"it has {n} decoder layers"
        raise UsageError(
            f"after_{k} is no layer between the model's own: {what}", hint=f"give numbers from 0 to {n - 1}"
        )
    return k


def _short(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:40]}…"
