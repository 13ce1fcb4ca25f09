"""Is this the run that the store was made by? The capture record of a run, and the differences that forbid a resume.

Rows of one store must all come from the same model, tokenizer, layers, engine and input, else nobody can say what it
holds. A renamed model directory or prompts file is no difference: digests decide.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path

from extractor.engines.base import EngineInfo
from extractor.verifier import Verifier
from extractor.weights import Mode
from extractor.words import counted
from hsstore.errors import ConflictError
from hsstore.modeldigest import SAMPLED_FLAG
from hsstore.records import Capture, InputSummary, Split, StoreHeader, spelled

_WORDS = {
    "weights_sha256": "model weights",
    "config_sha256": "model config.json",
    "tokenizer_sha256": "tokenizer",
    "chat_template_sha256": "chat template",
    "compute_dtype": "dtype",
    "engine_version": "engine version",
    "n_layers": "number of layers",
}
_PROMPTS = "prompts file"
_NAMES_ONLY = {"model", "revision"}
_DIGEST_FLAG, _SAMPLED = SAMPLED_FLAG


def capture_of(
    verifier: Verifier, layers: tuple[str, ...], weights_sha256: str, weights_digest: Mode, info: EngineInfo
) -> Capture:
    """The capture record of a run whose engine is up."""
    return Capture(
        model=verifier.name,
        architecture=verifier.architecture,
        revision=verifier.revision,
        weights_sha256=weights_sha256,
        config_sha256=verifier.config_sha256,
        tokenizer_sha256=verifier.tokenizer_sha256,
        chat_template_sha256=verifier.chat_template_sha256,
        layers=layers,
        layer_ids=spelled(layers),
        norm=info.norm,
        hidden_size=verifier.hidden_size,
        vocab_size=verifier.vocab_size,
        n_layers=verifier.n_layers,
        dtype="bfloat16",
        engine=info.engine,
        engine_version=info.version,
        compute_dtype=info.compute_dtype,
        flags=info.flags | ({_DIGEST_FLAG: _SAMPLED} if weights_digest == "sampled" else {}),
    )


def digest_mode(capture: Capture) -> Mode:
    """How the weights of a store were digested."""
    return "sampled" if capture.flags.get(_DIGEST_FLAG) == _SAMPLED else "full"


def info_before_start(old: Capture, engine: str, dtype: str) -> EngineInfo:
    """What the engine of a resume will say of itself, as far as it is known before it is up."""
    flags = {name: value for name, value in old.flags.items() if name != _DIGEST_FLAG}
    return EngineInfo(
        engine=engine, version=old.engine_version, norm=old.norm, compute_dtype=dtype, longest_tokens=0, flags=flags
    )


def capture_differences(old: Capture, new: Capture) -> list[str]:
    """`name: old → new` of everything that differs."""
    skip = {*_NAMES_ONLY, "flags", "layer_ids"}  # those follow from the layers
    out = []
    if digest_mode(old) != digest_mode(new):  # two digests of one model then differ and say nothing
        skip.add("weights_sha256")
        out.append(_line("--weights-digest", digest_mode(old), digest_mode(new)))
    for name in (field.name for field in dataclasses.fields(Capture)):
        if name not in skip:
            out.append(_line(_WORDS.get(name, name.replace("_", " ")), getattr(old, name), getattr(new, name)))
    for flag in sorted({*old.flags, *new.flags} - {_DIGEST_FLAG}):
        out.append(_line(f"engine setting {flag}", old.flags.get(flag, ""), new.flags.get(flag, "")))
    return [line for line in out if line]


def input_differences(old: InputSummary, new: InputSummary) -> list[str]:
    """The same for the prompts file and the options that decide its ids."""
    out = []
    if old.sha256 != new.sha256:
        out.append(
            f"{_PROMPTS}: {old.name} ({counted(old.lines, 'line')}, SHA-256 {old.sha256[:12]})"
            f" → {new.name} ({counted(new.lines, 'line')}, SHA-256 {new.sha256[:12]})"
        )
    for name in sorted({*old.options, *new.options}):
        label = "--" + name.replace("_", "-") if "." not in name else f"--template-arg {name.partition('.')[2]}"
        out.append(_line(label, old.options.get(name, "not given"), new.options.get(name, "not given")))
    return [line for line in out if line]


def header_differences(header: StoreHeader, split: Split, shard_rows: int | None) -> list[str]:
    """The same for the store's own settings."""
    return [
        line
        for line in (
            _line("--shard-rows", header.shard_rows, shard_rows or header.shard_rows),
            _line("--validation-fraction", header.split.validation_fraction, split.validation_fraction),
            _line("--split-salt", header.split.salt, split.salt),
        )
        if line
    ]


def refuse(store: Path, differences: Iterable[str]) -> None:
    """Raise `ConflictError` naming every difference, if there is one."""
    lines = list(differences)
    if lines:
        raise ConflictError(
            f"{store} was made by another run, resuming would mix two captures: {'; '.join(lines)}",
            hint="to grow the store by these prompts give --append, else the original ones or another --out"
            if all(line.startswith(_PROMPTS) for line in lines)
            else "give the original model, prompts and options, or another --out",
        )


def _line(label: str, old: object, new: object) -> str:
    return "" if old == new else f"{label}: {_show(old)} → {_show(new)}"


def _show(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    text = str(value)
    if len(text) == 64 and all(c in "0123456789abcdef" for c in text):
        return text[:12]  # a digest: enough to compare by eye
    return text or "none"
