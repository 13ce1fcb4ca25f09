"""`hsstore verifier` on the tiny model, and shards staged as the writer stages them, for tests over HTTP."""

from __future__ import annotations

import os
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from extractor.engines.base import Job, Ticket
from hsstore import owner
from hsstore.digest import crc32c
from tests.extractor.tiny import HIDDEN

LAYERS = ("after_2", "after_4", "after_5", "final")
SPEC = "2,4,5"
CHUNK_TOKENS = 64
FLAGS = ("--chunked-prefill-size", str(CHUNK_TOKENS), "--max-total-tokens", "4096")
ROW_BYTES = 2 * HIDDEN


class Verb:
    """One `hsstore verifier` in a process of its own."""

    def __init__(self, model: Path, *options: str, flags: Sequence[str] = FLAGS) -> None:
        command = [sys.executable, "-m", "hsstore.cli", "verifier", "--model", str(model), "--layers", SPEC]
        self.process = subprocess.Popen(
            [*command, "--port", "0", "--dtype", "float32", *options, "--", *flags],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.lines: list[str] = []
        self.said = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self.said:
                self.lines.append(line)
                self.said.notify_all()
        with self.said:
            self.said.notify_all()

    def wait_for(self, text: str) -> str:
        """The line with that text, once it is there."""
        with self.said:
            while not (found := [line for line in self.lines if text in line]):
                assert self._reader.is_alive(), "".join(self.lines)
                self.said.wait(5)
            return found[0]

    @property
    def url(self) -> str:
        found = re.search(r"--url (\S+)", self.wait_for("next:"))
        assert found
        return found[1]

    @property
    def spool(self) -> Path:
        found = re.search(r"wait in (\S+) for", self.wait_for("of rows wait in"))
        assert found
        return Path(found[1])

    def server_pid(self) -> int:
        """Of the process that leads the group of the server's processes."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        while not (pids := children.read_text().split()):
            assert self.process.poll() is None, "".join(self.lines)
            time.sleep(0.05)
        return int(pids[0])

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
        self.process.wait()
        self._reader.join()
        assert self.process.stderr is not None
        self.process.stderr.close()


def group_members(leader: int) -> list[int]:
    """Living processes of a group."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, _, group = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
            except OSError:
                continue
            if int(group) == leader and state != "Z":
                found.append(int(entry.name))
    return found


def wait_until_gone(leader: int) -> None:
    """Every process of a group has ended; the test's own time-out bounds it."""
    while group_members(leader):
        time.sleep(0.05)


def kill_server(verb: Verb) -> None:
    os.killpg(verb.server_pid(), signal.SIGKILL)


class Staged:
    """A shard as the writer stages it: full size, sparse, in the directory of an attempt; gaps between the samples."""

    GAP = 3

    def __init__(self, store: Path, samples: Sequence[np.ndarray], *, marked: bool = True) -> None:
        self.directory = store / "staging" / f"000000.{secrets.token_hex(8)}"
        self.directory.mkdir(parents=True)
        if marked:
            owner.mark(self.directory)
        self.rows = sum(len(ids) + self.GAP for ids in samples)
        self.files = {name: str(self.directory / f"hidden.{name}") for name in LAYERS}
        for path in self.files.values():
            with open(path, "wb") as file:
                file.truncate(self.rows * ROW_BYTES)
        self.jobs, row = [], self.rows
        for index, ids in enumerate(samples):  # the first sample lies last
            row -= len(ids) + self.GAP
            self.jobs.append(Job(source_index=1000 + index, input_ids=ids, row=row, files=self.files))

    def all(self, name: str) -> np.ndarray:
        return np.fromfile(self.files[name], np.uint16).reshape(self.rows, HIDDEN)

    def states(self, name: str, job: Job) -> np.ndarray:
        """uint16 [T, H]"""
        return self.all(name)[job.row : job.row + len(job.input_ids)]

    def bytes(self) -> dict[str, bytes]:
        return {name: Path(path).read_bytes() for name, path in self.files.items()}


def assert_true(tickets: Sequence[Ticket], staged: Staged) -> None:
    """One good ticket a job, its digests those of the rows in the files; nothing else of the shard is written."""
    assert sorted(t.source_index for t in tickets) == sorted(j.source_index for j in staged.jobs)
    by_index = {ticket.source_index: ticket for ticket in tickets}
    used = np.zeros(staged.rows, bool)
    everything = {name: staged.all(name) for name in LAYERS}
    for job in staged.jobs:
        ticket = by_index[job.source_index]
        assert (ticket.error, ticket.n_rows) == ("", len(job.input_ids))
        rows = slice(job.row, job.row + len(job.input_ids))
        used[rows] = True
        assert ticket.crc32c == {name: crc32c(everything[name][rows].tobytes()) for name in LAYERS}
    assert not any(states[~used].any() for states in everything.values())
    assert sorted(os.listdir(staged.directory)) == sorted([*(f"hidden.{name}" for name in LAYERS), owner.MARK])


def random_samples(lengths: Sequence[int], seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 260, n).astype(np.int32) for n in lengths]
