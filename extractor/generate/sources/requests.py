"""How a server is asked for an answer, and how its answer is read: SGLang's own `/generate`, and OpenAI's chat road.

Pure: JSON documents in and out. Every parameter is sent, the neutral ones too: servers fill what is left out with the
model's own defaults, which would be recorded nowhere. Leaves connections to `connection`, servers to `servers`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import msgspec

from extractor.chat import ChatTokenizer
from extractor.generate.settings import Sampling
from extractor.generate.sources.base import Ask, Reply, text_of

_FINISHED = ("stop", "length")
_T = TypeVar("_T")
_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
"""Also a token's number: what a tokenizer takes."""


class _Finish(msgspec.Struct):
    type: str | None = None
    message: Any = None
    matched: int | str | list[int] | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: _Count | None = None
    completion_tokens: _Count | None = None


class _AnswerMeta(_Usage):
    finish_reason: _Finish | str | None = None


class _Answer(msgspec.Struct):
    """Of SGLang's `/generate`."""

    meta_info: _AnswerMeta
    text: str | None = None
    output_ids: list[_Count] | None = None


class _ChatMessage(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct):
    message: _ChatMessage
    finish_reason: str | None = None


class _ChatAnswer(msgspec.Struct):
    """Of `/v1/chat/completions`."""

    choices: Annotated[list[_Choice], msgspec.Meta(min_length=1)]
    usage: _Usage | None = None


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
    """Of `/generate`, or of the engine itself. Raises `ValueError` naming what is wrong with the answer."""
    answer = _shaped(document, _Answer)
    meta = answer.meta_info
    reason = _Finish(type=meta.finish_reason) if isinstance(meta.finish_reason, str) else meta.finish_reason
    if reason is None or reason.type not in _FINISHED:
        said = "nothing" if reason is None else f"{reason.type}: {reason.message or ''}"
        return Reply(key=ask.key, error="engine_error", detail=f"ended with {said}"[:200])
    stopped = reason.type == "stop"
    if answer.output_ids is not None and not (stopped and isinstance(reason.matched, str)):
        ids, matched = tuple(answer.output_ids), reason.matched
        if stopped and isinstance(matched, int) and ids[-1:] != (matched,) and matched in ends:
            ids = (*ids, matched)
        text = text_of(chat, ids, ends)
    elif answer.text is not None:
        ids, text = (), answer.text
        cuts = [at for s in sampling.stop if (at := text.find(s)) >= 0]
        text = text[: min(cuts, default=len(text))]
    else:
        raise ValueError("the answer has neither output_ids nor text")
    return Reply(
        key=ask.key,
        text=text,
        ids=ids or None,
        finish_reason=reason.type,
        prompt_tokens=meta.prompt_tokens or 0,
        completion_tokens=meta.completion_tokens or 0,
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
    """Raises `ValueError` naming what is wrong with the answer."""
    answer = _shaped(document, _ChatAnswer)
    choice, usage = answer.choices[0], answer.usage or _Usage()
    if choice.finish_reason not in _FINISHED:
        return Reply(key=ask.key, error="engine_error", detail=f"ended with {choice.finish_reason!r}"[:200])
    return Reply(
        key=ask.key,
        text=choice.message.content or "",
        reasoning=choice.message.reasoning_content or choice.message.reasoning or "",
        finish_reason=choice.finish_reason,
        prompt_tokens=usage.prompt_tokens or 0,
        completion_tokens=usage.completion_tokens or 0,
    )


def _shaped(document: Mapping[str, Any], shape: type[_T]) -> _T:
    try:
        return msgspec.convert(document, shape)
    except msgspec.ValidationError as error:
        raise ValueError(f"the answer is of another shape: {error}") from None
