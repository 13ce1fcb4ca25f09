"""Two ranks in processes of their own: exact across roads, kills and resumes, and one sentence when one is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hsstore.errors import ConflictError, HsstoreError, IncompleteError, ServiceError
from tests.server.live import serving
from tests.trainer import small_run
from tests.trainer.conftest import World
from trainer import launch as launch_module
from trainer.interrupt import Stop
from trainer.launch import _result
from trainer.outcome import RankReport
from trainer.state import latest, read_state

# speculators pulls in extensions made with an old SWIG; nothing of ours.
pytestmark = pytest.mark.filterwarnings("ignore:builtin type .* has no __module__ attribute:DeprecationWarning")

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_SECONDS = 240.0  # imports of two ranks on a busy machine included


def command(world: World, out: Path, *more: str, source: str | Path | None = None) -> list[str]:
    return [
        *(sys.executable, "-m", "hsstore.cli", "train", "--source", str(source or world.store)),
        *("--verifier", str(world.verifier), "--out", str(out), "--nproc", "2", "--device", "cpu", "--threads", "1"),
        *("--max-seq-len", "64", "--epochs", "1", "--lr", "1e-3", "--warmup-steps", "2", "--draft-vocab", "100"),
        *("--num-workers", "1", "--log-every", "1", "--save-every", "2", *more),
    ]


@contextmanager
def running(arguments: list[str]) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(arguments, cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """(exit code, stderr)"""
    _, err = process.communicate(timeout=DEADLINE_SECONDS)
    return process.returncode, err


def wait_for_step(out: Path, step: int, *, former: int = 0) -> None:
    """Until the run is there. `former` = inode of the file of metrics that a resumed run replaces."""
    file, deadline = out / "metrics.jsonl", time.monotonic() + DEADLINE_SECONDS
    while time.monotonic() < deadline:
        time.sleep(0.02)
        if not file.exists() or file.stat().st_ino == former:
            continue
        lines = small_run.lines(out)
        if lines and lines[-1]["step"] >= step:
            return
    raise AssertionError(f"{out} never came to step {step}")


def ranks_of(process: subprocess.Popen[str]) -> list[int]:
    found = subprocess.run(["ps", "--ppid", str(process.pid), "-o", "pid="], capture_output=True, text=True)
    return [int(pid) for pid in found.stdout.split()]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def finished(arguments: list[str]) -> str:
    with running(arguments) as process:
        code, err = ended(process)
    assert code == 0, err
    return err


def test_killed_stopped_and_resumed_over_http_is_never_stopped_over_the_maps(world: World, tmp_path: Path) -> None:
    """Two ranks in four acts, in one test because each act imports torch twice.

    Both roads, a SIGKILL of one rank, Ctrl-C, two resumes: every number is that of the unbroken run to the last bit.
    """
    finished(command(world, tmp_path / "whole"))
    whole, out = small_run.lines(tmp_path / "whole"), tmp_path / "run"
    assert [x["empty_bins"] for x in whole if x["kind"] == "train"][-1] == 1, "the interesting case: 27 bins, 2 ranks"
    with serving(world.store) as live:
        _kill_a_rank(command(world, out, source=live.url), out)
        _interrupt(command(world, out, "--resume", source=live.url), out)
        finished(command(world, out, "--resume", source=live.url))
    assert small_run.lines(out) == whole


def _kill_a_rank(arguments: list[str], out: Path) -> None:
    """All end, with one sentence and a code of its own."""
    with running(arguments) as process:
        wait_for_step(out, 4)
        ranks = ranks_of(process)
        os.kill(ranks[1], signal.SIGKILL)
        code, err = ended(process)
    assert code == IncompleteError.exit_code
    assert "hsstore: error: rank 1 of 2 was killed by SIGKILL, so all were ended" in err
    assert "--resume" in err
    assert "Traceback" not in err
    assert not any(alive(pid) for pid in ranks)


def _interrupt(arguments: list[str], out: Path) -> None:
    """All save at one step and end."""
    before, former = latest(out), (out / "metrics.jsonl").stat().st_ino
    assert before is not None
    step = read_state(before).step  # now: the run may drop this checkpoint for its own
    with running(arguments) as process:
        wait_for_step(out, step + 1, former=former)
        process.send_signal(signal.SIGINT)
        code, err = ended(process)
    after = latest(out)
    assert after is not None
    assert code == 130, err
    assert read_state(after).step > step
    assert "run the same command with --resume" in err
    assert "Traceback" not in err


class Ended:
    """A process that has ended with a code."""

    def __init__(self, returncode: int) -> None:
        self.returncode = returncode


def result_of(codes: list[int], reports: list[RankReport | None]) -> Any:
    options = small_run.options(Path("model"), "store", Path("run"), nproc=len(codes))
    return _result([Ended(c) for c in codes], reports, options)  # type: ignore[arg-type]


def test_the_cause_is_told_and_not_its_effects(capsys: pytest.CaptureFixture[str]) -> None:
    """Of three ranks one lost the service; the others, later or earlier, lost their peer."""
    effect = RankReport(kind="error", message="RuntimeError: Connection closed by peer", traceback="Trace", time=1.0)
    cause = RankReport(kind="service", message="no complete answer", hint="is it running?", time=2.0)
    with pytest.raises(ServiceError, match="rank 1 of 3: no complete answer") as caught:
        result_of([1, 1, 1], [effect, cause, effect])
    assert caught.value.hint == "is it running?"
    assert "Trace" not in capsys.readouterr().err


def test_what_all_ranks_say_is_told_once() -> None:
    same = RankReport(kind="conflict", message="another store", time=1.0)
    with pytest.raises(ConflictError) as caught:
        result_of([2, 2], [same, same])
    assert caught.value.message == "another store"


def test_an_error_without_a_name_comes_with_its_trace(capsys: pytest.CaptureFixture[str]) -> None:
    report = RankReport(kind="error", message="KeyError: 'x'", traceback="Traceback …\n", time=1.0)
    with pytest.raises(HsstoreError, match="rank 0 of 2: KeyError"):
        result_of([1, 0], [report, None])
    assert "Traceback …" in capsys.readouterr().err


def test_a_rank_that_says_nothing_is_told_by_its_end() -> None:
    with pytest.raises(IncompleteError, match="rank 1 of 2 ended with exit code 7"):
        result_of([0, 7], [None, None])


def test_a_rank_told_to_stop_before_it_listens_is_an_interrupted_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def deaf(options: Any, directory: Path, rank: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen(["sleep", "60"])

    monkeypatch.setattr(launch_module, "_start", deaf)
    stop = Stop()
    stop.requested = True
    with pytest.raises(KeyboardInterrupt):
        launch_module.launch(small_run.options(Path("model"), "store", tmp_path, nproc=2), stop)
