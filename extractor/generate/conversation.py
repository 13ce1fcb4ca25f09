"""What of a conversation is kept and what the verifier says anew: a line of the input as a script with gaps.

Pure. `all`: every answer is left out and given anew after each user turn, in order, on top of the answers given so far.
`last`: the conversation stays as it is up to its last user turn, which is answered. Leaves reading lines to `scan`, and
what becomes of a gap to `dialogue`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from extractor.generate.settings import Turns
from extractor.messages import Message, chat_messages
from extractor.reasons import Rejected

Script = list[Message | None]
"""Messages that others say; None where the verifier speaks."""


class Unanswerable(Exception):
    """This line is not answered, because of `reason` (a key of `extractor.generate.reasons.SKIPPED`)."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.detail = detail


def script_of(line: Mapping[str, Any], turns: Turns) -> Script:
    """Raises `Unanswerable`, or `Rejected` for what `hsstore extract` would reject too."""
    if line.get("messages") is None and line.get("conversations") is None:
        raise Unanswerable("no_conversation", f"fields: {', '.join(list(line)[:5])}"[:120] if line else "no fields")
    messages = chat_messages(line)
    return _last(messages) if turns == "last" else _all(messages)


def _all(messages: Sequence[Message]) -> Script:
    """An answer wherever a user has spoken and the next user, an old answer, or the end comes."""
    script: Script = []
    asked = False
    for number, message in enumerate(messages, 1):
        role = message["role"]
        if role == "tool":
            raise Unanswerable("tool_turn", f"message {number}")
        if asked and role in ("user", "assistant"):
            script.append(None)
            asked = False
        if role != "assistant":  # one that nobody asked for is left out: it would be trained as the verifier's
            script.append(message)
        asked |= role == "user"
    if asked:
        script.append(None)
    if None not in script:
        raise Unanswerable("no_user_turn")
    return script


def _last(messages: Sequence[Message]) -> Script:
    asking = [i for i, message in enumerate(messages) if message["role"] in ("user", "tool")]
    if not asking:
        raise Unanswerable("no_user_turn")
    return [*messages[: asking[-1] + 1], None]


def answer_message(text: str, reasoning: str, how: str) -> Message:
    """An answer as a message. `reasoning`: thoughts that a server has taken out of the text already."""
    if not reasoning:
        reasoning, text = split_thoughts(text) if how != "inline" else ("", text)
    elif how == "inline":
        return {"role": "assistant", "content": f"<think>\n{reasoning.strip()}\n</think>\n\n{text}"}
    message = {"role": "assistant", "content": text}
    if reasoning and how == "separate":
        message["reasoning_content"] = reasoning
    return message


def split_thoughts(text: str) -> tuple[str, str]:
    """(thoughts, answer) of what a reasoning model writes; the opening tag may stand in the prompt already."""
    head, closing, tail = text.partition("</think>")
    if closing:
        return head.removeprefix("<think>").strip("\n"), tail.lstrip("\n")
    if text.startswith("<think>"):  # cut before it came to an answer
        return text.removeprefix("<think>").strip("\n"), ""
    return "", text


__all__ = ["Rejected", "Script", "Unanswerable", "answer_message", "script_of", "split_thoughts"]
