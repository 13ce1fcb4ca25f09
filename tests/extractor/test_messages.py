"""Every spelling of a conversation means the same messages; what cannot be rendered is rejected with its reason."""

from __future__ import annotations

from typing import Any

import pytest

from extractor.messages import chat_messages
from extractor.reasons import Rejected

EXPECTED = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]


@pytest.mark.parametrize(
    "line",
    [
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]},
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]},
        {"conversations": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]},
        {"conversations": [{"from": "User", "value": "hi"}, {"from": "ChatGPT", "value": "yo"}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}, EXPECTED[1]], "id": 7},
        {"messages": [{"role": "user", "content": ["h", {"text": "i"}]}, EXPECTED[1]], "tools": []},
        {"messages": [EXPECTED[0], EXPECTED[1] | {"tool_calls": None, "weight": 1}], "text": "ignored"},
    ],
)
def test_spellings(line: dict[str, Any]) -> None:
    assert chat_messages(line) == EXPECTED


def test_system_prompt_beside_the_turns() -> None:
    line = {"system": "be kind", "conversations": EXPECTED}
    assert chat_messages(line) == [{"role": "system", "content": "be kind"}, *EXPECTED]


def test_reasoning_is_kept_for_the_template() -> None:
    messages = chat_messages({"messages": [EXPECTED[0], EXPECTED[1] | {"reasoning_content": "hm"}]})
    assert messages[1] == {"role": "assistant", "content": "yo", "reasoning_content": "hm"}


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ({"messages": []}, "empty_conversation"),
        ({"messages": [{"role": "user", "content": "  "}]}, "empty_conversation"),
        ({"messages": "hi"}, "bad_message"),
        ({"messages": ["hi"]}, "bad_message"),
        ({"messages": [{"content": "hi"}]}, "bad_message"),
        ({"messages": [{"role": "user"}]}, "bad_message"),
        ({"messages": [{"role": "user", "content": 3}]}, "bad_message"),
        ({"messages": [{"role": 3, "content": "hi"}]}, "bad_message"),
        ({"conversations": [{"from": "alien", "value": "hi"}]}, "unknown_role"),
        ({"conversations": [{"from": "function_call", "value": "{}"}]}, "tool_calls"),
        ({"messages": [{"role": "assistant", "content": None, "tool_calls": [{}]}]}, "tool_calls"),
        ({"messages": EXPECTED, "tools": [{"name": "f"}]}, "tool_calls"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]}, "not_text"),
        ({"messages": [{"role": "user", "content": [7]}]}, "not_text"),
    ],
)
def test_rejections(line: dict[str, Any], reason: str) -> None:
    with pytest.raises(Rejected) as caught:
        chat_messages(line)
    assert caught.value.reason == reason
