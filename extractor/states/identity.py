"""What the capture record says of its verifier against the model directory that was given: sizes and digests.

A difference is named as what it is (other weights, another tokenizer). What it did to the states the numbers say; this
only saves the guessing.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from typing import Any, Literal

from extractor.fingerprint import digest_mode
from extractor.modelfiles import json_object, read
from extractor.states.finding import Finding, damage, note
from extractor.verifier import Verifier
from extractor.weights import weight_files, weights_bytes
from hsstore.console import human_bytes
from hsstore.modeldigest import weights_sha256
from hsstore.records import Capture

MOST_BYTES = 20_000_000_000  # a quarter of a minute; more is digested when asked
Digest = Literal["auto", "always", "never"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    equal: tuple[str, ...]
    """What agrees."""
    findings: tuple[Finding, ...]
    fits: bool
    """Whether the sizes are the same, so that numbers can be compared at all."""


def compare(capture: Capture, verifier: Verifier, digest: Digest = "auto") -> Identity:
    findings, equal = [], []
    sizes = [
        ("hidden size", capture.hidden_size, verifier.hidden_size),
        ("decoder layers", capture.n_layers, verifier.n_layers),
        ("vocabulary", capture.vocab_size, verifier.vocab_size),
    ]
    other = [f"{name} {stored}, the model {found}" for name, stored, found in sizes if stored != found]
    if other:
        findings.append(damage("model", f"the store has {'; '.join(other)}: captured from another model"))
    for kind, stored, found in (
        ("weights", capture.weights_sha256, _weights(capture, verifier, digest)),
        ("config", capture.config_sha256, _config(capture, verifier)),
        ("tokenizer", capture.tokenizer_sha256, verifier.tokenizer_sha256),
        ("template", capture.chat_template_sha256, verifier.chat_template_sha256),
    ):
        if kind == "template" and not stored and not found:
            continue
        if stored and stored == found:
            equal.append(_WORDS[kind])
        elif kind == "tokenizer" and stored and not found:
            findings.append(note("digest", "tokenizer not compared: the model directory has none"))
        elif unknown := found.partition(":")[2] or ("" if stored else "the store does not say what it was"):
            findings.append(note("digest", f"{_WORDS[kind]} not compared: {unknown}"))
        else:
            say = note if kind == "template" else damage
            findings.append(say(kind, f"{_OTHERS[kind]} than the store's: {_short(stored)} → {_short(found)}"))
    return Identity(equal=tuple(equal), findings=tuple(findings), fits=not other)


def settled(found: Identity) -> Identity:
    """After a forward that found every state right: the same model in other files is no damage."""
    same = "the forward of the same ids finds all states right: the same model in other files"
    return replace(
        found,
        findings=tuple(
            note("digest", f"{f.detail}; {same}") if f.severity == "damage" and f.kind in ("weights", "config") else f
            for f in found.findings
        ),
    )


def _config(capture: Capture, verifier: Verifier) -> str:
    """The stored digest when config.json, written again as libraries write it, has that one; its own otherwise."""
    file = verifier.path / "config.json"
    config = json_object(read(file), file)
    for style in _STYLES:
        if hashlib.sha256((json.dumps(config, **style) + "\n").encode()).hexdigest() == capture.config_sha256:
            return capture.config_sha256
    return verifier.config_sha256


_STYLES: tuple[dict[str, Any], ...] = ({"indent": 2, "sort_keys": True}, {"indent": 2}, {"indent": 4})


_WORDS = {"weights": "weights", "config": "config.json", "tokenizer": "tokenizer", "template": "chat template"}
_OTHERS = {
    "weights": "the model directory has other weights (another model or revision)",
    "config": "the model directory has another config.json",
    "tokenizer": "the model directory has another tokenizer",
    "template": "the model directory has another chat template",
}


def _weights(capture: Capture, verifier: Verifier, digest: Digest) -> str:
    """Their digest, or `:reason` why there is none."""
    files = weight_files(verifier.path)
    size, sampled = weights_bytes(files), digest_mode(capture) == "sampled"
    if not capture.weights_sha256:
        return ""
    if digest == "never":
        return ":left out by --weights-digest never"
    if digest == "auto" and not sampled and size > MOST_BYTES:
        return f":they have {human_bytes(size)}, --weights-digest always reads them"
    return weights_sha256(files, sampled=sampled)


def _short(digest: str) -> str:
    return digest[:12] or "none"
