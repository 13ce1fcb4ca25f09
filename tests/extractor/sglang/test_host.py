"""The engine process: how answers are read, how families are asked, and that nothing of it outlives its parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest

from extractor.sglang_plugin import CPU_VARIABLE, host
from extractor.sglang_plugin.group import kill_group, shared_memory
from extractor.sglang_plugin.process import EngineProcess, last_error_line
from extractor.sglang_plugin.protocol import KEY, Failed, Receipt, Start
from hsstore.errors import IncompleteError


def meta(**fields: Any) -> dict[str, Any]:
    receipt = msgspec.to_builtins(Receipt(3, {"final": 1}, (2,)))
    return {"finish_reason": {"type": "length"}, KEY: [receipt], **fields}


def test_a_receipt_is_read_from_the_answer() -> None:
    assert host.read_receipt(meta()) == Receipt(3, {"final": 1}, (2,))


def test_an_abort_is_no_success() -> None:
    """It looks like a normal answer, but for its reason."""
    found = host.read_receipt(meta(finish_reason={"type": "abort", "message": "timeout"}))
    assert "abort: timeout" in found.error
    assert host.read_receipt(meta(finish_reason=None)).error


def test_an_answer_without_receipt_is_an_error() -> None:
    """A hook whose target moved is only logged by SGLang, which serves on."""
    answer = meta()
    del answer[KEY]
    assert "hooks did not run" in host.read_receipt(answer).error


class Both:
    def set_dflash_layers_to_capture(self) -> None: ...
    def set_eagle3_layers_to_capture(self) -> None: ...


class EagleOnly:
    def set_eagle3_layers_to_capture(self) -> None: ...


class Neither: ...


@pytest.mark.parametrize(("family", "method"), [(Both, "DFLASH"), (EagleOnly, "EAGLE3")])
def test_families_are_asked_in_the_way_that_is_exact(
    monkeypatch: pytest.MonkeyPatch, family: type, method: str
) -> None:
    """EAGLE3 ids mean other layers in DeepSeek's family when the first is not 1; DFLASH ids never do."""
    set_family(monkeypatch, family)
    assert host.capture_method("A", (2, 15, 27)) == (method, [1, 14, 26])


def test_a_family_without_states_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    set_family(monkeypatch, Neither)
    with pytest.raises(host.BadCall, match="offers no states"):
        host.capture_method("A", (2,))


def set_family(monkeypatch: pytest.MonkeyPatch, family: type) -> None:
    registry = ModuleType("sglang.srt.models.registry")

    class ModelRegistry:
        @staticmethod
        def resolve_model_cls(architectures: list[str]) -> tuple[type, str]:
            return family, architectures[0]

    registry.ModelRegistry = ModelRegistry  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, registry.__name__, registry)


def test_the_longest_prompt_fits_into_every_rank() -> None:
    """The infos come from whichever rank was last; a longer prompt would fail on the rank with the smallest pool."""
    infos = [{"max_req_input_len": 505}]

    def ranks(*pools: int) -> list[dict[str, Any]]:
        return [{"memory_usage": {"token_capacity": pool}} for pool in pools]

    assert host.longest_prompt(infos, ranks(1024)) == 504
    assert host.longest_prompt(infos, ranks(1024, 300, 900)) == 293


def test_cores_are_shared_out_among_ranks() -> None:
    assert host.core_lists([0, 1, 2, 3, 4], 2) == ["0,1", "2,3"]
    assert host.core_lists([4, 6], 2) == ["4", "6"]
    assert host.core_lists([4, 6], 4) == ["4", "6", "4", "6"]


def test_every_rank_gets_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang counts tp × dp lists; one too few ends its start."""
    variables = ("SGLANG_CPU_OMP_THREADS_BIND", "OMP_NUM_THREADS", "SGLANG_PLATFORM", CPU_VARIABLE)
    for name in variables:
        monkeypatch.setenv(name, "")  # so that all are put back
        monkeypatch.delenv(name)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    host.prepare_cpu({"tp_size": 2, "dp_size": 2})
    assert os.environ["SGLANG_CPU_OMP_THREADS_BIND"] == "0,1|2,3|4,5|6,7"
    assert os.environ["OMP_NUM_THREADS"] == "2"


@pytest.mark.parametrize("flags", [{"enable_dp_attention": True, "dp_size": 2}, {"attn_dp_size": 2}])
def test_data_parallel_attention_is_refused_on_a_cpu(flags: dict[str, Any]) -> None:
    with pytest.raises(host.BadCall, match="needs CUDA"):
        host.prepare_cpu(flags)


def test_the_log_gives_the_last_error(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    assert last_error_line(log) == ""
    log.write_text("start\nValueError: first\n  at x\n[time] RuntimeError: second\nbye\n")
    assert last_error_line(log) == "[time] RuntimeError: second"


def start(**engine: Any) -> Start:
    return Start(engine, (1,), "LlamaForCausalLM", "cpu", 100)


@pytest.mark.sglang
def test_an_unknown_flag_is_named() -> None:
    process = EngineProcess(start(no_such_flag=1), log_level="error")
    try:
        found = process.receive(300)
        assert isinstance(found, Failed)
        assert (found.reason, found.usage) == ("SGLang has no flag no_such_flag", True)
        assert "launch_server --help" in found.hint
    finally:
        process.close()
    assert_gone(process.pid)
    assert not process.directory.exists()


def test_a_lost_process_raises_and_keeps_only_its_log() -> None:
    process = EngineProcess(start(), log_level="error")
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(IncompleteError, match=r"ended during its start \(exit status -9\)") as caught:
        process.receive(60)
    assert str(process.log) in caught.value.message
    assert "--resume" not in caught.value.hint
    assert list(process.directory.iterdir()) == [process.log]
    process.close()
    process.log.unlink()
    process.directory.rmdir()


def test_a_silent_process_is_ended() -> None:
    process = EngineProcess(start(), log_level="error")
    with pytest.raises(IncompleteError, match="said nothing for 0 s during its start"):
        process.receive(0.01)
    assert_gone(process.pid)
    process.close()
    process.log.unlink()
    process.directory.rmdir()


def test_the_shared_memory_of_the_group_is_removed() -> None:
    """SGLang leaves some behind at each end; only its own kinds go, since a store may lie in /dev/shm too."""
    names = ["sglang_loads_hsstore_test", "hsstore_test_model"]
    script = (
        "import mmap, sys\n"
        "maps = []\n"
        f"for name in {names!r}:\n"
        "    file = open('/dev/shm/' + name, 'w+b'); file.truncate(4096)\n"
        "    maps.append(mmap.mmap(file.fileno(), 4096))\n"
        "print(flush=True); sys.stdin.read()\n"
    )
    paths = [Path("/dev/shm") / name for name in names]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    try:
        with subprocess.Popen([sys.executable, "-c", script], start_new_session=True, **pipes) as process:
            assert process.stdout is not None
            process.stdout.readline()
            assert shared_memory(process.pid) == {paths[0]}
            kill_group(process.pid)
            assert process.wait(120) == -signal.SIGKILL
        assert [path.exists() for path in paths] == [False, True]
    finally:
        paths[1].unlink(missing_ok=True)


PARENT = """
import sys, time
from extractor.engines.sglang import EngineProcess
from extractor.sglang_plugin.protocol import Start
process = EngineProcess(Start({}, (1,), "LlamaForCausalLM", "cpu", 100), log_level="error")
print(process.pid, process.directory, flush=True)
process.receive(300)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_no_engine_outlives_its_parent(number: signal.Signals) -> None:
    """Left alone it would hold the GPUs until somebody finds it."""
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as parent:
        assert parent.stdout is not None
        pid, directory = parent.stdout.readline().split()
        time.sleep(0.5)
        parent.send_signal(number)
        parent.wait(120)
    assert_gone(int(pid))
    assert not Path(directory.decode()).exists()


def assert_gone(pid: int) -> None:
    until = time.monotonic() + 120
    while time.monotonic() < until:
        try:
            os.killpg(pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    pytest.fail(f"processes of group {pid} live on")
