"""The process of `hsstore verifier`: SGLang's own `launch_server`, with the flags that a capture rests on.

Run as `python -m extractor.sglang_plugin.server FD PARENT_PID` in a session of its own, like `host`: it says over the
socket what is wrong with a flag, and kills its group when the parent goes. Leaves to `flags` which flags of SGLang are
free, to `routes` what the server does beside SGLang's own, to the parent when it is ready.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import sys
import threading
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from extractor.sglang_plugin import CAPTURE_VARIABLE, SPOOL_VARIABLE, flags, host, targets
from extractor.sglang_plugin.group import kill_group
from extractor.sglang_plugin.protocol import Failed
from extractor.sglang_plugin.spool import Spool
from hsstore.errors import HsstoreError, UsageError

_FREE_HERE = frozenset({"tp_size", "dp_size"})  # an engine of one's own has other names for them
_OURS: Mapping[str, str] = {
    "host": "give --host before the --",
    "port": "give --port before the --",
    "device": "give --device before the --",
    "log_level": "give --log-level before the --",
    "api_key": "give --token-file before the --: a key on a command line can be read by everybody on the machine",
    "config": "give its flags themselves",
}


class ServerStart(msgspec.Struct, frozen=True):
    """First message of the parent: what is to be served."""

    model_path: str
    architecture: str
    layers: tuple[int, ...]
    """k of each `after_k`, ascending, at least one."""
    dtype: str
    trust_remote_code: bool
    device: str
    cpu_pool_tokens: int
    host: str
    port: int
    radix_cache: bool
    tokenizer: bool
    """Whether text is served too, beside token ids."""
    token: str
    log_level: str
    flags: tuple[str, ...]
    """SGLang's, as on its command line."""


class Starting(msgspec.Struct, frozen=True, tag=True):
    """To the parent: the flags are right, the model is being loaded."""

    flags: dict[str, str]
    """That the user gave."""


FromServer = Starting | Failed


class _Parser(argparse.ArgumentParser):
    """One that raises."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"SGLang does not take these flags: {message}", hint="python -m sglang.launch_server --help")


def main(arguments: Sequence[str]) -> None:
    connection = Connection(int(arguments[0]))
    start = msgspec.msgpack.decode(connection.recv_bytes(), type=ServerStart)
    threading.Thread(target=_end_with_parent, args=(connection, int(arguments[1])), daemon=True).start()
    try:
        server_args, given = prepare(start)
    except HsstoreError as error:
        _send(connection, Failed(str(error), usage=True))
        return
    except host.BadCall as error:
        _send(connection, Failed(str(error), usage=True, hint=error.hint))
        return
    except ImportError as error:
        _send(connection, Failed(str(error), missing_extra=True))
        return
    _send(connection, Starting({name: str(value) for name, value in given.items()}))
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins

    load_plugins()
    run_server(server_args)


def prepare(start: ServerStart) -> tuple[Any, dict[str, Any]]:
    """SGLang's `ServerArgs`, and which of them the user chose. Raises `UsageError` for a flag that is not free."""
    os.environ[CAPTURE_VARIABLE] = "1"
    device = host.choose_device(start.device)
    if device == "cpu":
        host.prepare_cpu({})  # before anything of SGLang looks for a GPU
    from sglang.srt.server_args import ServerArgs

    if problems := targets.moved_targets():
        raise ImportError("this SGLang is not the one the capture hooks were written for: " + "; ".join(problems))
    parser = _Parser(prog="hsstore verifier --")
    ServerArgs.add_cli_args(parser)
    raw, given = read_flags(parser, start)
    if device == "cpu":
        host.prepare_cpu(given)
    defaults = host.CPU_FLAGS | {"max_total_tokens": start.cpu_pool_tokens} if device == "cpu" else host.CUDA_FLAGS
    for name, value in {**host.TEXT_FLAGS, **defaults}.items():
        if name not in given:
            setattr(raw, name, value)
    method, layer_ids = host.capture_method(start.architecture, start.layers)
    for name, value in forced(start, method, layer_ids).items():
        setattr(raw, name, value)
    raw._radix_eviction_policy_explicitly_set = "radix_eviction_policy" in given
    logging.basicConfig(level=start.log_level.upper(), format="[%(asctime)s] %(message)s", force=True)
    return ServerArgs.from_cli_args(raw), given


def read_flags(parser: argparse.ArgumentParser, start: ServerStart) -> tuple[argparse.Namespace, dict[str, Any]]:
    """All flags with their values, and those that the user gave another value than SGLang's own."""
    model = ["--model-path", start.model_path]
    plain = vars(parser.parse_args(model))
    if any(flag.partition("=")[0] == "--help" for flag in start.flags):
        raise UsageError("SGLang's own flags are many", hint="python -m sglang.launch_server --help")
    raw = parser.parse_args([*model, *start.flags])
    given = {name: value for name, value in vars(raw).items() if value != plain[name]}
    for name in given:
        if name in _OURS:
            raise UsageError(f"--{name.replace('_', '-')} is not free behind the --", hint=_OURS[name])
    flags.check_free([name for name in given if name not in _FREE_HERE])
    flags.check_values(given)
    return raw, given


def forced(start: ServerStart, method: str, layer_ids: list[int]) -> dict[str, Any]:
    """What the capture rests on, and what has an option of ours."""
    return {
        "host": start.host,
        "port": start.port,
        "api_key": start.token or None,
        "dtype": start.dtype,
        "trust_remote_code": start.trust_remote_code,
        "log_level": start.log_level,
        "skip_tokenizer_init": not start.tokenizer,
        "disable_radix_cache": not start.radix_cache,
        "enable_return_aux_hidden_states": True,
        "speculative_algorithm": method,
        "return_aux_hidden_state_layer_ids": layer_ids,
    }


def _end_with_parent(connection: Connection, parent_pid: int) -> None:
    """End the whole group when the parent has gone, however it went, and leave no rows behind."""
    try:
        while True:
            # A fork of the parent may keep the other end of the socket open: look at the parent itself too.
            while not connection.poll(2.0):
                if os.getppid() != parent_pid:
                    raise EOFError
            connection.recv_bytes()
    except (EOFError, OSError):
        for directory in (Path(os.environ["TMPDIR"]), Spool.of(os.environ[SPOOL_VARIABLE]).directory):
            shutil.rmtree(directory, ignore_errors=True)  # both were made for this process by its parent
        kill_group(os.getpgrp())


def _send(connection: Connection, message: FromServer) -> None:
    connection.send_bytes(msgspec.msgpack.encode(message))


if __name__ == "__main__":
    main(sys.argv[1:])
