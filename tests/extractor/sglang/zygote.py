"""Real engines that start in a second: SGLang is imported once, then each process of an engine is forked from there.

A stand-in for `subprocess.Popen` as `extractor.sglang_plugin.process` uses it, and the process that forks. What runs is
the host, SGLang's scheduler and its other processes, each a process of its own, as in production; only that they do not
import everything anew. Leaves engines started in the ordinary way to the tests on SmolLM2.
"""

from __future__ import annotations

import array
import contextlib
import importlib
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PATCH_VARIABLE = "HSSTORE_TEST_ENGINE"
"""Name of a function below that changes the engine before it starts."""

TAKEN_BACK = "the engine took this request back"
"""In the engine's log, once for each request."""

ROOT = Path(__file__).resolve().parents[3]
MODULES = (
    "extractor.sglang_plugin.host",
    "extractor.sglang_plugin.hooks",
    "sglang.srt.entrypoints.engine",
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.data_parallel_controller",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.models.registry",
    "sglang.srt.layers.attention.torch_native_backend",
)


class Zygote:
    """The process that forks. `with Zygote() as zygote, zygote.used(monkeypatch): SglangEngine(…)`."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = os.environ | {
            "HSSTORE_SGLANG_CPU": "1",
            "SGLANG_PLATFORM": "hsstore_cpu",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
        }
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "tests.extractor.sglang.zygote", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
        )
        theirs.close()
        self._socket = ours

    def __enter__(self) -> Zygote:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        self._process.wait()
        self._log.close()

    @contextlib.contextmanager
    def used(self, patch: Any) -> Iterator[None]:
        """Engines of `extractor.sglang_plugin.process` are forked here."""
        from extractor.sglang_plugin import process

        with patch.context() as inner:
            inner.setattr(process, "subprocess", Subprocess(self))
            yield

    def ask(self, order: dict[str, Any], files: list[int] | None = None) -> Any:
        """One order and its answer."""
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files or []))] if files else []
        self._socket.sendmsg([json.dumps(order).encode()], ancillary)
        if not (answer := self._socket.recv(1 << 16)):
            self._log.seek(0)
            raise RuntimeError(f"the process that forks engines ended:\n{self._log.read().decode()[-2000:]}")
        return json.loads(answer)


class Subprocess:
    """What `process` uses of the module `subprocess`."""

    DEVNULL = subprocess.DEVNULL

    def __init__(self, zygote: Zygote) -> None:
        self._zygote = zygote

    def Popen(self, arguments: list[str], **how: Any) -> Forked:
        return Forked(self._zygote, arguments, how["env"], how["stdout"].fileno(), how["pass_fds"][0])


class Forked:
    """A forked host, as `Popen` would give it."""

    def __init__(self, zygote: Zygote, arguments: list[str], env: dict[str, str], log: int, channel: int) -> None:
        assert arguments[-3:-1] == ["extractor.sglang_plugin.host", str(channel)]
        self._zygote = zygote
        self.returncode: int | None = None
        self.pid: int = zygote.ask({"start": env}, [log, channel])

    def wait(self) -> int:
        if self.returncode is None:
            self.returncode = self._zygote.ask({"wait": self.pid})
        assert self.returncode is not None
        return self.returncode


def main(channel: socket.socket) -> None:
    for name in MODULES:
        importlib.import_module(name)
    while True:
        data, ancillary, _, _ = channel.recvmsg(1 << 20, socket.CMSG_SPACE(8))
        if not data:
            return
        order = json.loads(data)
        if "wait" in order:
            answer = os.waitstatus_to_exitcode(os.waitpid(order["wait"], 0)[1])
        else:
            files = array.array("i", ancillary[0][2])
            answer = os.fork()
            if answer == 0:
                channel.close()
                become_host(order["start"], *files)
            for file in files:
                os.close(file)
        channel.send(json.dumps(answer).encode())


def become_host(environment: dict[str, str], log: int, channel: int) -> None:
    """What `exec` would do, then the host's own entry point."""
    status = 1
    try:
        os.setsid()
        parent = os.getppid()
        os.environ.clear()
        os.environ.update(environment)
        tempfile.tempdir = None
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        original = multiprocessing.set_start_method
        multiprocessing.set_start_method = lambda *_, **__: original("fork", force=True)  # type: ignore[assignment]
        if name := environment.get(PATCH_VARIABLE):
            PATCHES[name]()
        from extractor.sglang_plugin import host

        host.main([str(channel), str(parent)])
        status = 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def share_salt() -> None:
    """All requests have the same salt, as if there were none."""
    from extractor.sglang_plugin import host

    host.SALT = "shared"


def retract() -> None:
    """Requests go on for 40 tokens, and SGLang takes running ones back at every third forward."""
    import sglang.srt.managers.scheduler as scheduler

    from extractor.sglang_plugin import host

    scheduler.TEST_RETRACT = True
    host.SAMPLING["max_new_tokens"] = 40
    original = host.read_receipt

    def read_receipt(meta_info: dict[str, Any]) -> Any:
        if meta_info["num_retractions"]:
            print(TAKEN_BACK, flush=True)
        return original(meta_info)

    host.read_receipt = read_receipt


def ask_by_eagle3() -> None:
    """Layers are asked for by EAGLE3's ids, 0-based, in every family."""
    from extractor.sglang_plugin import host

    host.capture_method = lambda _, layers: ("EAGLE3", [k - 1 for k in layers])  # type: ignore[assignment]


def abort_long() -> None:
    """Requests of 400 tokens and more are aborted as soon as the engine knows them."""
    import asyncio

    from extractor.sglang_plugin import host

    original = host._capture

    async def capture(engine: Any, request: Any) -> Any:
        if request.target.n_tokens < 400:
            return await original(engine, request)
        manager = engine.tokenizer_manager
        before = set(manager.rid_to_state)
        answer = asyncio.ensure_future(original(engine, request))
        while not (fresh := set(manager.rid_to_state) - before):
            await asyncio.sleep(0)
        for rid in fresh:
            manager.abort_request(rid=rid)
        return await answer

    host._capture = capture


PATCHES = {function.__name__: function for function in (share_salt, retract, ask_by_eagle3, abort_long)}

if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as ours:
        main(ours)
