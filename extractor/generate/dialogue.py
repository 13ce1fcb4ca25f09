"""One line on its way through the verifier: its script, what was said so far, and what it becomes in the end.

Knows templates and tokens, but no engine: `next_ask` says what is wanted, `take` takes what came. Leaves scheduling to
`loop`, files to `journal`.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from extractor.chat import ChatTokenizer
from extractor.generate.conversation import answer_message
from extractor.generate.scan import Line
from extractor.generate.settings import Reasoning, Sampling
from extractor.generate.sources.base import Ask, Reply
from extractor.messages import Message
from extractor.reasons import Rejected
from extractor.report import Failure

# What JSON leaves as it is and Python's str.splitlines, for one, takes for the end of a line.
_LINE_ENDS = {ord(c): f"\\u{ord(c):04x}" for c in "\x85\u2028\u2029"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What holds for every line."""

    chat: ChatTokenizer
    sampling: Sampling
    context_tokens: int
    reasoning: Reasoning
    drop_truncated: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A line with its answers."""

    line: int
    data: bytes
    """The JSON line, without its newline."""
    truncated: bool
    inexact: int
    """Answers that the template, given them back, renders as other tokens than the verifier said."""
    tokens: int


class Dialogue:
    def __init__(self, line: Line, rules: Rules, *, again: bool = False) -> None:
        """`again`: it is answered for its group's sake only, what becomes of it is there already."""
        self.number, self.again = line.number, again
        self._document, self._script, self._rules = line.document, deque(line.script), rules
        self._spoken: list[Message] = []
        self._turns: list[dict[str, Any]] = []
        self._ask: Ask | None = None

    def next_ask(self) -> Ask | Written | Failure:
        """What is wanted next, or what has become of the line."""
        while self._script:
            message = self._script.popleft()
            if message is None:
                return self._question()
            self._spoken.append(message)
        return self._written()

    def _question(self) -> Ask | Failure:
        rules = self._rules
        try:
            ids = token_ids(rules.chat, self._spoken, prompt=True)
        except Rejected as r:
            return self._skipped(r.reason, r.detail)
        room = rules.context_tokens - len(ids)
        if room < 1:
            return self._skipped(
                "prompt_too_long", f"answer {len(self._turns) + 1}: {len(ids)} tokens, context {rules.context_tokens}"
            )
        self._ask = Ask(
            line=self.number,
            turn=len(self._turns),
            messages=tuple(self._spoken),
            prompt_ids=tuple(ids),
            max_new_tokens=min(rules.sampling.max_new_tokens, room),
            seed=rules.sampling.seed_of(self.number, len(self._turns)),
        )
        return self._ask

    def take(self, reply: Reply) -> Failure | None:
        """Take an answer; a failure ends the line."""
        assert self._ask is not None
        assert reply.key == self._ask.key
        which = f"answer {len(self._turns) + 1}"
        if reply.error:
            return Failure(
                line=self.number, status="failed", reason=reply.error, detail=f"{which}: {reply.detail}"[:300]
            )
        cut = reply.finish_reason == "length"
        if cut and self._rules.drop_truncated:
            return self._skipped("truncated", f"{which}: {reply.completion_tokens} tokens")
        message = answer_message(reply.text, reply.reasoning, self._rules.reasoning)
        if not message["content"].strip() and not cut:
            return self._skipped("empty_answer", which)
        if not message["content"].strip() and not message.get("reasoning_content", "").strip():
            return self._skipped("empty_answer", f"{which}: {reply.completion_tokens} tokens without text")
        self._spoken.append(message)
        turn = {
            "message": len(self._spoken) - 1,
            "finish_reason": reply.finish_reason,
            "seed": self._ask.seed,
            "prompt_tokens": reply.prompt_tokens,
            "completion_tokens": reply.completion_tokens,
        }
        exact = self._is_exact(self._ask, reply)
        self._turns.append(turn if exact is None else turn | {"exact": exact})
        return None

    def _is_exact(self, ask: Ask, reply: Reply) -> bool | None:
        """Whether the extraction will see the tokens that the verifier said; None when these are not known."""
        if reply.ids is None:
            return None
        said = [*ask.prompt_ids, *reply.ids]
        try:
            return token_ids(self._rules.chat, self._spoken, prompt=False)[: len(said)] == said
        except Rejected:
            return False

    def _written(self) -> Written | Failure:
        cut = any(turn["finish_reason"] == "length" for turn in self._turns)
        document = {name: value for name, value in self._document.items() if name != "conversations"}
        document |= {
            "messages": self._spoken,
            "finish_reason": "length" if cut else "stop",
            "generate": {"line": self.number, "turns": self._turns},
        }
        try:
            text = json.dumps(document, ensure_ascii=False, allow_nan=False).translate(_LINE_ENDS)
            data = text.encode()
        except (RecursionError, ValueError) as error:  # ValueError: a number that JSON cannot hold, half a surrogate
            return self._skipped("not_json", f"cannot be written again: {str(error)[:120]}")
        return Written(
            line=self.number,
            data=data,
            truncated=cut,
            inexact=sum(turn.get("exact") is False for turn in self._turns),
            tokens=sum(turn["completion_tokens"] for turn in self._turns),
        )

    def _skipped(self, reason: str, detail: str) -> Failure:
        return Failure(line=self.number, status="skipped", reason=reason, detail=detail)


def token_ids(chat: ChatTokenizer, messages: Sequence[Message], *, prompt: bool) -> list[int]:
    """A conversation through the template. Raises `Rejected` when the template refuses."""
    text = chat.render(messages, prompt=prompt)
    return [int(i) for i in chat.tokenizer(text, add_special_tokens=False)["input_ids"]]
