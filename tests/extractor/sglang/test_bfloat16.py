"""The real SGLang engine in bfloat16, and its death. The last test kills the engine of this module."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from extractor.engines.sglang import SglangEngine
from extractor.sglang_plugin.group import shared_memory
from hsstore.errors import IncompleteError
from tests.extractor.sglang.conftest import LAYERS, Staged, assert_true, error_of, errors

# The engine starts in 20 s on two quiet cores, in minutes on busy ones.
pytestmark = [pytest.mark.sglang, pytest.mark.model, pytest.mark.timeout(1800)]


def test_bfloat16_states_are_as_exact_as_transformers_own(
    bfloat16_engine: SglangEngine, samples: list[np.ndarray], references: dict, tmp_path: Path
) -> None:
    staged = Staged(tmp_path, samples)
    assert_true(list(bfloat16_engine.capture(staged.jobs)), staged)
    found = errors(staged, references["float32"])
    for name in LAYERS:
        own = error_of(references["bfloat16"][name], references["float32"][name])
        print(f"bfloat16 {name}: engine {found[name]:.4f}, transformers {own:.4f}")
        assert found[name] <= 2 * own


def test_a_killed_scheduler_raises_and_leaves_no_process(bfloat16_engine: SglangEngine, tmp_path: Path) -> None:
    """With sglang.Engine in this process, its death would kill us; nor may we wait for answers that cannot come."""
    staged = Staged(tmp_path, [np.full(60, i, np.int32) for i in range(12)])
    shared = shared_memory(bfloat16_engine._process.pid)
    assert shared
    scheduler = max(processes_of(bfloat16_engine).items(), key=lambda process: process[1])[0]
    tickets = bfloat16_engine.capture(staged.jobs)
    next(tickets)
    os.kill(scheduler, signal.SIGKILL)
    with pytest.raises(IncompleteError, match=r"the SGLang engine ended \(exit status -9\)"):
        list(tickets)
    until = time.monotonic() + 120
    while alive := processes_of(bfloat16_engine):
        assert time.monotonic() < until, alive
        time.sleep(0.05)
    assert not any(path.exists() for path in shared)
    with pytest.raises(IncompleteError, match="--resume"):  # and again, not a hang
        list(bfloat16_engine.capture(staged.jobs))
    shutil.rmtree(bfloat16_engine._process.directory)  # holds the log, for people


def processes_of(engine: SglangEngine) -> dict[int, int]:
    """Resident pages of each living process of the engine's group, but for its leader; the scheduler has the most."""
    found = {}
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and os.getpgid(int(entry.name)) == engine._process.pid != int(entry.name):
                found[int(entry.name)] = int((entry / "statm").read_text().split()[1])
        except (OSError, ProcessLookupError):
            continue
    return {pid: pages for pid, pages in found.items() if pages}  # a zombie has none
