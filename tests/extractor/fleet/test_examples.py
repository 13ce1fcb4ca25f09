"""The scripts for SLURM and Ray against the command that they call, and the array script with SLURM played by stubs."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from extractor.cli import extract
from hsstore.cli import run
from hsstore.store import Store
from hsstore.verify import Verifier
from tests.extractor.tiny import conversations, write_jsonl
from tests.models import ROOT
from tests.test_docs import parse

EXAMPLES = ROOT / "examples"
SBATCH = EXAMPLES / "slurm" / "extract.sbatch"
JOB = EXAMPLES / "ray" / "job.sh"
PATHS = {"MODEL": "/m", "PROMPTS": "/p", "OUT": "/o"}


def stub(directory: Path, name: str, script: str) -> None:
    path = directory / name
    path.write_text(f"#!/usr/bin/env bash\n{script}\n")
    path.chmod(0o755)


@pytest.fixture
def commands(tmp_path: Path) -> Path:
    """A directory of stubs: srun and ray run what they are given, scontrol notes that it was called."""
    directory = tmp_path / "bin"
    directory.mkdir()
    stub(directory, "srun", 'while [[ $1 == --* ]]; do shift; done\nexport SLURM_STEP_ID=0 SLURM_PROCID=0\nexec "$@"')
    stub(directory, "ray", 'while [[ $1 != -- ]]; do shift; done\nshift\nexec "$@"')
    stub(directory, "scontrol", f'echo "$@" >> {shlex.quote(str(tmp_path / "requeued"))}')
    stub(directory, "hsstore", f'exec {sys.executable} -m hsstore.cli "$@"')
    return directory


def environment(commands: Path, **variables: str) -> dict[str, str]:
    slurm = {"SLURM_JOB_ID": "77", "SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_CPUS_PER_TASK": "2"}
    return os.environ | {"PATH": f"{commands}:{os.environ['PATH']}"} | slurm | variables


@pytest.mark.parametrize("script", [SBATCH, JOB], ids=lambda path: path.name)
def test_scripts_are_sound(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", "--shell=bash", str(script)], check=True)


@pytest.mark.parametrize("script", [SBATCH, JOB], ids=lambda path: path.name)
def test_scripts_call_the_command_as_it_is(script: Path, commands: Path) -> None:
    """An option that is renamed must not be found out by somebody's job after hours in a queue."""
    stub(commands, "hsstore", 'printf "%s\\0" "$@"')
    called = subprocess.run(
        ["bash", str(script), "--engine-option", "tp=8"], env=environment(commands, **PATHS), capture_output=True
    )
    assert called.returncode == 0, called.stderr
    verb, *arguments = called.stdout.decode().rstrip("\0").split("\0")
    context = extract.make_context(verb, list(arguments))
    assert context.params["model"] == "/m"
    assert context.params["engine_option"] == ("tp=8",)
    assert (context.params["shard"], context.params["ray"]) in [("auto", None), (None, "auto")]


@pytest.mark.parametrize("script", [SBATCH, JOB], ids=lambda path: path.name)
def test_scripts_say_which_variable_is_missing(script: Path, commands: Path) -> None:
    called = subprocess.run(["bash", str(script)], env=environment(commands, MODEL="/m"), capture_output=True)
    assert called.returncode == 1
    assert b"set PROMPTS to" in called.stderr


@pytest.mark.parametrize(("code", "requeued"), [(143, True), (4, False), (2, False), (0, False)])
def test_only_a_task_that_was_told_to_end_goes_back_into_the_queue(
    code: int, requeued: bool, commands: Path, tmp_path: Path
) -> None:
    """A wrong call or a full disk would come back for ever; a task whose time is over must come back."""
    stub(commands, "hsstore", f"exit {code}")
    called = subprocess.run(["bash", str(SBATCH)], env=environment(commands, **PATHS), capture_output=True)
    assert called.returncode == code
    note = tmp_path / "requeued"
    assert (note.read_text() == "requeue 77\n") if requeued else not note.exists()


def test_commands_in_the_pages_exist() -> None:
    n_parsed = 0
    for page in [*EXAMPLES.rglob("README.md")]:
        for line in re.findall(r"^\$ (hsstore .*)$", page.read_text(), re.MULTILINE):
            parse(shlex.split(line)[1:])
            n_parsed += 1
    assert n_parsed >= 3


def test_the_cluster_file_is_what_ray_takes() -> None:
    """By Ray's own schema."""
    from ray.autoscaler._private.util import prepare_config, validate_config

    config = yaml.safe_load((EXAMPLES / "ray" / "cluster.yaml").read_text())
    assert config["provider"]["type"] == "local"
    validate_config(prepare_config(config))


@pytest.mark.timeout(600)
def test_an_array_on_one_store(commands: Path, tiny_model: Path, tmp_path: Path) -> None:
    """Three tasks at once, with numbers from 4: each does its part, together the whole; a task again is a no-op."""
    out = tmp_path / "store"
    prompts = write_jsonl(tmp_path / "chats.jsonl", conversations(60, longest=110))
    variables = {"MODEL": str(tiny_model), "PROMPTS": str(prompts), "OUT": str(out), "OMP_NUM_THREADS": "1"}
    array = {"SLURM_ARRAY_TASK_COUNT": "3", "SLURM_ARRAY_TASK_MIN": "4"}
    options = ["--engine", "transformers", "--engine-option", "threads=1", "--shard-rows", "512"]

    def task(number: int) -> subprocess.Popen[str]:
        env = environment(commands, **variables, **array, SLURM_ARRAY_TASK_ID=str(number))
        command = ["bash", str(SBATCH), *options]
        return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    tasks = [task(number) for number in (4, 5, 6)]
    said = [process.communicate() for process in tasks]
    assert [process.returncode for process in tasks] == [0, 0, 0], said
    assert "part 1/3: " in said[1][1]
    assert [str(f) for f in Verifier(str(out), "full").findings() if f.severity == "damage"] == []
    with Store.open(out) as store:
        assert sorted(store.index.source_index.tolist()) == list(range(60))
    parts = [json.loads(path.read_text())["writer"]["pid"] for path in sorted((out / "records").iterdir())]
    assert len(set(parts)) == 3
    assert all(pid == parts[shard % 3] for shard, pid in enumerate(parts))
    records = {path: path.stat().st_mtime_ns for path in (out / "records").iterdir()}
    assert run(["extract", "--model", str(tiny_model), "--prompts", str(prompts), "--out", str(out), *options,
                "--shard", "1/3"]) == 0  # fmt: skip
    assert {path: path.stat().st_mtime_ns for path in (out / "records").iterdir()} == records
