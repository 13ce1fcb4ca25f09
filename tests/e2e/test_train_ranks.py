"""Four ranks: 20 steps over the maps, and over HTTP with a kill at step 11 and a resume, give the same numbers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.server.live import serving
from tests.trainer import small_run
from tests.trainer.conftest import World, world  # noqa: F401 (a fixture)

# speculators pulls in extensions made with an old SWIG; nothing of ours.
pytestmark = pytest.mark.filterwarnings("ignore:builtin type .* has no __module__ attribute:DeprecationWarning")

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_SECONDS = 300.0


def command(verifier: Path, source: str | Path, out: Path, *more: str) -> list[str]:
    return [
        *(sys.executable, "-m", "hsstore.cli", "train", "--source", str(source), "--verifier", str(verifier)),
        *("--out", str(out), "--nproc", "4", "--device", "cpu", "--threads", "1", "--num-workers", "1"),
        *("--max-seq-len", "64", "--epochs", "3", "--max-steps", "20", "--lr", "1e-3", "--draft-vocab", "100"),
        *("--save-every", "3", "--log-every", "5", *more),
    ]


def last_step(out: Path) -> int:
    lines = small_run.lines(out) if (out / "metrics.jsonl").exists() else []
    return int(lines[-1]["step"]) if lines else 0


def kill_at(arguments: list[str], out: Path, step: int) -> None:
    """SIGKILL to the launcher and every rank once that step is made."""
    process = subprocess.Popen(arguments, cwd=ROOT, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while last_step(out) < step:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        found = subprocess.run(["ps", "--ppid", str(process.pid), "-o", "pid="], capture_output=True, text=True)
        for pid in [process.pid, *map(int, found.stdout.split())]:
            os.kill(pid, signal.SIGKILL)
        process.wait()


def test_four_ranks_over_both_roads_killed_and_resumed(world: World, tmp_path: Path) -> None:  # noqa: F811
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    subprocess.run(command(world.verifier, world.store, whole), cwd=ROOT, check=True, timeout=DEADLINE_SECONDS)
    with serving(world.store) as live:
        kill_at(command(world.verifier, live.url, killed), killed, 11)
        assert 11 <= last_step(killed) < 20
        again = command(world.verifier, live.url, killed, "--resume")
        subprocess.run(again, cwd=ROOT, check=True, timeout=DEADLINE_SECONDS)
    assert last_step(whole) == 20
    assert small_run.lines(killed) == small_run.lines(whole)
