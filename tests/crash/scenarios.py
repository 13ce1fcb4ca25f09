"""What is done to a small store while its operations are recorded, and what must hold of everything a crash may leave.

A scenario prepares a directory (taken as safe on disk), acts in it, and acknowledges what its caller could rely on.
`judge` gets a directory as a crash may have left it, and names every promise that does not hold there.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from hsstore import manifest, paths
from hsstore.findings import Finding
from hsstore.store import Store
from hsstore.verify import Verifier
from hsstore.writer import StoreWriter
from tests.crash.recorder import Died, Recorder
from tests.stores import Sample, create, make_samples, stage

LENGTHS = [40, 20, 50, 10, 30, 30]
SHAPE = {"shard_rows": 64, "chunk_rows": 16}
N_SHARDS = 3


@functools.cache
def samples() -> list[Sample]:
    """Six samples in three shards."""
    return make_samples(LENGTHS, seed=7, layers=("after_2", "final"))


def commit(writer: StoreWriter, shard: int) -> None:
    assert stage(writer, shard, samples()).commit() is not None


@functools.cache
def undisturbed() -> str:
    """manifest_id of the store that nothing happened to."""
    import tempfile

    with tempfile.TemporaryDirectory() as directory:
        writer = create(Path(directory) / "s", samples(), **SHAPE)
        for shard in writer.todo():
            commit(writer, shard)
        return writer.finish()


class Scenario:
    """The base: a store with one committed shard and a built manifest; nothing is done."""

    name = ""
    committed = (0,)
    built = True
    acks: tuple[object, ...] = ()
    """What `act` must have acknowledged by its end."""

    def prepare(self, base: Path) -> None:
        writer = create(base / "s", samples(), **SHAPE)
        for shard in self.committed:
            commit(writer, shard)
        if self.built:
            writer.finish()

    def act(self, base: Path, recorder: Recorder) -> None:
        raise NotImplementedError

    def judge(self, base: Path, acked: frozenset[object]) -> list[str]:
        """Promises that are broken in what a crash left at `base`."""
        return list(self._judge(base, acked))

    def _judge(self, base: Path, acked: frozenset[object]) -> Iterator[str]:
        root = base / "s"
        yield from self.readable(root, acked)
        yield from self.verified(root, "after the crash")
        self.recover(base)
        yield from self.readable(root, acked)
        yield from self.verified(root, "after the resume")
        yield from self.complete(root)

    def readable(self, root: Path, acked: frozenset[object]) -> Iterator[str]:
        """Opens; what is visible is right; what was acknowledged is visible."""
        with Store.open(root) as store:
            yield from wrong_samples(store)
            visible = {("shard", s.shard) for s in store.manifest.shards}
        safe = {("shard", shard) for shard in self.committed} | {a for a in acked if a[0] == "shard"}  # type: ignore[index]
        for lost in sorted(safe - visible):
            yield f"acknowledged and lost: {lost}"

    def verified(self, root: Path, when: str) -> Iterator[str]:
        for finding in Verifier(root, "full").findings():
            if finding.severity == "damage" and not self.explained(finding):
                yield f"{when}: {finding}"

    def explained(self, finding: Finding) -> bool:
        """Damage that was there before."""
        return False

    def recover(self, base: Path) -> None:
        """What the next run does."""
        writer = StoreWriter.open(base / "s")
        for shard in writer.todo():
            commit(writer, shard)
        writer.finish()

    def complete(self, root: Path) -> Iterator[str]:
        with Store.open(root) as store:
            if store.manifest_id != undisturbed():
                yield f"the resumed store has manifest {store.manifest_id[:12]}, undisturbed {undisturbed()[:12]}"
            if manifest.write(root) != store.manifest_id:
                yield "manifest.json is not the manifest of the records"


def wrong_samples(store: Store) -> Iterator[str]:
    """Every sample that a reader sees and that is not what was extracted."""
    by_index = {s.entry.source_index: s for s in samples()}
    for i in range(len(store.index)):
        number = int(store.index.source_index[i])
        truth = by_index[number]
        pairs = {"input_ids": (store.input_ids(i), truth.input_ids), "loss_mask": (store.loss_mask(i), truth.loss_mask)}
        pairs |= {state: (store.hidden(i, state), truth.states[state]) for state in store.layers}
        for name, (found, expected) in pairs.items():
            if not np.array_equal(found, expected):
                yield f"sample {number} shows wrong {name}"


class Create(Scenario):
    """A new store is there whole or not at all."""

    name = "create"
    committed = ()
    acks = (("created",),)

    def prepare(self, base: Path) -> None:
        pass

    def act(self, base: Path, recorder: Recorder) -> None:
        create(base / "s", samples(), **SHAPE)
        recorder.ack(("created",))

    def _judge(self, base: Path, acked: frozenset[object]) -> Iterator[str]:
        if (base / "s").exists():
            yield from super()._judge(base, acked)
            return
        if acked:
            yield "acknowledged and lost: the store"
        create(base / "s", samples(), **SHAPE)  # what lies beside is not in the way
        self.recover(base)
        yield from self.complete(base / "s")


class Commit(Scenario):
    name = "commit"
    acks = (("shard", 1),)

    def act(self, base: Path, recorder: Recorder) -> None:
        commit(StoreWriter.open(base / "s"), 1)
        recorder.ack(("shard", 1))


class LostRace(Scenario):
    """Two attempts at one shard, the later one commits first."""

    name = "lost race"
    acks = (("shard", 1),)

    def act(self, base: Path, recorder: Recorder) -> None:
        writer = StoreWriter.open(base / "s")
        slow, quick = stage(writer, 1, samples()), stage(writer, 1, samples())
        assert quick.commit() is not None
        recorder.ack(("shard", 1))
        assert slow.commit() is None


class RollForward(Scenario):
    """The writer of shard 1 died behind its record; opening for writing publishes it."""

    name = "roll-forward"
    committed = (0, 1)

    def prepare(self, base: Path) -> None:
        writer = create(base / "s", samples(), **SHAPE)
        commit(writer, 0)
        commit_unpublished(writer, 1)

    def act(self, base: Path, recorder: Recorder) -> None:
        StoreWriter.open(base / "s")


class BuildManifest(Scenario):
    """An older manifest is brought up to date."""

    name = "manifest build"
    committed = (0, 1, 2)
    acks = (("manifest",),)

    def prepare(self, base: Path) -> None:
        writer = create(base / "s", samples(), **SHAPE)
        commit(writer, 0)
        writer.finish()
        commit(writer, 1)
        commit(writer, 2)

    def act(self, base: Path, recorder: Recorder) -> None:
        manifest.write(base / "s")
        recorder.ack(("manifest",))


class FirstManifest(BuildManifest):
    """No manifest was there."""

    name = "first manifest"

    def prepare(self, base: Path) -> None:
        writer = create(base / "s", samples(), **SHAPE)
        for shard in writer.todo():
            commit(writer, shard)


class KilledThenResumed(Scenario):
    """A writer is killed at some step, the next one goes on, then the power goes: what the first had not made durable,
    the second saw and relied on."""

    acks = (("shard", 1), ("shard", 2))

    def __init__(self, calls: int) -> None:
        self.calls = calls
        self.name = f"killed after {calls}"

    def act(self, base: Path, recorder: Recorder) -> None:
        with recorder.killed_after(self.calls):
            commit(StoreWriter.open(base / "s"), 1)
        self.recover(base)
        recorder.ack(("shard", 1))
        recorder.ack(("shard", 2))


def commit_unpublished(writer: StoreWriter, shard: int) -> None:
    """A commit whose writer dies between its record and the first published file."""
    real = os.link

    def link(source: Any, target: Any, **options: Any) -> None:
        if "arrays.zarr" in str(target):
            raise Died
        real(source, target, **options)

    with mock.patch.object(os, "link", link), contextlib.suppress(Died):
        commit(writer, shard)
    assert any((writer.root / paths.STAGING).iterdir())
    assert paths.record(writer.root, shard).exists()


SCENARIOS: tuple[Scenario, ...] = (
    *(Create(), Commit(), LostRace(), RollForward(), BuildManifest(), FirstManifest()),
    *(KilledThenResumed(n) for n in (7, 10, 12, 16, 20, 24)),
)
LONG: tuple[Scenario, ...] = (*SCENARIOS, *(KilledThenResumed(n) for n in range(1, 30)))
"""By hand: a kill after every single call."""
