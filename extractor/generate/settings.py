"""What a user asks of `hsstore generate`, as records. Leaves its spelling to `extractor.generate.options`."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from extractor.modelfiles import json_object, read, wrong_field
from hsstore.errors import UsageError

Turns = Literal["all", "last"]
Reasoning = Literal["separate", "inline", "drop"]

_SEED_BITS = 31  # every engine takes that many


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are drawn; the same for every line but for the seed."""

    temperature: float
    """0 = always the likeliest token."""
    top_p: float
    top_k: int
    """0 = all tokens."""
    max_new_tokens: int
    """Of one answer, thoughts included."""
    seed: int
    stop: tuple[str, ...]
    """Strings that end an answer and do not belong to it."""

    def seed_of(self, line: int, turn: int) -> int:
        """Seed of one answer: a function of its place, so that it is the same whatever else runs beside it."""
        digest = hashlib.sha256(f"{self.seed}:{line}:{turn}".encode()).digest()
        return int.from_bytes(digest[:8], "little") >> (64 - _SEED_BITS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    model: str
    """Directory of the verifier, or a hub id in the local cache."""
    prompts: Path
    out: Path
    """File of JSON lines to make."""
    engine: str = "auto"
    """Of our own; unused with `urls`."""
    dtype: str = "auto"
    engine_options: dict[str, str] = field(default_factory=dict)
    trust_remote_code: bool = False
    weights_digest: Literal["full", "sampled"] | None = None
    """None = full, and none at all with `urls`."""
    urls: tuple[str, ...] = ()
    """Running servers that are asked instead of an engine of our own."""
    api: Literal["auto", "sglang", "openai"] = "auto"
    served_model: str = ""
    """Name of the model at an OpenAI-compatible server; "" = the only one that it serves."""
    token_file: Path | None = None
    """Holds the servers' bearer token; None = HSSTORE_TOKEN, or none."""
    server_wait_seconds: float = 600.0
    """How long the run waits while no server answers."""
    answer_seconds: float = 900.0
    """How long a server may take for one answer."""
    temperature: float | None = None
    """None = the model's generation_config.json, else 1; so are `top_p` and `top_k`."""
    top_p: float | None = None
    top_k: int | None = None
    max_new_tokens: int = 2048
    seed: int = 0
    stop: tuple[str, ...] = ()
    template_arguments: dict[str, Any] = field(default_factory=dict)
    turns: Turns = "all"
    reasoning: Reasoning = "separate"
    drop_truncated: bool = False
    batch: int = 16
    """Conversations at once in transformers."""
    in_flight: int = 256
    """Answers asked for and not yet there, in SGLang or at servers."""
    max_consecutive_errors: int | None = None
    failed_out: Path | None = None
    resume: bool = False

    @property
    def part(self) -> Path:
        """Answers so far, in the order in which they came."""
        return self.out.with_name(f"{self.out.name}.part")

    @property
    def meta(self) -> Path:
        return self.out.with_name(f"{self.out.name}.meta.json")

    @property
    def failures(self) -> Path:
        name = self.out.name.removesuffix(".jsonl")
        return self.failed_out or self.out.with_name(f"{name}.failed.jsonl")

    def sampling(self, model: Path) -> Sampling:
        """With what the model's makers recommend where the user said nothing. Raises `UsageError`."""
        for text in self.stop:
            if not text or text != text.encode(errors="replace").decode():
                raise UsageError(
                    f"--stop {text!a} is no text that can end an answer", hint="give one character or more"
                )
        defaults = recommended(model)
        top_k = self.top_k if self.top_k is not None else int(defaults.get("top_k", 0))
        return Sampling(
            temperature=self.temperature if self.temperature is not None else float(defaults.get("temperature", 1)),
            top_p=self.top_p if self.top_p is not None else float(defaults.get("top_p", 1)),
            top_k=max(0, top_k),  # -1 means the same in SGLang and vLLM
            max_new_tokens=self.max_new_tokens,
            seed=self.seed,
            stop=self.stop,
        )

    def parameters(self, sampling: Sampling) -> dict[str, Any]:
        """All that decides the answers and is no file: what a resume must share."""
        return asdict(sampling) | {
            "stop": list(sampling.stop),
            "template_arguments": dict(sorted(self.template_arguments.items())),
            "turns": self.turns,
            "reasoning": self.reasoning,
            "drop_truncated": self.drop_truncated,
        }


MOST_TEMPERATURE = 100
MOST_TOP_K = 1 << 24
_RANGES: dict[str, tuple[Callable[[float], bool], str]] = {
    "temperature": (lambda v: 0 <= v <= MOST_TEMPERATURE, f"a number from 0 to {MOST_TEMPERATURE}"),
    "top_p": (lambda v: 0 < v <= 1, "a number above 0, at most 1"),
    "top_k": (lambda v: -1 <= v <= MOST_TOP_K and v == int(v), f"a whole number from -1 to {MOST_TOP_K}"),
}
"""What `--temperature` and the others take; -1 in a file is what 0 is there."""


def recommended(model: Path) -> Mapping[str, float]:
    """Temperature, top_p and top_k of generation_config.json; nothing for a model without one."""
    file = model / "generation_config.json"
    if not file.is_file():
        return {}
    document = json_object(read(file), file)
    found = {name: document[name] for name in _RANGES if document.get(name) is not None}
    for name, value in found.items():
        fits, expected = _RANGES[name]
        if isinstance(value, bool) or not isinstance(value, int | float) or not fits(value):
            wrong_field(file, name, value, expected)
    return found
