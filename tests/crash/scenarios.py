"""What is done to a small store while its operations are recorded, and what must hold of everything a crash may leave.

A scenario prepares a directory (taken as safe on disk), acts in it, and acknowledges what its caller could rely on.
`judge` gets a directory as a crash may have left it, and names every promise that does not hold there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import shutil
import time
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from hsstore import destination, garbage, growth, manifest, owner, paths, zarrmeta
from hsstore.copying import Copy
from hsstore.digest import crc32c, decode_blocks
from hsstore.findings import Finding
from hsstore.places import open_place
from hsstore.quarantine import quarantine, release
from hsstore.records import InputSummary, SampleEntry, sha256_hex
from hsstore.repair import Repair
from hsstore.repairlog import Options
from hsstore.store import Store
from hsstore.verify import Verifier
from hsstore.writer import StagedShard, StoreWriter
from tests.crash.recorder import Died, Recorder
from tests.stores import Sample, create, input_summary, make_samples

SHAPE = {"shard_rows": 64, "chunk_rows": 16}


@dataclass(frozen=True, slots=True)
class Input:
    """One prompts file, with the truth about its samples."""

    summary: InputSummary
    samples: tuple[Sample, ...]
    offset: int
    """What the store adds to its line numbers."""

    @property
    def entries(self) -> list[SampleEntry]:
        return [s.entry for s in self.samples]


@functools.cache
def both() -> tuple[Input, Input]:
    """Six samples in shards 0 to 2, and three more in shards 3 and 4 of a store that was grown."""
    first = make_samples([40, 20, 50, 10, 30, 30], seed=7, layers=("after_2", "final"))
    more = make_samples([33, 31, 12], seed=8, layers=("after_2", "final"))
    other = dataclasses.replace(input_summary(3), name="more.jsonl", sha256="4" * 64)
    return Input(input_summary(6), tuple(first), 0), Input(other, tuple(more), 6)


def truth(source_index: int) -> Sample:
    first, more = both()
    return first.samples[source_index] if source_index < more.offset else more.samples[source_index - more.offset]


def stage(writer: StoreWriter, shard: int, entries: Sequence[SampleEntry]) -> StagedShard:
    """A shard with its true rows, not committed."""
    by_index = {e.source_index: truth(e.source_index) for e in entries}
    staged = writer.stage(shard, entries, {i: (s.input_ids, s.loss_mask) for i, s in by_index.items()})
    for state, path in staged.files.items():
        with open(path, "r+b") as file:
            for e in entries:
                rows = by_index[e.source_index].states[state]
                file.seek(e.row * rows.shape[1] * 2)
                file.write(rows.tobytes())
    return staged


def commit(writer: StoreWriter, shard: int, entries: Sequence[SampleEntry]) -> None:
    assert stage(writer, shard, entries).commit() is not None


def extract(root: Path, chosen: Sequence[Input], shards: Sequence[int] | None = None) -> None:
    """What `hsstore extract --append` does: grow, redo, take what is open (of `shards`, or all)."""
    for inp in chosen:
        writer, _, placed = growth.open_input(root, inp.entries, inp.summary, append=True)
        for shard in writer.todo():
            if shard in placed and (shards is None or shard in shards):
                commit(writer, shard, placed[shard])


def new_store(root: Path, shards: Sequence[int] | None = None) -> None:
    """A store of the first input, some or all of its shards committed."""
    first, _ = both()
    create(root, first.samples, **SHAPE)
    extract(root, [first], shards)


class Scenario:
    """The base: a store with one committed shard and a built manifest; nothing is done."""

    name = ""
    committed: tuple[int, ...] = (0,)
    inputs: tuple[Input, ...] = both()[:1]
    store = "s"
    acks: tuple[object, ...] = ()
    """What `act` must have acknowledged by its end."""

    def prepare(self, base: Path) -> None:
        new_store(base / "s", self.committed)
        manifest.write(base / "s")

    def act(self, base: Path, recorder: Recorder) -> None:
        raise NotImplementedError

    def judge(self, base: Path, acked: frozenset[object], ends: tuple[str, str]) -> Iterator[str]:
        """Promises that are broken in what a crash left at `base`. `ends`: manifest_id of the store that nothing
        happened to, resumed before and after the operation."""
        root = base / self.store
        yield from self.readable(root, acked)
        yield from self.verified(root, "after the crash")
        self.recover(base)
        yield from self.readable(root, acked)
        yield from self.verified(root, "after the resume")
        yield from self.complete(root, ends[1:] if acked.issuperset(self.acks) else ends)

    def readable(self, root: Path, acked: frozenset[object]) -> Iterator[str]:
        """Opens; what is visible is right; what was acknowledged is visible."""
        with Store.open(root) as store:
            yield from wrong_samples(store)
            visible = {s.shard for s in store.manifest.shards}
        dead = manifest.quarantined(manifest.load_tombstones(root, manifest.load_header(root)))
        promised = {n for kind, n in acked if kind == "shard"}  # type: ignore[misc]
        for lost in sorted((promised | set(self.committed)) - visible - set(dead)):
            yield f"acknowledged and lost: shard {lost}"
        for lost in sorted({n for kind, n in acked if kind == "quarantined"} - set(dead)):  # type: ignore[misc]
            yield f"acknowledged and lost: the tombstone of shard {lost}"
        layouts = len(paths.numbers_in(root / paths.LAYOUTS))
        if ("layout", layouts) in acked:
            yield f"acknowledged and lost: layout {layouts}"

    def verified(self, root: Path, when: str, explained: Callable[[Finding], bool] = lambda _: False) -> Iterator[str]:
        """No damage, but what was there before."""
        for finding in Verifier(root, "full").findings():
            if finding.severity == "damage" and not explained(finding):
                yield f"{when}: {finding}"

    def recover(self, base: Path) -> None:
        """What the next run does."""
        extract(base / self.store, self.inputs)
        StoreWriter.open(base / self.store).finish()

    def complete(self, root: Path, ends: Sequence[str]) -> Iterator[str]:
        with Store.open(root) as store:
            if store.manifest_id not in ends:
                yield f"the resumed store has manifest {store.manifest_id[:12]}, undisturbed {ends}"
            found = store.index.source_index.tolist()
            if found != [e.source_index + i.offset for i in self.inputs for e in i.entries]:
                yield f"the resumed store has samples {found}"
        if sha256_hex((root / paths.MANIFEST).read_bytes()) != store.manifest_id:
            yield "manifest.json is not the manifest of the records"


def wrong_samples(store: Store, left_out: Container[int] = ()) -> Iterator[str]:
    """Every sample that a reader sees and that is not what was extracted, shards that are `left_out` apart."""
    for i, number in enumerate(store.index.source_index.tolist()):
        if int(store.index.shard[i]) in left_out:
            continue
        true = truth(number)
        pairs = {"input_ids": (store.input_ids(i), true.input_ids), "loss_mask": (store.loss_mask(i), true.loss_mask)}
        pairs |= {state: (store.hidden(i, state), true.states[state]) for state in store.layers}
        for name, (found, expected) in pairs.items():
            if not np.array_equal(found, expected):
                yield f"sample {number} shows wrong {name}"


class Create(Scenario):
    """A new store is there whole or not at all."""

    name = "create"
    committed = ()
    acks = (("created", 0),)

    def prepare(self, base: Path) -> None:
        pass

    def act(self, base: Path, recorder: Recorder) -> None:
        create(base / "s", self.inputs[0].samples, **SHAPE)
        recorder.ack(("created", 0))

    def recover(self, base: Path) -> None:
        if not (base / "s").exists():
            create(base / "s", self.inputs[0].samples, **SHAPE)  # what lies beside is not in the way
        super().recover(base)

    def judge(self, base: Path, acked: frozenset[object], ends: tuple[str, str]) -> Iterator[str]:
        if (base / "s").exists():
            yield from super().judge(base, acked, ends)
            return
        if acked:
            yield "acknowledged and lost: the store"
        self.recover(base)
        yield from self.complete(base / "s", ends)


class Commit(Scenario):
    name = "commit"
    acks = (("shard", 1),)

    def act(self, base: Path, recorder: Recorder) -> None:
        extract(base / "s", self.inputs, [1])
        recorder.ack(("shard", 1))


class LostRace(Scenario):
    """Two attempts at one shard, the later one commits first."""

    name = "lost race"
    acks = (("shard", 1),)

    def act(self, base: Path, recorder: Recorder) -> None:
        writer, _, placed = growth.open_input(base / "s", self.inputs[0].entries, self.inputs[0].summary)
        slow = stage(writer, 1, placed[1])
        commit(writer, 1, placed[1])
        recorder.ack(("shard", 1))
        assert slow.commit() is None


class RollForward(Scenario):
    """The writer of shard 1 died behind its record; opening for writing publishes it."""

    name = "roll-forward"
    committed = (0, 1)

    def prepare(self, base: Path) -> None:
        new_store(base / "s", [0])
        extract_unpublished(base / "s", 1)

    def act(self, base: Path, recorder: Recorder) -> None:
        StoreWriter.open(base / "s")


class BuildManifest(Scenario):
    """An older manifest is brought up to date."""

    name = "manifest build"
    committed = (0, 1, 2)
    acks = (("manifest", 0),)

    def prepare(self, base: Path) -> None:
        new_store(base / "s", [0])
        manifest.write(base / "s")
        extract(base / "s", self.inputs)

    def act(self, base: Path, recorder: Recorder) -> None:
        manifest.write(base / "s")
        recorder.ack(("manifest", 0))


class FirstManifest(BuildManifest):
    """No manifest was there."""

    name = "first manifest"

    def prepare(self, base: Path) -> None:
        new_store(base / "s")


class Growth(Scenario):
    """A finished store gets a second input, and its first shard of it."""

    name = "growth"
    committed = (0, 1, 2)
    inputs = both()
    acks = (("layout", 1), ("shard", 3))

    def act(self, base: Path, recorder: Recorder) -> None:
        growth.open_input(base / "s", both()[1].entries, both()[1].summary, append=True)
        recorder.ack(("layout", 1))
        extract(base / "s", self.inputs[1:], [3])
        recorder.ack(("shard", 3))


class Quarantine(Scenario):
    """A shard is taken out of use, then redone under a new number."""

    name = "quarantine"
    committed = (0, 1, 2)
    acks = (("quarantined", 1), ("shard", 3))

    def act(self, base: Path, recorder: Recorder) -> None:
        quarantine(base / "s", 1, "does not please")
        recorder.ack(("quarantined", 1))
        extract(base / "s", self.inputs)
        recorder.ack(("shard", 3))


class Release(Scenario):
    """A quarantined shard is taken back; or, when that was lost, redone."""

    name = "release"
    committed = (0, 1, 2)
    acks = (("shard", 1),)

    def prepare(self, base: Path) -> None:
        super().prepare(base)
        quarantine(base / "s", 1, "does not please")

    def act(self, base: Path, recorder: Recorder) -> None:
        release(base / "s", 1, "does please")
        recorder.ack(("shard", 1))


class Collect(Scenario):
    """gc removes an attempt whose writer is dead and leaves the one that is committed and not yet published."""

    name = "gc"
    committed = (0, 1)

    def prepare(self, base: Path) -> None:
        new_store(base / "s", [0])
        with as_process(2):
            writer, _, placed = growth.open_input(base / "s", self.inputs[0].entries, self.inputs[0].summary)
            stage(writer, 2, placed[2])
            extract_unpublished(base / "s", 1)  # the last thing: whoever opens for writing publishes it
        (base / "s" / paths.RECORDS / ".000002.json.0123456789abcdef.tmp").write_bytes(b"a part of a rec")

    def act(self, base: Path, recorder: Recorder) -> None:
        attempts = sorted(p.name[:6] for p in (base / "s" / paths.STAGING).iterdir() if p.is_dir())
        assert attempts == ["000001", "000002"], attempts
        found = garbage.find(base / "s", now=time.time() + 3600)
        assert {"attempt", "temporary"} == {item.kind for item in found}
        garbage.remove(found)


class CollectQuarantined(Scenario):
    """gc removes the files of a quarantined shard that was redone."""

    name = "gc quarantined"
    committed = (0, 1, 2)

    def prepare(self, base: Path) -> None:
        new_store(base / "s")
        quarantine(base / "s", 1, "does not please")
        extract(base / "s", self.inputs)
        manifest.write(base / "s")

    def act(self, base: Path, recorder: Recorder) -> None:
        garbage.remove(garbage.find(base / "s", quarantined=True))


class CopyStore(Scenario):
    """A store comes to another directory, which is usable as far as it has come."""

    name = "copy"
    committed = ()
    store = "copy"
    acks = (("shard", 0), ("shard", 1), ("shard", 2), ("copied", 0))

    def prepare(self, base: Path) -> None:
        new_store(base / "s")
        manifest.write(base / "s")

    def act(self, base: Path, recorder: Recorder) -> None:
        for event in Copy(open_place(base / "s"), open_place(base / "copy"), jobs=1).events():
            if event.kind == "copied":
                recorder.ack(("shard", event.shard))
        recorder.ack(("copied", 0))

    def recover(self, base: Path) -> None:
        copy = Copy(open_place(base / "s"), open_place(base / "copy"), jobs=1)
        assert not [e for e in copy.events() if e.kind == "damaged"]
        assert copy.summary.manifest_id == copy.summary.source_manifest_id

    def judge(self, base: Path, acked: frozenset[object], ends: tuple[str, str]) -> Iterator[str]:
        if not (base / "copy").exists():
            if acked:
                yield "acknowledged and lost: the copy"
            self.recover(base)
        yield from super().judge(base, acked, ends)


class CopyOverPlain(CopyStore):
    """Files that a plain `cp` brought lie at the destination: right, and nobody has made them durable."""

    name = "copy over cp"

    def prepare(self, base: Path) -> None:
        super().prepare(base)
        destination.create(open_place(base / "copy"), destination.state_of(open_place(base / "s")))

    def act(self, base: Path, recorder: Recorder) -> None:
        for path in sorted((base / "s" / "arrays.zarr").rglob("c")):
            shutil.copytree(path, base / "copy" / path.relative_to(base / "s"))
        super().act(base, recorder)

    def judge(self, base: Path, acked: frozenset[object], ends: tuple[str, str]) -> Iterator[str]:
        # Nothing can be promised of a plain copy, and a later run refuses what is wrong in it. But what our copy took
        # over and acknowledged must be right whatever happens then.
        yield from self.readable(base / "copy", acked)
        yield from self.verified(base / "copy", "after the crash", lambda finding: finding.kind == "unknown")


class Mend(Scenario):
    """A flipped bit in one file, another one missing: repaired from a replica."""

    name = "repair"
    committed = (0, 1, 2)
    acks = (("repaired", 0),)
    shards = (1, 2)
    """Damaged ones."""
    good: frozenset[tuple[str, int]] = frozenset()
    """Blocks that are whole before the repair, also those of damaged files."""
    broken: frozenset[str] = frozenset()
    """Files that are damaged before the repair."""

    def prepare(self, base: Path) -> None:
        new_store(base / "s")
        manifest.write(base / "s")
        shutil.copytree(base / "s", base / "replica")
        self.damage(base / "s")
        self.good = good_blocks(base / "s", base / "replica")
        self.broken = frozenset(f.file for f in Verifier(base / "s", "full").findings() if f.severity == "damage")

    def damage(self, root: Path) -> None:
        flip(root / "arrays.zarr/hidden/after_2/c/1/0")
        (root / "arrays.zarr/tokens/input_ids/c/2").unlink()

    def act(self, base: Path, recorder: Recorder) -> None:
        self.mend(base)
        recorder.ack(("repaired", 0))

    def mend(self, base: Path) -> None:
        summary = Repair(base / "s", [open_place(base / "replica")], Options(full=True)).run()
        assert summary.remaining == 0

    def recover(self, base: Path) -> None:
        self.mend(base)
        super().recover(base)

    def judge(self, base: Path, acked: frozenset[object], ends: tuple[str, str]) -> Iterator[str]:
        root = base / "s"
        for path, block in sorted(self.good - good_blocks(root, base / "replica")):
            yield f"block {block} of {path} was good before and cannot be read"
        if not acked:
            yield from self.no_worse(root)
            self.recover(base)
        yield from super().judge(base, acked, ends)

    def no_worse(self, root: Path) -> Iterator[str]:
        """Before anything was promised: no damage but in what was damaged, and the rest reads right."""
        yield from self.verified(root, "after the crash", lambda finding: finding.file in self.broken)
        with Store.open(root) as store:
            yield from wrong_samples(store, self.shards)


class MendDocuments(Mend):
    """A record with a flipped bit, a layout, a zarr.json, manifest.json and an index column that are missing."""

    name = "repair documents"

    def damage(self, root: Path) -> None:
        flip(paths.record(root, 1))
        for name in ("layouts/000000.json", "arrays.zarr/hidden/final/zarr.json", "manifest.json", "index/row.npy"):
            (root / name).unlink()

    def no_worse(self, root: Path) -> Iterator[str]:
        """Nothing can be opened without its layout; what was whole must stay so."""
        gone = ("layout", "missing", "metadata", "derived", "record", "unknown", "manifest")
        yield from self.verified(root, "after the crash", lambda finding: finding.kind in gone)


def killed(what: type[Scenario], calls: int) -> Scenario:
    """The same, but killed at some step; the next run goes on to the end, then the power goes: what the first had not
    made durable, the second saw and relied on."""
    last = 5 if len(what.inputs) > 1 else 3

    class Killed(what):  # type: ignore[misc,valid-type]
        name = f"{what.name} killed at {calls}"
        acks = tuple(("shard", n) for n in range(last))

        def act(self, base: Path, recorder: Recorder) -> None:
            with recorder.killed_after(calls):
                super().act(base, recorder)
            with as_process(1):
                self.recover(base)
            for ack in self.acks:
                recorder.ack(ack)

    scenario: Scenario = Killed()
    return scenario


def good_blocks(root: Path, replica: Path) -> frozenset[tuple[str, int]]:
    """Blocks of shard files that can be read whole under their final names, by the records of a sound copy."""
    header, found = manifest.load_header(replica), set()
    for record in manifest.load_records(replica, header):
        for spec in header.arrays:
            path = zarrmeta.chunk_path(spec, record.shard)
            data = (root / path).read_bytes() if (root / path).exists() else b""
            size = header.chunk_rows * spec.row_bytes
            for block, crc in enumerate(decode_blocks(record.files[path].crc32c_blocks)):
                piece = data[block * size : (block + 1) * size]
                if len(piece) == size and crc32c(piece) == int(crc):
                    found.add((path, block))
    return frozenset(found)


@contextlib.contextmanager
def as_process(number: int) -> Iterator[None]:
    """What is done inside is done by another process, which is dead for whoever is outside: its leases have ended."""
    machine, _, _ = owner.identity(os.getpid()).rsplit(" ", 2)
    identity = f"{machine} {(1 << 22) + number} 1"  # no process has that number
    with mock.patch.object(owner, "identity", return_value=identity):
        yield


def flip(path: Path) -> None:
    """One bit, in another inode: no file is written to in place, also not by the medium that we play."""
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 16
    path.unlink()
    path.write_bytes(data)


def extract_unpublished(root: Path, shard: int) -> None:
    """A commit whose writer dies between its record and the first published file."""
    real = os.link

    def link(source: Any, target: Any, **options: Any) -> None:
        if "arrays.zarr" in str(target):
            raise Died
        real(source, target, **options)

    with mock.patch.object(os, "link", link), contextlib.suppress(Died):
        extract(root, both()[:1], [shard])
    assert any((root / paths.STAGING).iterdir())
    assert paths.record(root, shard).exists()


_ONCE = (
    *(Create, Commit, LostRace, RollForward, BuildManifest, FirstManifest, Growth, Quarantine, Release),
    *(Collect, CollectQuarantined, CopyStore, CopyOverPlain, Mend, MendDocuments),
)
_KILLED: tuple[tuple[type[Scenario], Sequence[int], int], ...] = (
    (Commit, (10, 16, 22), 29),
    (Growth, (9,), 40),
    (Quarantine, (4,), 40),
    (Mend, (4, 7), 9),
    (CopyStore, (80,), 120),
)
"""What, killed after which calls in the suite, after each of how many by hand."""

SCENARIOS: tuple[Scenario, ...] = (*(c() for c in _ONCE), *(killed(c, n) for c, few, _ in _KILLED for n in few))
LONG: tuple[Scenario, ...] = (*(c() for c in _ONCE), *(killed(c, n) for c, _, m in _KILLED for n in range(1, m)))
