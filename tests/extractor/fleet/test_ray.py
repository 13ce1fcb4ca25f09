"""`hsstore extract --ray` on a real Ray cluster of several nodes on one machine, with nodes and processes killed.

Events, not clocks: the test itself holds leases on the shards that the workers must not finish yet.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hsstore import paths
from hsstore.cli import run
from hsstore.leases import Leases
from hsstore.store import Store
from hsstore.verify import Verifier
from hsstore.writer import StoreWriter
from tests.extractor.tiny import conversations, write_jsonl
from tests.models import ROOT

N_SAMPLES = 150
TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
PATIENCE_SECONDS = 400  # for a machine that does many other things


def wait_for(condition: Callable[[], Any], what: str) -> Any:
    end = time.monotonic() + PATIENCE_SECONDS
    while not (found := condition()):
        assert time.monotonic() < end, f"{what} did not come about"
        time.sleep(0.02)
    return found


class RayCluster:
    """The cluster process; see `tests.extractor.fleet.cluster`."""

    def __init__(self, directory: Path) -> None:
        self._log = directory / "ray.log"
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.extractor.fleet.cluster"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=ROOT,
                env=os.environ | TOKEN,
                start_new_session=True,
            )
        self.address = self._answer()["address"]

    def add(self) -> str:
        return str(self._ask(do="add")["node"])

    def kill(self, node: str) -> None:
        self._ask(do="kill", node=node)

    def close(self) -> None:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.close()
        self._process.wait(120)
        self._process.stdout.close()

    def _ask(self, **order: str) -> Any:
        assert self._process.stdin
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout
        line = self._process.stdout.readline()
        assert line, f"the cluster ended:\n{self._log.read_text()[-4000:]}"
        return json.loads(line)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    cluster = RayCluster(tmp_path_factory.mktemp("cluster"))
    yield cluster
    cluster.close()


class Command:
    """`hsstore extract … --ray` in a process of its own, and what it says."""

    def __init__(self, directory: Path, arguments: list[str]) -> None:
        self.stdout, self.stderr = directory / "stdout", directory / "stderr"
        with open(self.stdout, "wb") as out, open(self.stderr, "wb") as err:
            command = [sys.executable, "-m", "hsstore.cli", *arguments]
            env = os.environ | TOKEN
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=env)

    def said(self, pattern: str) -> list[Any]:
        """Every match in what was said on stderr; a command that has ended says nothing more."""
        found = re.findall(pattern, self.stderr.read_text(), re.MULTILINE)
        assert found or self._process.poll() is None, self.stderr.read_text()
        return found

    def workers(self) -> dict[int, str]:
        """First letters of the node's id by process id of the worker."""
        runs = self.said(r"^worker (?:on .* \((\w+)\)|\d+) runs: process (\d+)")
        return {int(pid): node for node, pid in runs}

    def send(self, signal_number: int) -> None:
        self._process.send_signal(signal_number)

    def wait(self) -> int:
        return self._process.wait(PATIENCE_SECONDS)


@pytest.fixture
def arguments(tiny_model: Path, tmp_path: Path) -> list[str]:
    prompts = write_jsonl(tmp_path / "chats.jsonl", conversations(N_SAMPLES, longest=110))
    model = ["--model", str(tiny_model), "--engine", "transformers", "--engine-option", "threads=1"]
    out = ["--out", str(tmp_path / "store"), "--shard-rows", "512"]
    return ["extract", *model, "--prompts", str(prompts), *out]


@contextmanager
def holding(out: Path) -> Iterator[tuple[Leases, list[int]]]:
    """Every shard that is left is held by the test: no worker gets one before it lets go."""
    with Leases(out) as leases:
        todo = StoreWriter.open(out).todo()
        assert len(todo) > 8
        assert all(leases.take(shard) for shard in todo)
        yield leases, todo


def holders(out: Path, command: Command) -> list[int]:
    """Workers of the command that are at a shard now."""
    texts = [path.read_text() for path in (out / paths.STAGING).glob("*.lease") if path.exists()]
    pids = [int(text.rsplit(" ", 2)[1]) for text in texts if text.count(" ") >= 2]
    return [pid for pid in pids if pid in command.workers()]


def assert_complete(out: Path) -> None:
    """Every sample once, every byte as it was committed."""
    assert [str(f) for f in Verifier(str(out), "full").findings() if f.severity == "damage"] == []
    with Store.open(out) as store:
        assert sorted(store.index.source_index.tolist()) == list(range(N_SAMPLES))


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


@pytest.mark.timeout(1200)
def test_a_node_killed_in_the_middle_and_another_that_joins(
    cluster: RayCluster, arguments: list[str], tmp_path: Path
) -> None:
    """Nodes come and go: the run notices, others do the lost shard, every sample is in the store exactly once."""
    out = tmp_path / "store"
    first = [cluster.add(), cluster.add()]
    assert run([*arguments, "--shard", "0/8"]) == 0
    with holding(out) as (held, todo):
        command = Command(tmp_path, [*arguments, "--resume", "--ray", cluster.address])
        wait_for(lambda: len(command.said("is at work")) == 2, "work on both nodes")
        for shard in todo[:-4]:
            held.release(shard)
        victim = wait_for(lambda: holders(out, command), "a worker at a shard")[0]
        lost = next(node for node in first if node.startswith(command.workers()[victim]))
        cluster.kill(lost)
        wait_for(lambda: command.said(rf"warning: the node of worker on .* \({lost[:6]}\) is lost"), "the loss")
        joined = cluster.add()
        wait_for(lambda: command.said(rf"worker on .* \({joined[:6]}\) is at work"), "work on the node that joined")
        for shard in todo[-4:]:
            held.release(shard)
        assert command.wait() == 0, command.stderr.read_text()
    assert command.stdout.read_text() == f"written {N_SAMPLES} + failed 0 + skipped 0 = input {N_SAMPLES}\n"
    assert_complete(out)
    assert all(gone(pid) for pid in command.workers())
    assert not [p.name for p in tmp_path.iterdir() if p.name.endswith(".creating")]
    for line in command.stderr.read_text().splitlines():
        assert not re.search(r"raylet|\bgcs|Traceback", line), f"noise on the terminal: {line}"
    for node in {*first, joined} - {lost}:
        cluster.kill(node)


@pytest.mark.timeout(1200)
def test_a_killed_worker_is_replaced_and_sigterm_ends_in_good_order(
    cluster: RayCluster, arguments: list[str], tmp_path: Path
) -> None:
    """What the kernel's memory killer does to a worker costs its shard only; SIGTERM leaves nothing behind."""
    out = tmp_path / "store"
    node = cluster.add()
    assert run([*arguments, "--shard", "0/8"]) == 0
    with holding(out):
        command = Command(tmp_path, [*arguments, "--resume", "--ray", cluster.address])
        wait_for(lambda: command.said("is at work"), "work")
        (victim,) = command.workers()
        os.kill(victim, signal.SIGKILL)
        wait_for(lambda: command.said(r"warning: lost worker on .*: its process ended with exit code -9"), "the loss")
        wait_for(lambda: len(command.said("is at work")) == 2, "work by another worker")
        command.send(signal.SIGTERM)
        assert command.wait() == 143, command.stderr.read_text()
    assert "every committed shard is kept. Continue with:" in command.stderr.read_text()
    assert all(gone(pid) for pid in command.workers())
    assert not list((out / paths.STAGING).iterdir())
    cluster.kill(node)


@pytest.mark.timeout(1200)
def test_a_command_that_is_killed_takes_its_workers_with_it(
    cluster: RayCluster, arguments: list[str], tmp_path: Path
) -> None:
    """Also after kill -9 of what watches them: workers that nobody watches would hold GPUs for ever."""
    out = tmp_path / "store"
    node = cluster.add()
    assert run([*arguments, "--shard", "0/8"]) == 0
    with holding(out):
        command = Command(tmp_path, [*arguments, "--resume", "--ray", cluster.address, "--ray-actors", "1"])
        wait_for(lambda: command.said("is at work"), "work")
        (worker,) = command.workers()
        command.send(signal.SIGKILL)
        assert command.wait() == -signal.SIGKILL
        wait_for(lambda: gone(worker), "the end of the worker")
    cluster.kill(node)
    assert run([*arguments, "--resume"]) == 0
    assert_complete(out)
