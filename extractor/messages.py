"""From one JSON object of a prompts file to the chat messages it means.

Knows the two spellings in use, `messages` (`role`/`content`) and ShareGPT's `conversations` (`from`/`value`), mixed or
not. Leaves to `extractor.chat` how messages become tokens. Nothing is dropped in silence: what this version cannot
render exactly (images, tool calls) is rejected with a reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from extractor.reasons import Rejected

Message = dict[str, str]

SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "assistant": "assistant",
    "tool": "tool",
    "observation": "tool",
}
_TOOL_FIELDS = ("tool_calls", "function_call")
_REASONING = "reasoning_content"


def chat_messages(line: Mapping[str, Any]) -> list[Message]:
    """Messages of a line that has `messages` or `conversations`. Raises `Rejected`."""
    if line.get("tools"):
        raise Rejected("tool_calls", "field tools")
    turns = line["messages"] if line.get("messages") is not None else line.get("conversations")
    if not isinstance(turns, list):
        raise Rejected("bad_message", f"expected a list of messages, found {type(turns).__name__}")
    messages = [_message(turn, number) for number, turn in enumerate(turns, 1)]
    if not any(m["content"].strip() or m.get(_REASONING, "").strip() for m in messages):
        raise Rejected("empty_conversation", f"{len(messages)} messages without text")
    system = line.get("system")  # some ShareGPT sets keep the system prompt beside the turns
    if isinstance(system, str) and system.strip() and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    return messages


def _message(turn: Any, number: int) -> Message:
    if not isinstance(turn, dict):
        raise Rejected("bad_message", f"message {number} is no object")
    for field in _TOOL_FIELDS:
        if turn.get(field):
            raise Rejected("tool_calls", f"message {number} has {field}")
    message = {"role": _role(turn, number), "content": _content(turn, number)}
    reasoning = turn.get(_REASONING)  # Qwen3, DeepSeek, Kimi templates render it
    if isinstance(reasoning, str) and reasoning:
        message[_REASONING] = reasoning
    return message


def _role(turn: Mapping[str, Any], number: int) -> str:
    if isinstance(turn.get("role"), str):
        return str(turn["role"])
    speaker = turn.get("from")
    if not isinstance(speaker, str):
        raise Rejected("bad_message", f"message {number} has no role")
    if speaker in {"function_call", "tool_call"}:
        raise Rejected("tool_calls", f"message {number} is from {speaker}")
    try:
        return SHAREGPT_ROLES[speaker.lower()]
    except KeyError:
        raise Rejected("unknown_role", f"message {number} is from {speaker[:40]!r}") from None


def _content(turn: Mapping[str, Any], number: int) -> str:
    content = turn["content"] if "content" in turn else turn.get("value")
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise Rejected("bad_message", f"the content of message {number} is {type(content).__name__}, expected text")
    return "".join(_text_part(part, number) for part in content)


def _text_part(part: Any, number: int) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and part.get("type", "text") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    raise Rejected("not_text", f"message {number} has a part of type {str(kind)[:40]}")
