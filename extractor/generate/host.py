"""The engine process of `hsstore generate`: an ordinary `sglang.Engine` with its prefix cache and graphs on, no hooks.

Run as `python -m extractor.generate.host FD PARENT_PID`. Its life is that of `extractor.sglang_plugin.host`; only the
engine and what a request is are others. Leaves the meaning of answers to `extractor.generate.sources.requests`.
"""

from __future__ import annotations

import os
import sys
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from extractor.sglang_plugin import CAPTURE_VARIABLE
from extractor.sglang_plugin.host import CPU_FLAGS, TEXT_FLAGS, check_flags, choose_device, prepare_cpu, run, send
from extractor.sglang_plugin.protocol import Failed, Ready


class Start(msgspec.Struct, frozen=True):
    """First message of the parent: how to start the engine."""

    engine: dict[str, Any]
    """Keyword arguments of `sglang.Engine`."""
    device: str
    """`auto`, `cpu` or `cuda`."""
    cpu_pool_tokens: int
    """Size of the KV cache on a CPU, unless `engine` names another."""


class Request(msgspec.Struct, frozen=True):
    """Parent to engine process: answer this prompt."""

    number: int
    input_ids: list[int]
    sampling_params: dict[str, Any]


class Said(msgspec.Struct, frozen=True, tag=True):
    """Engine process to parent, one for each `Request`."""

    number: int
    answer: dict[str, Any]
    """`text`, `output_ids` and `meta_info` of SGLang; empty with `error`."""
    error: str = ""
    refused: bool = False
    """Whether it is the request that SGLang would not have."""


Replies = Ready | Failed | Said


def start_engine(start: Start) -> tuple[Any, dict[str, str]]:
    """The running engine; no flags of ours decide what it says."""
    os.environ.pop(CAPTURE_VARIABLE, None)
    device = choose_device(start.device)
    if device == "cpu":
        prepare_cpu(start.engine)
    from sglang.srt.entrypoints.engine import Engine

    check_flags(start.engine)
    defaults = CPU_FLAGS | {"max_total_tokens": start.cpu_pool_tokens} if device == "cpu" else {}
    return Engine(**{**TEXT_FLAGS, **defaults, **start.engine}), {}


async def answer(engine: Any, connection: Connection, request: Request) -> None:
    """Answer one request, whatever becomes of it."""
    try:
        said = await engine.async_generate(input_ids=request.input_ids, sampling_params=request.sampling_params)
        kept = {name: said[name] for name in ("text", "output_ids") if name in said}
        meta = {n: said["meta_info"].get(n) for n in ("finish_reason", "prompt_tokens", "completion_tokens")}
        reply = Said(request.number, kept | {"meta_info": meta})
    except ValueError as error:  # how SGLang refuses a request
        reply = Said(request.number, {}, error=str(error), refused=True)
    except Exception as error:  # noqa: BLE001 - a request must always be answered; the parent decides what it means
        reply = Said(request.number, {}, error=f"{type(error).__name__}: {error}")
    send(connection, reply)


if __name__ == "__main__":
    run(sys.argv[1:], Start, Request, start_engine, answer)
