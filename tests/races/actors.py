"""What one process does to a store, as its command does it, and the states that it begins from."""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from unittest.mock import patch

import numpy as np

from hsstore import copying, durable, garbage, growth, landing, manifest, owner, paths
from hsstore import quarantine as quarantines
from hsstore.copying import Copy
from hsstore.errors import ConflictError
from hsstore.leases import Leases
from hsstore.places import open_place
from hsstore.records import InputSummary, LayoutRecord, SampleEntry
from hsstore.repair import Repair
from hsstore.repairlog import Options, Summary
from hsstore.store import Store
from hsstore.subset import Result, Selection, Subset
from hsstore.verify import Verifier
from hsstore.writer import StoreWriter
from tests.faults.harness import copy_tree
from tests.stores import Sample, input_summary, make_samples
from tests.stores import create as create_store

INPUTS = {"a": (30, 5, 33, 20), "b": (12, 50), "c": (41, 7)}
"""Lengths of the samples of each input."""


@functools.cache
def samples_of(name: str) -> tuple[Sample, ...]:
    return tuple(make_samples(INPUTS[name], seed=ord(name), layers=("after_2", "final")))


@functools.cache
def truth() -> Mapping[str, Sample]:
    """Every sample by its uid."""
    return {s.entry.uid: s for name in INPUTS for s in samples_of(name)}


def summary_of(name: str) -> InputSummary:
    if name == "a":
        return input_summary(len(INPUTS["a"]))
    return InputSummary(
        name=f"{name}.jsonl", bytes=0, sha256=name * 64, lines=len(INPUTS[name]), rejected={}, options={}
    )


def store_of(box: Path) -> Path:
    return box / "store"


def copy_of(box: Path) -> Path:
    return box / "copy"


def small_of(box: Path) -> Path:
    return box / "small"


def empty(box: Path) -> StoreWriter:
    return create_store(store_of(box), samples_of("a"), shard_rows=64, chunk_rows=16)


def complete(box: Path) -> None:
    empty(box)
    write_all(box)


def complete3(box: Path) -> None:
    """Three shards of two inputs."""
    complete(box)
    append("b")(box)


def begun(box: Path) -> None:
    """One of two shards, and a manifest of that."""
    writer = empty(box)
    stage_and_commit(writer, 0, placed(writer)[0])
    writer.finish()


def unpublished(box: Path) -> None:
    """Every shard committed, none published: what a crash right after the record leaves."""
    complete(box)
    root = store_of(box)
    header = manifest.load_header(root)
    for record in manifest.load_records(root, header):
        directory = paths.staging(root, record.shard, record.attempt)
        directory.mkdir()
        owner.mark(directory)
        for spec in header.arrays:
            relative = next(name for name in record.files if f"/{spec.name}/c/" in name)
            os.rename(root / relative, directory / paths.staged_name(spec.name))


def littered(box: Path) -> None:
    """What killed writers leave: an attempt, a file that never got its name, a lease."""
    begun(box)
    root, dead = store_of(box), dead_process()
    attempt = paths.staging(root, 1, f"{9:016x}")
    attempt.mkdir()
    (attempt / owner.MARK).write_text(dead)
    (attempt / "hidden.final").write_bytes(b"half")
    (root / paths.RECORDS / f".000001.json.{7:016x}.tmp").write_bytes(b"{")
    (root / f".{paths.MANIFEST}.{8:016x}.tmp").write_bytes(b"{")
    paths.lease(root, 1).write_text(f"0\n{dead}")
    for path in [*attempt.iterdir(), attempt, *root.rglob(".*.tmp"), paths.lease(root, 1)]:
        os.utime(path, (1, 1))


@functools.cache
def dead_process() -> str:
    dead = subprocess.Popen(["true"])
    identity = owner.identity(dead.pid)
    dead.wait()
    return identity


def damaged(box: Path) -> None:
    """Beside a replica: a flipped bit in one file, another one gone, a record that is cut, a wrong index."""
    complete(box)
    harm(box)


def begun_and_damaged(box: Path) -> None:
    begun(box)
    harm(box)


def harm(box: Path) -> None:
    root = store_of(box)
    copy_tree(root, box / "replica")
    flipped = root / "arrays.zarr/hidden/final/c/0/0"
    data = bytearray(flipped.read_bytes())
    data[100] ^= 1
    changes = {flipped: bytes(data), root / "arrays.zarr/tokens/input_ids/c/0": None, root / "index/row.npy": b""}
    if paths.record(root, 1).exists():
        changes[paths.record(root, 1)] = b"{"
    for path, contents in changes.items():
        path.unlink()
        if contents is not None:
            path.write_bytes(contents)


def copied_by_a_dead_one(box: Path) -> None:
    """A copy that was killed after it had staged a shard whole, before its record."""
    complete(box)
    with patch.object(landing, "commit", side_effect=InterruptedError), contextlib.suppress(InterruptedError):
        copy(box)
    (staged,) = (p for p in (copy_of(box) / paths.STAGING).iterdir() if p.is_dir())
    (staged / owner.MARK).write_text(dead_process())


def placed(writer: StoreWriter) -> growth.Placed:
    entries = {"3" * 64: samples_of("a"), "b" * 64: samples_of("b"), "c" * 64: samples_of("c")}
    out: growth.Placed = {}
    for number, lay in enumerate(writer.layouts):
        out |= growth.place(writer, number, [s.entry for s in entries[lay.input.sha256]])
    return out


def stage_and_commit(writer: StoreWriter, shard: int, entries: Sequence[SampleEntry]) -> None:
    """As the engines write."""
    known = {e.source_index: truth()[e.uid] for e in entries}
    attempt = writer.stage(shard, entries, {i: (s.input_ids, s.loss_mask) for i, s in known.items()})
    for name, path in attempt.files.items():
        with open(path, "r+b", buffering=0) as file:
            for e in entries:
                states = known[e.source_index].states[name]
                durable.pwrite_all(file.fileno(), states.data, e.row * states.strides[0])
    attempt.commit()


def create(box: Path) -> str:
    """`extract` without --resume, then with it."""
    try:
        empty(box)
        how = "created"
    except ConflictError:
        how = "was there"
    write_all(box)
    return how


def write_all(box: Path) -> None:
    """Commit every open shard without regard for others."""
    writer = StoreWriter.open(store_of(box))
    places = placed(writer)
    for shard in writer.todo():
        stage_and_commit(writer, shard, places[shard])
    writer.finish()


def extract(box: Path) -> None:
    """The same, shards that others hold left to them."""
    fill(StoreWriter.open(store_of(box)))


def fill(writer: StoreWriter) -> None:
    places, todo = placed(writer), writer.todo()
    with Leases(writer.root) as leases:
        while todo:
            busy = []
            for shard in todo:
                if paths.record(writer.root, shard).exists():
                    continue
                if not leases.take(shard):
                    busy.append(shard)
                    continue
                stage_and_commit(writer, shard, places[shard])
                leases.release(shard)
            if busy:
                copying.wait_for_others()
            todo = busy
    writer.finish()


def append(name: str) -> Callable[[Path], None]:
    """`extract --append`: grow by an input, then write what is open."""

    def act(box: Path) -> None:
        entries = [s.entry for s in samples_of(name)]
        writer, _, _ = growth.open_input(store_of(box), entries, summary_of(name), append=True)
        fill(writer)

    return act


def build(box: Path) -> str:
    return StoreWriter.open(store_of(box)).finish()


def gc(box: Path) -> None:
    collect(store_of(box), time.time())


def late_gc(box: Path) -> None:
    """One for which everything that is there now is an hour old."""
    collect(store_of(box), time.time() + 3600)


def gc_copy(box: Path) -> None:
    if (copy_of(box) / paths.HEADER).is_file():
        collect(copy_of(box), time.time())


def collect(root: Path, now: float) -> None:
    StoreWriter.open(root)
    found = garbage.find(root, now=now)
    garbage.strange(root)
    garbage.remove(found)


def copy(box: Path) -> Copy:
    work = Copy(open_place(str(store_of(box))), open_place(str(copy_of(box))), jobs=1)
    for event in work.events():
        assert event.kind != "damaged", str(event)
    return work


def take(box: Path) -> bool:
    return Leases(store_of(box)).take(1)


def subset(box: Path) -> Result:
    with Subset(store_of(box), small_of(box), Selection(layers="final", samples="0-2")) as making:
        return making.copy()


def repair(box: Path) -> Summary:
    summary = Repair(store_of(box), [open_place(str(box / "replica"))], Options(full=True)).run()
    assert summary.remaining == 0, summary
    return summary


def quarantine(shard: int) -> Callable[[Path], str]:
    def act(box: Path) -> str:
        quarantines.quarantine(store_of(box), shard, "rows of another run")
        return manifest.write(store_of(box))

    return act


def read(box: Path) -> int:
    """Open, read all, take up what is new, read that."""
    with Store.open(store_of(box), backend="pread") as store:
        right(store)
        store.refresh()
        right(store)
        return len(store.index)


def verify(box: Path) -> None:
    found = [str(f) for f in Verifier(store_of(box), "full").findings() if f.severity == "damage"]
    assert not found, "\n".join(found)


def right(store: Store) -> None:
    for i in range(len(store.index)):
        true = truth()[store.index.uid_hex(i)]
        np.testing.assert_array_equal(store.input_ids(i), true.input_ids)
        np.testing.assert_array_equal(store.loss_mask(i), true.loss_mask)
        for name in store.layers:
            np.testing.assert_array_equal(store.hidden(i, name), true.states[name])


def sound(root: Path) -> None:
    """Whole at full depth, also what is derived, every sample right, and nothing left over."""
    found = [f for f in Verifier(root, "full").findings() if f.kind not in ("quarantined", "open")]
    assert not found, "\n".join(map(str, found))
    with Store.open(root) as store:
        right(store)
    left = [str(p) for p in root.rglob("*") if durable.is_temporary(p.name)]
    left += [str(p) for p in (root / paths.STAGING).iterdir()]
    left += [str(p) for p in root.parent.iterdir() if p.name.startswith(".")]
    assert not left, f"left over: {left}"


def shards_of(root: Path) -> list[int]:
    return paths.numbers_in(root / paths.RECORDS)


def attempts_of(root: Path) -> list[Path]:
    return [p for p in (root / paths.STAGING).iterdir() if p.is_dir()]


def layouts_of(root: Path) -> list[LayoutRecord]:
    return manifest.load_layouts(root, manifest.load_header(root))
