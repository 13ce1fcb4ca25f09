"""From chat messages to token ids and a loss mask, by the verifier's own tokenizer and chat template.

The mask is found from the template, never by searching for strings in the text:

- a template with `{% generation %}` says itself which tokens are the assistant's;
- otherwise the conversation before each assistant turn is rendered with the generation prompt, and up to the turn's
  end without. Each must be a prefix of the one full rendering (else the line is rejected); what lies between is the
  turn. What the template writes behind the token that ends a turn (ChatML's newline after `<|im_end|>`) is learned
  from two renderings that differ in their answer only, and left out. Nothing precedes a turn that comes first, and no
  template renders nothing: its start is where two renderings that differ in this turn only part.

So the mask covers what the model itself would emit after the generation prompt, **the turn-ending token included**.
Templates that rewrite past turns (Qwen3 drops old thoughts) still fit: the end of such a turn is its turn-ending token.
A token that straddles the start of a turn (a newline merged with the header's) is not the model's, so its mask is 0.

Leaves to `extractor.prompts` lengths, vocabulary and everything about files. Letters: T tokens of a sample.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from extractor.messages import Message
from extractor.quiet import transformers
from extractor.reasons import Rejected
from hsstore.errors import MissingExtraError, UsageError, extra_hint

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
# What Python raises inside a template that meets a conversation it was not written for.
_TEMPLATE_ERRORS = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
_PROBES = (
    "yes",
    "no",
)  # two answers that end with different letters: what renderings then share at their end is the template's


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    ids: npt.NDArray[np.int64]
    """[T]"""
    mask: npt.NDArray[np.uint8]
    """[T], 1 = assistant token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _TurnEnd:
    """What a template writes behind an answer."""

    text: str
    """All of it, e.g. `<|im_end|>\\n`."""
    furniture: int
    """Characters at its end that the model does not emit, e.g. 1 for the newline."""
    token: int
    """Id of the turn-ending token, -1 when the template has none."""


class ChatTokenizer:
    """A Hugging Face tokenizer and its chat template, as samples need them."""

    def __init__(self, tokenizer: Any, template_arguments: Mapping[str, Any] | None = None) -> None:
        self._tokenizer = tokenizer
        self._arguments = dict(template_arguments or {})
        self.template: str = _template_of(tokenizer)
        self._checked = False

    @classmethod
    def load(
        cls, model: Path, *, trust_remote_code: bool = False, template_arguments: Mapping[str, Any] | None = None
    ) -> ChatTokenizer:
        """Read the tokenizer of a model directory. Raises `UsageError` when it has none that can be read."""
        try:
            library = transformers()
        except ImportError as error:
            raise MissingExtraError(f"reading a tokenizer needs {error.name}", hint=extra_hint("hf")) from None
        try:
            tokenizer = library.AutoTokenizer.from_pretrained(
                str(model), local_files_only=True, trust_remote_code=trust_remote_code
            )
        except Exception as error:  # noqa: BLE001 - the boundary to a library that raises anything on foreign files
            first = first_line(error)
            raise UsageError(f"cannot read the tokenizer in {model}: {first}", hint=_TOKENIZER_HINT) from None
        return cls(tokenizer, template_arguments)

    @property
    def tokenizer(self) -> Any:
        """The tokenizer itself."""
        return self._tokenizer

    @property
    def turn_end_token(self) -> int:
        """Id of the token that ends a turn, -1 when the template has none."""
        return self._turn_end.token

    def encode_text(self, text: str) -> Tokens:
        """Plain text: every token is trained but the ones the tokenizer adds (a BOS)."""
        encoded = self._tokenizer(text, return_special_tokens_mask=True)
        ids = np.asarray(encoded["input_ids"], np.int64)
        return Tokens(ids=ids, mask=1 - np.asarray(encoded["special_tokens_mask"], np.uint8))

    def encode_chat(self, messages: Sequence[Message]) -> Tokens:
        """One conversation through the chat template. Raises `Rejected`."""
        if not self.template:
            raise UsageError(
                "the tokenizer has no chat template", hint="use lines with text, or input_ids and loss_mask"
            )
        self.check_template()
        if self.marks_generation:
            return self._encode_marked(messages)
        full = self.render(messages)
        text = _Tokenized(self._tokenizer, full)
        mask = np.zeros(len(text.ids), np.uint8)
        for first, last in self._turns(messages, text):
            mask[first:last] = 1
        return Tokens(ids=text.ids, mask=mask)

    def check_template(self) -> None:
        """Compile the template once: one that is no template at all is wrong for every line."""
        if self._checked:
            return
        import jinja2

        try:
            self._tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False, **self._arguments)
        except jinja2.TemplateSyntaxError as error:
            where = getattr(self._tokenizer, "name_or_path", "") or "the tokenizer"
            raise UsageError(
                f"the chat template of {where} is no template: {first_line(error)} (its line {error.lineno})",
                hint="correct chat_template.jinja or tokenizer_config.json, or use lines with input_ids and loss_mask",
            ) from None
        except (jinja2.TemplateError, *_TEMPLATE_ERRORS):
            pass  # it compiled; what it makes of a conversation is asked line by line
        self._checked = True

    @cached_property
    def marks_generation(self) -> bool:
        """Whether the template says itself which tokens are the assistant's."""
        return bool(_GENERATION.search(self.template))

    @cached_property
    def writes_the_date(self) -> bool:
        """Whether renderings depend on the day (Llama 3.2): a later resume would then see other ids."""
        return "strftime_now" in self.template and "date_string" not in self._arguments

    def render(self, messages: Sequence[Message], *, prompt: bool = False) -> str:
        """The template's text. Raises `Rejected` when the template refuses."""
        return str(self._apply(messages, add_generation_prompt=prompt, tokenize=False))

    def _encode_marked(self, messages: Sequence[Message]) -> Tokens:
        encoded = self._apply(messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        return Tokens(
            ids=np.asarray(encoded["input_ids"], np.int64), mask=np.asarray(encoded["assistant_masks"], np.uint8)
        )

    def _apply(self, messages: Sequence[Message], **how: Any) -> Any:
        import jinja2

        try:
            return self._tokenizer.apply_chat_template(list(messages), **how, **self._arguments)
        except (jinja2.TemplateError, *_TEMPLATE_ERRORS) as error:
            raise Rejected("template_refused", first_line(error)[:120]) from None

    def _turns(self, messages: Sequence[Message], text: _Tokenized) -> list[tuple[int, int]]:
        """Token range of every assistant turn."""
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        starts = [self._start(messages[:i], text.full, i) if i else self._first(messages, text.full) for i in turns]
        limits = [*starts[1:], len(text.full)][: len(turns)]
        return [
            (text.first_at(start), self._end(messages[: i + 1], text, start, limit))
            for i, start, limit in zip(turns, starts, limits, strict=True)
        ]

    def _start(self, before: Sequence[Message], full: str, turn: int) -> int:
        rendering = self.render(before, prompt=True)
        if not full.startswith(rendering):
            raise Rejected("template_not_prefix", f"the prompt of message {turn + 1} is no prefix of the conversation")
        return len(rendering)

    def _first(self, messages: Sequence[Message], full: str) -> int:
        """Start of a turn that nothing precedes, which no template can be asked to prompt for."""
        texts = {"content", "reasoning_content"} & messages[0].keys()
        one, two = (self.render([{**messages[0], **dict.fromkeys(texts, probe)}, *messages[1:]]) for probe in _PROBES)
        header = _common_suffix(one[::-1], two[::-1])[::-1]
        shown = all(text.startswith(probe, len(header)) for text, probe in zip((one, two), _PROBES, strict=True))
        if not shown or not full.startswith(header):
            raise Rejected("template_not_prefix", "where message 1 begins is not to be seen in the rendering")
        # What a template puts before an answer (Qwen3's empty thought) is the model's: only the prompt is not.
        at = header.rfind(self._prompt) if self._prompt else -1
        return at + len(self._prompt) if at >= 0 else len(header)

    @cached_property
    def _prompt(self) -> str:
        """The generation prompt, "" when the template has none."""
        question: list[Message] = [{"role": "user", "content": "hi"}]
        try:
            without, prompted = self.render(question), self.render(question, prompt=True)
        except Rejected:
            return ""
        return prompted.removeprefix(without) if prompted.startswith(without) else ""

    def _end(self, upto: Sequence[Message], text: _Tokenized, start: int, limit: int) -> int:
        """One past the last token of the turn that begins at character `start`."""
        rendering = self.render(upto)
        if text.full.startswith(rendering):
            ending = self._turn_end
            cut = ending.furniture if rendering.endswith(ending.text) else 0
            return text.count_until(len(rendering) - cut)
        first, last = text.first_at(start), text.count_until(limit)
        found = np.flatnonzero(text.ids[first:last] == self._turn_end.token)
        if not found.size:
            raise Rejected("template_not_prefix", f"message {len(upto)} is rendered differently by later messages")
        return first + int(found[0]) + 1

    @cached_property
    def _turn_end(self) -> _TurnEnd:
        question = {"role": "user", "content": "hi"}
        try:
            one, two = (self.render([question, {"role": "assistant", "content": probe}]) for probe in _PROBES)
        except Rejected:  # a template that refuses so plain a chat: nothing is known, nothing is left out
            return _TurnEnd(text="", furniture=0, token=-1)
        behind = _common_suffix(one, two)
        special = {i for i, t in self._tokenizer.added_tokens_decoder.items() if t.special}
        text = _Tokenized(self._tokenizer, behind)
        for position, token in enumerate(text.ids.tolist()):
            if token in special:
                return _TurnEnd(text=behind, furniture=len(behind) - text.end_of(position), token=token)
        return _TurnEnd(text=behind, furniture=0, token=-1)


class _Tokenized:
    """One rendering, its ids, and where characters lie among them."""

    def __init__(self, tokenizer: Any, full: str) -> None:
        self.full = full
        self._tokenizer = tokenizer
        fast = bool(tokenizer.is_fast)
        encoded = tokenizer(full, add_special_tokens=False, **({"return_offsets_mapping": True} if fast else {}))
        self.ids = np.asarray(encoded["input_ids"], np.int64)
        self._offsets = np.asarray(encoded["offset_mapping"], np.int64).reshape(-1, 2) if fast else None

    def first_at(self, character: int) -> int:
        """Index of the first token that begins at or after the character."""
        if self._offsets is None:
            return self._count(character)
        return int(np.searchsorted(self._offsets[:, 0], character, "left"))

    def count_until(self, character: int) -> int:
        """Number of tokens that end at or before the character."""
        if self._offsets is None:
            return self._count(character)
        return int(np.searchsorted(self._offsets[:, 1], character, "right"))

    def end_of(self, position: int) -> int:
        """Character behind a token."""
        if self._offsets is None:
            return len(self._tokenizer.decode(self.ids[: position + 1].tolist()))
        return int(self._offsets[position, 1])

    def _count(self, character: int) -> int:
        # Tokenizers without offsets (Kimi's tiktoken): the ids of the text so far must be a prefix of all ids.
        ids = self._tokenizer(self.full[:character], add_special_tokens=False)["input_ids"]
        if ids != self.ids[: len(ids)].tolist():
            raise Rejected("template_not_prefix", f"a token straddles character {character} of the rendering")
        return len(ids)


def _template_of(tokenizer: Any) -> str:
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, dict):  # named templates
        template = template.get("default", "")
    return template or ""


def first_line(error: Exception) -> str:
    """What a library said, in one line."""
    return str(error).strip().partition("\n")[0][:200] or type(error).__name__


def _common_suffix(one: str, two: str) -> str:
    n = 0
    while n < min(len(one), len(two)) and one[-1 - n] == two[-1 - n]:
        n += 1
    return one[len(one) - n :]


_TOKENIZER_HINT = "copy tokenizer.json and tokenizer_config.json into it, or use lines with input_ids and loss_mask"
