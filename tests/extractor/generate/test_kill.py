"""Killed at any instant, a run loses no answer and ends as if it had never been killed."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.extractor.test_kill import ForkServer
from tests.extractor.tiny import conversations, write_jsonl

N_LINES = 60
KILLS = 12


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    server = ForkServer()
    yield server
    server.close()


@pytest.fixture(scope="module")
def arguments(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    prompts = write_jsonl(tmp_path_factory.mktemp("prompts") / "chats.jsonl", conversations(N_LINES))
    engine = ["--engine", "transformers", "--engine-option", "threads=1", "--batch", "6", "--weights-digest", "sampled"]
    words = ["generate", "--model", str(tiny_model), "--prompts", str(prompts), "--max-new-tokens", "10"]
    return [*words, *engine]


def written(path: Path) -> list[int]:
    """Lines that a file has whole."""
    if not path.exists():
        return []
    whole = [line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
    return [json.loads(line)["generate"]["line"] for line in whole]


@pytest.mark.timeout(300)
def test_a_dozen_kills_change_nothing(server: ForkServer, arguments: list[str], tmp_path: Path) -> None:
    """kill -9 at random instants, resumed each time: nothing twice, nothing lost, the same bytes at the end."""
    whole = tmp_path / "whole.jsonl"
    assert server.run([*arguments, "--out", str(whole)]) == 0
    randomness = random.Random(7)
    shortest = 10.0
    interrupted = in_the_middle = rounds = 0
    out = tmp_path / "killed.jsonl"
    while interrupted < KILLS:
        rounds += 1
        assert rounds <= 20 * KILLS, f"only {interrupted} of {rounds} kills hit a run"
        part = out.with_name(f"{out.name}.part")
        before = written(part)
        begun = time.monotonic()
        status = server.run([*arguments, "--out", str(out), "--resume"], randomness.uniform(0.05, shortest))
        interrupted += status == -9
        if status == -9 and not out.exists():
            after = written(part)
            assert after[: len(before)] == before, "an answer was lost"
            assert len(after) == len(set(after)), "an answer was written twice"
            in_the_middle += 0 < len(after) < N_LINES
        if status == 0:
            shortest = min(shortest, time.monotonic() - begun)
            assert out.read_bytes() == whole.read_bytes()
            out = tmp_path / f"killed-{rounds}.jsonl"
    assert in_the_middle >= 2, "no kill hit a file half-way"
    assert server.run([*arguments, "--out", str(out), "--resume"]) == 0
    assert out.read_bytes() == whole.read_bytes()
    assert not list(tmp_path.glob("*.part"))
    assert not list(tmp_path.glob(".*.tmp"))


@pytest.mark.parametrize(("signal", "status"), [("SIGTERM", 143), ("SIGINT", 130)])
def test_a_signal_ends_resumable(
    signal: str, status: int, server: ForkServer, arguments: list[str], tmp_path: Path
) -> None:
    """A batch system's SIGTERM and Ctrl-C: what is answered stays, the exit code says which it was."""
    out = tmp_path / "out.jsonl"
    many = write_jsonl(tmp_path / "many.jsonl", conversations(3000))
    meta = out.with_name("out.jsonl.meta.json")
    order = [*arguments, "--out", str(out), "--prompts", str(many)]
    assert server.run(order, until=str(meta), kill=signal) == status
    assert not out.exists()
    assert json.loads(meta.read_text())["status"] == "running"
