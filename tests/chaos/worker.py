"""The processes of a chaos run: writers that take shards until none is left, one that quarantines, one that sweeps.

They run the real writer, growth, leases, quarantine and garbage. Calls of `os` are wrapped to tell the board what is
going on (by the directory that is touched, so that nothing depends on how the writer is cut into functions) and to
linger a little there, so that signals hit between any two steps.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hsstore import durable, garbage, growth, manifest, paths, publishing
from hsstore.leases import Leases
from hsstore.quarantine import quarantine
from hsstore.records import SampleEntry, ShardRecord, canonical, sha256_hex
from hsstore.store import Store
from hsstore.writer import StoreWriter
from tests.chaos.board import Board
from tests.chaos.world import STATES, Input, World


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a process is started with."""

    world: World
    board: Board
    slot: int
    acks: Path
    lease_seconds: float
    linger_seconds: float
    broken: str
    """"" or the name of a protocol that is wrong on purpose."""
    rng: random.Random

    def linger(self) -> None:
        """At two of three places not at all, at the others about as long as it takes to be hit there."""
        if self.rng.random() < 0.35:
            time.sleep(self.rng.expovariate(1 / self.linger_seconds))


def write(job: Job) -> None:
    """Take shards of every input until nothing is left to do, then build the manifest."""
    _watch(job)
    if job.broken == "rename-overwrite":
        _rename_over()
    with Leases(job.world.root, job.lease_seconds) as leases:
        while not _one_turn(job, leases):
            pass
        job.board.set(job.slot, "manifest")
        StoreWriter.open(job.world.root).finish()


def _one_turn(job: Job, leases: Leases) -> bool:
    """Look at every input, work on some shards. Returns whether nothing was left."""
    done, worked = job.board.quarantines_left == 0, False
    inputs = list(job.world.inputs)
    if job.rng.random() < 0.5:
        inputs.reverse()
    for inp in inputs:
        job.board.set(job.slot, "open")
        writer, _, placed = growth.open_input(job.world.root, inp.entries, inp.summary, append=True)
        todo = [shard for shard in writer.todo() if shard in placed]
        done = done and not todo
        job.rng.shuffle(todo)
        for shard in todo:
            if paths.record(job.world.root, shard).exists() or not _take(job, leases, shard):
                continue
            worked = True
            _work(job, writer, inp, shard, placed[shard])
            leases.release(shard)
            if job.rng.random() < 0.3:
                break  # look at the store anew: others grow it
    if not worked and not done:
        job.board.set(job.slot, "idle")
        time.sleep(0.01)
    return done


def _take(job: Job, leases: Leases, shard: int) -> bool:
    path = paths.lease(job.world.root, shard)
    held = path.exists()
    job.board.set(job.slot, "lease")
    taken = leases.take(shard)
    job.board.count(job.slot, "taken_over", int(taken and held))
    return taken


def _work(job: Job, writer: StoreWriter, inp: Input, shard: int, entries: Sequence[SampleEntry]) -> None:
    job.board.work_on(job.slot, shard)
    staged = job.world.stage(writer, inp, shard, entries)
    for entry in staged.entries:
        for state in STATES:
            job.board.set(job.slot, "fill")
            job.world.fill(staged, state, entry)
            job.linger()
    record = staged.commit()
    if record is None:
        job.board.count(job.slot, "races_lost")
    else:
        _acknowledge(job, record)
    job.board.work_on(job.slot, -1)


def _acknowledge(job: Job, record: ShardRecord) -> None:
    """From here on the caller relies on it."""
    line = json.dumps({"shard": record.shard, "sha256": sha256_hex(canonical(record))}) + "\n"
    fd = os.open(job.acks / f"{job.slot}-{os.getpid()}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        os.write(fd, line.encode())
        os.fsync(fd)
    finally:
        os.close(fd)
    job.board.count(job.slot, "commits")


def bury(job: Job) -> None:
    """Quarantine committed shards while others write: they must be written again under new numbers."""
    root = job.world.root
    _watch(job, always="quarantine")
    header = manifest.load_header(root)
    while job.board.quarantines_left:
        dead = manifest.quarantined(manifest.load_tombstones(root, header))
        alive = [n for n in paths.numbers_in(root / paths.RECORDS) if n not in dead]
        if len(alive) < 3:
            time.sleep(0.02)
            continue
        quarantine(root, job.rng.choice(alive), "chaos")
        job.board.count(job.slot, "quarantined")
        job.board.quarantines_left -= 1


def sweep(job: Job) -> None:
    """Remove garbage all the time."""
    _watch(job, always="gc")
    while not job.board.over:
        found = garbage.find(job.world.root)
        garbage.remove(found)
        job.board.count(job.slot, "removed", len(found))
        time.sleep(0.02)


def read(job: Job) -> None:
    """Open the store again and again and look at every sample that shows: none may be wrong at any moment."""
    while not job.board.over:
        with Store.open(job.world.root) as store:
            problems = list(job.world.wrong_samples(store))
        if problems:
            raise AssertionError(f"a reader saw: {'; '.join(problems)}")
        job.board.count(job.slot, "read")
        time.sleep(0.02)


def _watch(job: Job, always: str = "") -> None:
    """Tell the board what each step is, and linger before and behind it."""
    for name in ("link", "rename", "replace", "unlink", "mkdir", "rmdir", "fsync"):
        setattr(os, name, _around(job, name, getattr(os, name), always))
    real = publishing.publish

    def publish(*arguments: Any) -> None:
        real(*arguments)
        job.board.count(job.slot, "rolled_forward")

    publishing.publish = publish  # only roll_forward calls it by this name


def _around(job: Job, name: str, real: Callable[..., Any], always: str) -> Callable[..., Any]:
    root = os.path.abspath(job.world.root) + "/"

    def call(*arguments: Any, **options: Any) -> Any:
        before, after = _phases(name, _target(arguments, options).removeprefix(root), job.board.shard(job.slot) >= 0)
        if always or before:
            job.board.set(job.slot, always or before)
        job.linger()
        result = real(*arguments, **options)
        if not always and after:
            job.board.set(job.slot, after)
        job.linger()
        return result

    return call


def _target(arguments: Sequence[Any], options: dict[str, Any]) -> str:
    """Path of what a call makes or syncs."""
    paths_given = [a for a in arguments[:2] if not isinstance(a, int)]
    if not paths_given:
        return os.readlink(f"/proc/self/fd/{arguments[0]}")
    path, directory = os.fsdecode(paths_given[-1]), options.get("dir_fd")
    return path if directory is None else os.path.join(os.readlink(f"/proc/self/fd/{directory}"), path)


def _phases(name: str, path: str, working: bool) -> tuple[str, str]:
    """(phase before and in it, phase behind it) of a call on a path of the store; "" leaves the phase as it is."""
    first, _, rest = path.partition("/")
    if first == paths.STAGING:
        if ".lease" in rest:
            return "lease", ""
        if name in ("unlink", "rmdir"):
            return "clean", ""
        if name == "mkdir":
            return "stage", ""
        return ("seal", "" if "/" in rest else "sealed") if name == "fsync" and rest else ("", "")
    if first == paths.RECORDS and working:
        return ("record", "committed") if name == "link" else ("record" if name == "fsync" and rest else "", "")
    if first == paths.LAYOUTS and name != "fsync":
        return "grow", ""
    if path.endswith("zarr.json") and name == "rename":
        return "grow", ""
    if first == "arrays.zarr" and working:
        return "publish", ""
    if first in (paths.MANIFEST, paths.MANIFEST_SUMS, paths.MANIFESTS, paths.INDEX):
        return "manifest", ""
    return "", ""


def _rename_over() -> None:
    """The protocol that is wrong on purpose: a name that is taken is no reason to stop."""

    def rename(source: Path, target: Path) -> bool:
        os.replace(source, target)
        return True

    durable.link_new = rename
