"""A long run with everything that happens in one ends complete: short form of `python -m tests.chaos.extraction`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.extractor.tiny import write_tiny_model

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from extractor.quiet import transformers

    transformers()
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny-llama")


def run(tiny: Path, *arguments: str) -> dict[str, Any]:
    """The report, without violations. A process of its own: it may have to enter a namespace to mount a disk."""
    command = [sys.executable, "-m", "tests.chaos.extraction", "--json", "--model", str(tiny), *arguments]
    done = subprocess.run([*command, "--shard-rows", "512"], cwd=ROOT, capture_output=True, text=True, timeout=540)
    assert done.stdout, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    assert report["violations"] == [], done.stderr
    assert done.returncode == 0
    assert len(report["balances"]) == report["rounds"]
    assert report["verified"] == ["verify manifest --full clean"] * report["rounds"]
    return report


def test_killed_terminated_and_out_of_space_an_extraction_is_resumed_to_completeness(tiny: Path) -> None:
    """Every line is accounted for, every sample is there once, whatever ended the runs before the last."""
    engine = ["--engine", "transformers", "--engine-option", "threads=1"]
    faults = ["--kills", "1", "--terms", "1", "--full", "1"]
    report = run(tiny, *engine, *faults, "--samples", "160", "--longest", "20")
    done = {"kill": 1, "term": 1, "full": 0 if report["no_full_disk"] else 1}
    assert report["faults"] == {name: n for name, n in done.items() if n}
    assert report["runs"] >= 3


@pytest.mark.sglang
def test_a_run_outlives_the_crash_of_its_engine(tiny: Path) -> None:
    """A scheduler or host process that is killed costs its open shards, not the run, and no sample."""
    engine = ["--engine", "sglang", "--engine-option", "device=cpu", "--engine-option", "in_flight=4"]
    report = run(
        tiny,
        *engine,
        "--crashes",
        "1",
        "--kills",
        "0",
        "--terms",
        "0",
        "--full",
        "0",
        "--samples",
        "120",
        "--longest",
        "8",
    )
    assert report["faults"] == {"crash": 1}
    assert sum(report["killed"].values()) == 1
    assert report["survived"] == 1
