"""What of a conversation stays and where the verifier speaks."""

from __future__ import annotations

from typing import Any

import pytest

from extractor.generate.conversation import Unanswerable, answer_message, script_of, split_thoughts
from extractor.generate.settings import Sampling
from extractor.reasons import Rejected


def chat(*turns: str) -> dict[str, Any]:
    """`u:hi` → a user's message."""
    roles = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    return {"messages": [{"role": roles[t[0]], "content": t[2:]} for t in turns]}


def shown(line: dict[str, Any], turns: Any = "all") -> str:
    """`u` for a user's message, `_` where the verifier speaks."""
    return "".join("_" if m is None else m["role"][0] for m in script_of(line, turns))


@pytest.mark.parametrize(
    ("turns", "script"),
    [
        (["u:hi"], "u_"),
        (["u:hi", "a:old"], "u_"),
        (["s:be", "u:hi", "a:old", "u:and", "a:old"], "su_u_"),
        (["u:one", "u:two"], "u_u_"),
        (["a:hello", "u:hi", "a:old"], "u_"),
        (["u:hi", "a:one", "a:two", "u:and"], "u_u_"),
        (["u:hi", "s:note", "u:and"], "us_u_"),
        (["u:hi", "a:old", "s:note"], "u_s"),
    ],
)
def test_every_answer_is_made_anew(turns: list[str], script: str) -> None:
    """An old answer left in would be trained as the verifier's own, and a question without one would be lost."""
    assert shown(chat(*turns)) == script


@pytest.mark.parametrize(
    ("turns", "script"),
    [(["u:hi", "a:one", "u:and", "a:two"], "uau_"), (["u:hi", "a:call", "t:42", "a:old"], "uat_"), (["u:hi"], "u_")],
)
def test_the_last_answer_alone(turns: list[str], script: str) -> None:
    assert shown(chat(*turns), "last") == script


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (chat("s:be", "a:hello"), "no_user_turn"),
        (chat("u:hi", "a:call", "t:42"), "tool_turn"),
        ({"text": "once upon a time"}, "no_conversation"),
        ({"input_ids": [1], "loss_mask": [1]}, "no_conversation"),
        ({}, "no_conversation"),
    ],
)
def test_what_cannot_be_answered_is_named(line: dict[str, Any], reason: str) -> None:
    with pytest.raises(Unanswerable) as caught:
        script_of(line, "all")
    assert caught.value.reason == reason


def test_what_extract_would_reject_is_not_answered() -> None:
    """GPU time for a line that the next command leaves out is lost."""
    with pytest.raises(Rejected, match="tool_calls"):
        script_of({**chat("u:hi"), "tools": [{"type": "function"}]}, "all")


def test_sharegpt_and_a_system_prompt_beside_the_turns() -> None:
    line = {"system": "be kind", "conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "old"}]}
    assert shown(line) == "su_"


@pytest.mark.parametrize(
    ("text", "thoughts", "answer"),
    [
        ("plain", "", "plain"),
        ("<think>\nhm\n</think>\n\nyes", "hm", "yes"),
        ("hm\n</think>\n\nyes", "hm", "yes"),  # the opening tag stood in the prompt
        ("<think>\ncut", "cut", ""),
    ],
)
def test_thoughts_are_taken_out(text: str, thoughts: str, answer: str) -> None:
    assert split_thoughts(text) == (thoughts, answer)
    separate = answer_message(text, "", "separate")
    assert (separate.get("reasoning_content", ""), separate["content"]) == (thoughts, answer)
    assert answer_message(text, "", "inline")["content"] == text
    assert answer_message(text, "", "drop") == {"role": "assistant", "content": answer}


def test_thoughts_that_a_server_took_out() -> None:
    assert answer_message("yes", "hm", "separate")["reasoning_content"] == "hm"
    assert answer_message("yes", "hm", "inline")["content"] == "<think>\nhm\n</think>\n\nyes"
    assert answer_message("yes", "hm", "drop") == {"role": "assistant", "content": "yes"}


def test_each_answer_has_a_seed_of_its_own() -> None:
    sampling = Sampling(temperature=1, top_p=1, top_k=0, max_new_tokens=1, seed=3, stop=())
    seeds = {sampling.seed_of(line, turn) for line in range(1, 200) for turn in range(3)}
    assert len(seeds) == 199 * 3
    assert all(0 <= seed < 1 << 31 for seed in seeds)
    assert sampling.seed_of(7, 1) == sampling.seed_of(7, 1)
