"""What whoever answers is asked, and what comes back: one reply for every ask, in any order.

Leaves to `extractor.generate.loop` which asks are sent when, to `dialogue` what a reply means.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from extractor.chat import ChatTokenizer
from extractor.messages import Message
from hsstore.errors import IncompleteError

UNLIMITED = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceInfo:
    """What a source says of itself once it is up; becomes part of the sidecar."""

    engine: str
    """`sglang`, `transformers`, or what a server calls itself."""
    version: str
    compute_dtype: str
    """"" when a server does not say."""
    context_tokens: int
    """Prompt and answer together."""
    flags: dict[str, str]
    served: str = ""
    """What servers call their model; "" for an engine of our own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One answer that is wanted."""

    line: int
    turn: int
    """0-based, among the answers of its line."""
    messages: tuple[Message, ...]
    """The conversation so far."""
    prompt_ids: tuple[int, ...]
    """The same through the verifier's template, generation prompt included."""
    max_new_tokens: int
    seed: int

    @property
    def key(self) -> tuple[int, int]:
        return self.line, self.turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What came of an ask."""

    key: tuple[int, int]
    text: str = ""
    reasoning: str = ""
    """Thoughts that a server has taken out of the text."""
    ids: tuple[int, ...] | None = None
    """Tokens of the answer, the one that ended it included; None when a server gives none."""
    finish_reason: str = ""
    """`stop` or `length`."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    error: str = ""
    """A key of `extractor.generate.reasons.FAILED`; "" for an answer."""
    detail: str = ""


class OutOfPatienceError(IncompleteError):
    """The source itself has waited as long as it may: it is not started again."""


class Source(Protocol):
    """Whoever answers. Construct, `submit` and `collect` any number of times, `close`."""

    info: SourceInfo
    group: int
    """Lines that are answered together, always the same ones; 0 where each is for itself."""
    in_flight: int
    """Most asks that may be submitted and not collected."""

    def submit(self, ask: Ask) -> None:
        """Hand it over. Raises `IncompleteError` when the engine is lost."""
        ...

    def collect(self, on_tokens: Callable[[int], None]) -> list[Reply]:
        """Wait for replies, at least one. `on_tokens` hears now and then how many tokens there are since the call.

        Raises `IncompleteError` when the engine is lost; what was submitted is lost with it.
        """
        ...

    def restart(self) -> None:
        """Come up again after a loss. Raises `IncompleteError` when that fails."""
        ...

    def close(self) -> None: ...


def end_ids(model: Path, chat: ChatTokenizer) -> tuple[int, ...]:
    """Tokens that end an answer: those of the model's files, of its tokenizer, of its template."""
    found: set[Any] = {chat.turn_end_token, getattr(chat.tokenizer, "eos_token_id", None)}
    for name in ("generation_config.json", "config.json"):
        file = model / name
        if file.is_file():
            value = json.loads(file.read_bytes()).get("eos_token_id")
            found |= set(value) if isinstance(value, list) else {value}
    return tuple(sorted(i for i in found if type(i) is int and i >= 0))


def text_of(chat: ChatTokenizer, ids: Iterable[int], ends: tuple[int, ...]) -> str:
    """What tokens say, without the one that ends them."""
    kept = list(ids)
    if kept and kept[-1] in ends:
        kept.pop()
    return str(chat.tokenizer.decode(kept, skip_special_tokens=True, clean_up_tokenization_spaces=False))
