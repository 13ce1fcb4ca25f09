"""The real SGLang engine answers, dies in the middle, comes back, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from extractor.generate.run import generate
from extractor.generate.settings import Settings
from extractor.generate.sources.sglang import Sglang
from tests.extractor.tiny import conversations, write_jsonl

N_LINES = 24


@pytest.mark.sglang
@pytest.mark.timeout(300)
def test_an_engine_that_dies_in_the_middle_costs_nothing(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its whole group is killed after some answers, as by the kernel's out-of-memory killer."""
    pids: list[int] = []
    real, replies = Sglang.collect, 0

    def killing(self: Sglang, on_tokens: Any) -> Any:
        nonlocal replies
        if not pids or self._process.pid != pids[-1]:
            pids.append(self._process.pid)
        replies += 1
        if replies == 8:
            os.killpg(self._process.pid, signal.SIGKILL)
        return real(self, on_tokens)

    monkeypatch.setattr(Sglang, "collect", killing)
    lines = conversations(N_LINES)
    lines[3]["messages"].append({"role": "user", "content": "and again"})
    lines[5]["messages"][0]["content"] = "long " * 200
    asked = Settings(
        model=str(tiny_model),
        prompts=write_jsonl(tmp_path / "in.jsonl", lines),
        out=tmp_path / "out.jsonl",
        engine="sglang",
        engine_options={"device": "cpu"},
        max_new_tokens=8,
        in_flight=4,
        temperature=0.8,
    )
    outcome = generate(asked)
    assert len(pids) == 2
    assert outcome.failed == 0
    found = [json.loads(line) for line in asked.out.read_text().splitlines()]
    numbers = [row["generate"]["line"] for row in found]
    assert len(numbers) > 10
    assert numbers == sorted(set(numbers))
    listed = {json.loads(line)["line"]: json.loads(line) for line in asked.failures.read_text().splitlines()}
    assert {*numbers, *listed} == set(range(1, N_LINES + 1))
    assert listed[6]["reason"] == "prompt_too_long"
    turns = {row["generate"]["line"]: row["generate"]["turns"] for row in found}
    assert all(0 < turn["completion_tokens"] <= 8 for each in turns.values() for turn in each)
    assert all(turn["finish_reason"] in ("stop", "length") for each in turns.values() for turn in each)
    run = json.loads(asked.meta.read_text())["runs"][0]
    assert (run["engine"], run["version"], run["compute_dtype"]) == ("sglang", "0.5.23", "bfloat16")
    until = time.monotonic() + 60
    while (left := [pid for leader in pids for pid in living(leader)]) and time.monotonic() < until:
        time.sleep(0.1)
    assert left == []


def living(leader: int) -> list[int]:
    """Processes of a group that have not ended; what only waits for its parent to take notice has."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # one that has just ended
            if entry.name.isdigit() and os.getpgid(int(entry.name)) == leader:
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                found += [int(entry.name)] if state not in "ZX" else []
    return found
