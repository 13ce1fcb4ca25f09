"""The engine process: holds `sglang.Engine` for its parent, away from the parent's signals, terminal and memory.

With `sglang.Engine` in one's own process the death of a scheduler kills the caller; here it kills this process, and the
parent reads an end of file. Run as `python -m extractor.sglang_plugin.host FD PARENT_PID` in a session of its own: it
is killed as a group, and kills its own group when the parent goes. Leaves retries and files to the parent.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import queue
import shutil
import sys
import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import numpy as np

from extractor.sglang_plugin import CAPTURE_VARIABLE, CPU_VARIABLE, targets
from extractor.sglang_plugin.flags import RESERVED, recorded, uses_dp_attention
from extractor.sglang_plugin.group import kill_group
from extractor.sglang_plugin.protocol import KEY, Answer, Failed, Ready, Receipt, Request, Start, Target

CPU_FLAGS: dict[str, Any] = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "disable_overlap_schedule": True,
    "mem_fraction_static": 0.2,
    "sleep_on_idle": True,  # else its scheduler spins on a core that the shards' sealing could use
}
CUDA_FLAGS: dict[str, Any] = {"disable_cuda_graph": True}  # nothing is decoded: recording graphs only costs the start
TEXT_FLAGS: dict[str, Any] = {"enable_multimodal": False}  # no images come, and their processor wants files of its own
SALT = "hsstore-{}"
"""Of a request, by its number: its tokens are never another request's cached prefix."""

SAMPLING: dict[str, Any] = {
    "max_new_tokens": 1,  # 0 gives neither states nor an answer of the hooks
    "temperature": 0,
    "ignore_eos": True,
}


class BadCall(Exception):
    """SGLang cannot do what is asked: a flag it has not, a model family that keeps its states to itself."""

    def __init__(self, reason: str, hint: str) -> None:
        super().__init__(reason)
        self.hint = hint


def main(arguments: Sequence[str]) -> None:
    run(arguments, Start, Request, start_engine, _answer)


def run(
    arguments: Sequence[str],
    start_type: Any,
    request_type: Any,
    start_engine: Callable[[Any], tuple[Any, dict[str, str]]],
    answer: Callable[[Any, Connection, Any], Coroutine[Any, Any, None]],
) -> None:
    """The life of an engine process: start the engine as the first message says, then answer each of the others."""
    connection = Connection(int(arguments[0]))
    start = msgspec.msgpack.decode(connection.recv_bytes(), type=start_type)
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=listen, args=(connection, inbox, int(arguments[1]), request_type), daemon=True).start()
    try:
        engine, flags = start_engine(start)
    except BadCall as error:
        send(connection, Failed(str(error), usage=True, hint=error.hint))
        return
    except ImportError as error:
        send(connection, Failed(str(error), missing_extra=True))
        return
    except BaseException as error:
        send(connection, Failed(" ".join(f"{type(error).__name__}: {error}".split())))
        raise
    ranks = engine.loop.run_until_complete(engine.tokenizer_manager.get_internal_state())
    infos = engine._scheduler_init_result.scheduler_infos
    send(connection, ready(engine.tokenizer_manager, infos, ranks, flags, start.engine))
    engine.loop.run_until_complete(_serve(engine, connection, inbox, answer))  # until the parent ends the group


def start_engine(start: Start) -> tuple[Any, dict[str, str]]:
    """The running engine, and the settings that decide what it captures."""
    os.environ[CAPTURE_VARIABLE] = "1"
    device = choose_device(start.device)
    if device == "cpu":
        prepare_cpu(start.engine)
    from sglang.srt.entrypoints.engine import Engine

    if problems := targets.moved_targets():
        raise ImportError("this SGLang is not the one the capture hooks were written for: " + "; ".join(problems))
    check_flags(start.engine)
    method, layer_ids = capture_method(start.architecture, start.layers)
    defaults = CPU_FLAGS | {"max_total_tokens": start.cpu_pool_tokens} if device == "cpu" else CUDA_FLAGS
    asked = {"speculative_algorithm": method, "return_aux_hidden_state_layer_ids": layer_ids}
    engine = Engine(**{**TEXT_FLAGS, **defaults, **start.engine, **asked})
    return engine, {"capture_method": method, "capture_layer_ids": ",".join(map(str, layer_ids))}


def prepare_cpu(flags: Mapping[str, Any]) -> None:
    """Let SGLang take the CPU, and share the cores out among its ranks. Raises `BadCall` for what needs CUDA."""
    if uses_dp_attention(flags):
        reason = "data-parallel attention needs CUDA: SGLang has no kernels for it on a CPU"
        raise BadCall(reason, hint="give dp=N instead, which runs copies of the whole model")
    os.environ[CPU_VARIABLE] = "1"
    os.environ["SGLANG_PLATFORM"] = "hsstore_cpu"
    n_ranks = int(flags.get("tp_size", 1)) * int(flags.get("dp_size", 1))
    if n_ranks > 1:  # SGLang asks for one list of cores a rank
        cores = core_lists(sorted(os.sched_getaffinity(0)), n_ranks)
        os.environ.setdefault("SGLANG_CPU_OMP_THREADS_BIND", "|".join(cores))
        # The lists bind threads only where SGLang's own CPU kernels are; elsewhere each rank would take every core.
        os.environ.setdefault("OMP_NUM_THREADS", str(cores[0].count(",") + 1))


def core_lists(cores: Sequence[int], n_ranks: int) -> list[str]:
    """The cores of each rank, as many for each; with fewer cores than ranks some have two ranks."""
    each = max(1, len(cores) // n_ranks)
    shares = [[cores[(rank * each + i) % len(cores)] for i in range(each)] for rank in range(n_ranks)]
    return [",".join(map(str, share)) for share in shares]


def check_flags(flags: Iterable[str]) -> None:
    from sglang.srt.server_args import ServerArgs

    known = inspect.signature(ServerArgs).parameters
    if unknown := sorted(set(flags) - set(known)):
        reason = f"SGLang has no flag {unknown[0]}"
        raise BadCall(reason, hint="`python -m sglang.launch_server --help` lists them")


def choose_device(asked: str) -> str:
    if asked != "auto":
        return asked
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def capture_method(architecture: str, layers: Sequence[int]) -> tuple[str, list[int]]:
    """SGLang's method and layer ids for the outputs after `layers` layers.

    DFLASH ids mean the output of that 0-based layer in every family that has it. EAGLE3 ids mean the same, except in
    DeepSeek's (which has DFLASH), where they depend on the first one; the capture points are checked after the start.
    """
    from sglang.srt.models.registry import ModelRegistry

    model_class, _ = ModelRegistry.resolve_model_cls([architecture])
    layer_ids = [k - 1 for k in layers]
    if hasattr(model_class, "set_dflash_layers_to_capture"):
        return "DFLASH", layer_ids
    if hasattr(model_class, "set_eagle3_layers_to_capture"):
        return "EAGLE3", layer_ids
    reason = f"SGLang runs {architecture} as {model_class.__name__}, which offers no states of its layers"
    raise BadCall(reason, hint="use --engine transformers")


def ready(
    manager: Any,
    infos: Iterable[Mapping[str, Any]],
    ranks: Sequence[Mapping[str, Any]],
    flags: dict[str, str],
    given: Mapping[str, Any],
) -> Ready:
    """What a running SGLang says of itself, by its tokenizer manager, its schedulers' infos and each rank's state."""
    import sglang
    import torch

    dtype = str(manager.model_config.dtype).removeprefix("torch.")
    asked = {name: value for name, value in given.items() if name not in RESERVED}
    return Ready(
        sglang.__version__,
        dtype,
        longest_prompt(infos, ranks),
        {**flags, **recorded(ranks[0], asked), "torch": str(torch.__version__)},
        n_ranks=len(ranks),
    )


def longest_prompt(infos: Iterable[Mapping[str, Any]], ranks: Iterable[Mapping[str, Any]]) -> int:
    """Longest prompt that every data-parallel rank takes.

    The infos speak for one rank, and pools differ where ranks found different amounts of memory free. SGLang refuses a
    prompt of `max_req_input_len` tokens, which is the smaller of context and pool − 6.
    """
    bounds = [int(info["max_req_input_len"]) for info in infos]
    bounds += [int(rank["memory_usage"]["token_capacity"]) - 6 for rank in ranks]
    return min(bounds) - 1


async def _serve(
    engine: Any,
    connection: Connection,
    inbox: queue.SimpleQueue[Any],
    answer: Callable[[Any, Connection, Any], Coroutine[Any, Any, None]],
) -> None:
    loop = asyncio.get_running_loop()
    tasks: set[asyncio.Task[None]] = set()
    while True:
        request = await loop.run_in_executor(None, inbox.get)
        task = loop.create_task(answer(engine, connection, request))
        tasks.add(task)
        task.add_done_callback(tasks.discard)


async def _answer(engine: Any, connection: Connection, request: Request) -> None:
    try:
        receipt = await _capture(engine, request)
    except ValueError as error:  # how SGLang refuses a request
        receipt = failure(str(error))
    except Exception as error:  # noqa: BLE001 - a request must always be answered; the parent decides what it means
        receipt = failure(f"{type(error).__name__}: {error}")
    send(connection, Answer(request.target.request, receipt))


async def _capture(engine: Any, request: Request) -> Receipt:
    salt = SALT.format(request.target.request)
    answer = await engine.async_generate(
        input_ids=np.frombuffer(request.input_ids, "<i4").tolist(),
        **generate_arguments(request.target, salt, request.rank),
    )
    return read_receipt(answer["meta_info"])


def generate_arguments(target: Target, salt: str, rank: int | None) -> dict[str, Any]:
    """What makes a request of SGLang's a capture, beside its ids; also the body of a `/generate`."""
    return {
        "sampling_params": SAMPLING | {"custom_params": {KEY: msgspec.to_builtins(target)}},
        "return_hidden_states": True,
        "cache_salt": salt,
        "routed_dp_rank": rank,
    }


def read_receipt(meta_info: dict[str, Any]) -> Receipt:
    """The hooks' receipt in an answer of SGLang; an abort looks like a normal answer, but for its reason."""
    reason = meta_info.get("finish_reason") or {}
    if reason.get("type") not in ("length", "stop"):
        return failure(f"SGLang ended the request with {reason.get('type')}: {reason.get('message')}")
    receipts = meta_info.get(KEY)
    if not receipts:
        return failure("the answer carries no receipt: the capture hooks did not run")
    return msgspec.convert(receipts[0], Receipt)


def failure(reason: str) -> Receipt:
    return Receipt(0, {}, (), error=reason)


def send(connection: Connection, message: msgspec.Struct) -> None:
    """One message to the parent."""
    connection.send_bytes(msgspec.msgpack.encode(message))


def listen(connection: Connection, inbox: queue.SimpleQueue[Any], parent_pid: int, request_type: Any) -> None:
    """Hand requests over; end the whole group when the parent has gone, however it went."""
    decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(request_type)
    try:
        while True:
            # A fork of the parent may keep the other end of the socket open: look at the parent itself too.
            while not connection.poll(2.0):
                if os.getppid() != parent_pid:
                    raise EOFError
            inbox.put(decoder.decode(connection.recv_bytes()))
    except (EOFError, OSError):
        shutil.rmtree(os.environ["TMPDIR"], ignore_errors=True)  # made for this process by its parent
        kill_group(os.getpgrp())


if __name__ == "__main__":
    main(sys.argv[1:])
