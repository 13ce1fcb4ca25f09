"""How a server is asked for an answer, and how its answer is read: SGLang's own `/generate`, and OpenAI's chat road.

Pure: JSON documents in and out. Every parameter is sent, the neutral ones too: servers fill what is left out with the
model's own defaults, which would be recorded nowhere. Leaves connections to `connection`, servers to `servers`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from extractor.chat import ChatTokenizer
from extractor.generate.settings import Sampling
from extractor.generate.sources.base import Ask, Reply, text_of

_FINISHED = ("stop", "length")


def sampling_params(ask: Ask, sampling: Sampling, ends: tuple[int, ...]) -> dict[str, Any]:
    """Of SGLang. It draws by the seed only under `enable_deterministic_inference`."""
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "max_new_tokens": ask.max_new_tokens,
        "sampling_seed": ask.seed,
        "stop_token_ids": list(ends),
        **({"stop": list(sampling.stop)} if sampling.stop else {}),
    }


def sglang_reply(
    ask: Ask, document: Mapping[str, Any], sampling: Sampling, ends: tuple[int, ...], chat: ChatTokenizer
) -> Reply:
    """Of `/generate`, or of the engine itself. Raises `ValueError` naming what is missing in the answer."""
    meta = document.get("meta_info")
    if not isinstance(meta, dict):
        raise ValueError("the answer has no meta_info")
    reason = meta.get("finish_reason") or {}
    kind = reason.get("type") if isinstance(reason, dict) else reason
    if kind not in _FINISHED:
        message = reason.get("message") if isinstance(reason, dict) else ""
        return Reply(key=ask.key, error="engine_error", detail=f"ended with {kind}: {message}"[:200])
    ids = document.get("output_ids")
    by_string = kind == "stop" and isinstance(reason.get("matched"), str)
    if isinstance(ids, list) and not by_string:
        said = tuple(int(i) for i in ids)
        matched = reason.get("matched")
        if kind == "stop" and isinstance(matched, int) and said[-1:] != (matched,) and matched in ends:
            said = (*said, matched)
        text = text_of(chat, said, ends)
    elif isinstance(document.get("text"), str):
        said, text = (), document["text"]
        cuts = [at for s in sampling.stop if (at := text.find(s)) >= 0]
        text = text[: min(cuts, default=len(text))]
    else:
        raise ValueError("the answer has neither output_ids nor text")
    return Reply(
        key=ask.key,
        text=text,
        ids=said or None,
        finish_reason=kind,
        prompt_tokens=_count(meta, "prompt_tokens"),
        completion_tokens=_count(meta, "completion_tokens"),
    )


def chat_request(ask: Ask, sampling: Sampling, model: str, template_arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Of `/v1/chat/completions`, with what vLLM and SGLang add to OpenAI's parameters."""
    return {
        "model": model,
        "messages": list(ask.messages),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "max_tokens": ask.max_new_tokens,
        "seed": ask.seed,
        "n": 1,
        "stream": False,
        **({"stop": list(sampling.stop)} if sampling.stop else {}),
        **({"chat_template_kwargs": dict(template_arguments)} if template_arguments else {}),
    }


def chat_reply(ask: Ask, document: Mapping[str, Any]) -> Reply:
    """Raises `ValueError` naming what is missing in the answer."""
    match document:
        case {"choices": [{"message": dict(message)} as choice, *_]}:
            pass
        case _:
            raise ValueError("the answer has no choices[0].message")
    reason = choice.get("finish_reason")
    if reason not in _FINISHED:
        return Reply(key=ask.key, error="engine_error", detail=f"ended with {reason!r}"[:200])
    thoughts = message.get("reasoning_content") or message.get("reasoning") or ""
    content = message.get("content") or ""
    if not isinstance(content, str) or not isinstance(thoughts, str):
        raise ValueError("the answer's content is no text")
    usage = document.get("usage") if isinstance(document.get("usage"), dict) else {}
    assert isinstance(usage, dict)
    return Reply(
        key=ask.key,
        text=content,
        reasoning=thoughts,
        finish_reason=reason,
        prompt_tokens=_count(usage, "prompt_tokens"),
        completion_tokens=_count(usage, "completion_tokens"),
    )


def _count(document: Mapping[str, Any], name: str) -> int:
    value = document.get(name, 0)
    return value if type(value) is int and value >= 0 else 0
