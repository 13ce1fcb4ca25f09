"""Killed at any instant, an extraction loses nothing that was committed and ends as if it had never been killed."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hsstore.manifest import load_header, load_layouts
from hsstore.store import Store
from hsstore.verify import Verifier
from tests.extractor.tiny import conversations, write_jsonl

N_SAMPLES = 80
KILLS = 20


class ForkServer:
    def __init__(self) -> None:
        command = [sys.executable, "-m", "tests.extractor.forkserver"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self._process = subprocess.Popen(
            command, **pipes, text=True, cwd=Path(__file__).parents[2], env=os.environ | {"OMP_NUM_THREADS": "1"}
        )
        self.run(["--version"])  # has everything imported when it answers

    def run(self, arguments: list[str], seconds: float | None = None, **order: str) -> int:
        """Exit status; −n for signal n. Killed after so many seconds, or when the file `until` is there."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps({"arguments": arguments, "seconds": seconds, **order}) + "\n")
        self._process.stdin.flush()
        while not (line := self._process.stdout.readline()).startswith('{"status"'):
            assert line, "the fork server ended"
        return int(json.loads(line)["status"])

    def close(self) -> None:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(120)


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    server = ForkServer()
    yield server
    server.close()


@pytest.fixture(scope="module")
def arguments(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    prompts = write_jsonl(tmp_path_factory.mktemp("prompts") / "chats.jsonl", conversations(N_SAMPLES, longest=110))
    model = ["--model", str(tiny_model), "--engine", "transformers", "--engine-option", "threads=1"]
    return ["extract", *model, "--prompts", str(prompts), "--shard-rows", "512"]


def identity(out: Path) -> tuple[Any, ...]:
    """What must be equal: contents, layout, tokens."""
    assert [str(f) for f in Verifier(str(out), "full").findings() if f.severity == "damage"] == []
    layout = load_layouts(out, load_header(out))[0]
    with Store.open(out) as store:
        assert sorted(store.index.source_index.tolist()) == list(range(N_SAMPLES))
        return store.manifest_id, layout.layout_sha256, layout.input


def n_committed(out: Path) -> int:
    return len(list((out / "records").glob("*.json"))) if out.exists() else 0


@pytest.mark.timeout(300)
def test_twenty_kills_change_nothing(server: ForkServer, arguments: list[str], tmp_path: Path) -> None:
    """kill -9 at 20 random instants, resumed each time: no committed shard is redone or lost, nothing is left over.

    Without it a crash in a run of days costs either the work or the trust in it.
    """
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert server.run([*arguments, "--out", str(whole)]) == 0
    randomness = random.Random(4)
    shortest = 10.0  # seconds of the shortest run that came through: instants are drawn from within it
    committed: dict[str, int] = {}
    interrupted = in_the_middle = rounds = 0
    while interrupted < KILLS:
        rounds += 1
        assert rounds <= 20 * KILLS, f"only {interrupted} of {rounds} kills hit a run"
        run = [*arguments, "--out", str(killed), "--resume"]
        open_shards = [n for n in range(n_committed(whole) - 1) if not (killed / f"records/{n:06d}.json").exists()]
        started = time.monotonic()
        if rounds % 3 == 0 and open_shards:  # as a commit happens, whatever the speed of the machine
            status = server.run(run, until=str(killed / f"records/{randomness.choice(open_shards):06d}.json"))
        else:
            status = server.run(run, randomness.uniform(0.1, shortest))
        interrupted += status == -9
        for record in (killed / "records").glob("*.json") if killed.exists() else ():
            stamp = committed.setdefault(record.name, record.stat().st_mtime_ns)
            assert record.stat().st_mtime_ns == stamp, f"{record.name} was committed twice"
        if killed.exists():
            assert [str(f) for f in Verifier(str(killed), "quick").findings() if f.severity == "damage"] == []
            in_the_middle += 0 < n_committed(killed) < n_committed(whole)
        if status == 0:  # done: kill a new one
            shortest = min(shortest, time.monotonic() - started)
            assert identity(killed) == identity(whole)
            killed = tmp_path / f"killed-{rounds}"
            committed = {}
    assert interrupted == KILLS
    assert in_the_middle >= 3, "no kill hit a store half-way"
    assert server.run([*arguments, "--out", str(killed), "--resume"]) == 0
    assert identity(killed) == identity(whole)
    assert not list((killed / "staging").iterdir())


def test_sigterm_ends_cleanly(server: ForkServer, arguments: list[str], tmp_path: Path) -> None:
    """A batch system's SIGTERM: open shards go, committed ones stay, the exit code says which signal it was."""
    out = tmp_path / "store"
    order = [*arguments, "--out", str(out), "--prompts", str(many(tmp_path))]
    assert server.run(order, until=str(out / "records" / "000001.json"), kill="SIGTERM") == 143
    assert n_committed(out) >= 2
    assert not list((out / "staging").iterdir())


def test_ctrl_c_ends_cleanly(arguments: list[str], tmp_path: Path) -> None:
    """The real command in a terminal: the way to resume is printed, no traceback, exit code 130."""
    out = tmp_path / "store"
    command = [sys.executable, "-m", "hsstore.cli", *arguments, "--out", str(out), "--prompts", str(many(tmp_path))]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    end = time.monotonic() + 400
    while n_committed(out) < 2 and time.monotonic() < end and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=300)
    assert process.returncode == 130, stderr
    assert "every committed shard is kept" in stderr
    assert "--resume" in stderr.splitlines()[-1]
    assert "Traceback" not in stderr
    assert not stdout
    assert not list((out / "staging").iterdir())


def many(directory: Path) -> Path:
    return write_jsonl(directory / "many.jsonl", conversations(3000))
