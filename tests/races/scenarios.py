"""What several processes do to one store at once.

Each scenario works in a box of its own; `box/store` is the store, `truth()` what its samples must hold. Leaves to
`harness` the interleavings and what must hold after each of them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from hsstore import durable, paths
from hsstore.copying import Copy
from hsstore.places import open_place
from hsstore.store import Store
from hsstore.verify import Verifier
from hsstore.writer import StoreWriter
from tests.races.harness import End, Scenario
from tests.stores import Sample, create, make_samples, stage

LENGTHS = (30, 5, 33, 20)


@functools.cache
def truth() -> tuple[Sample, ...]:
    return tuple(make_samples(LENGTHS, layers=("final",)))


def store_of(box: Path) -> Path:
    return box / "store"


def copy_of(box: Path) -> Path:
    return box / "copy"


def new_store(root: Path) -> StoreWriter:
    return create(root, truth(), shard_rows=64, chunk_rows=16)


def complete_store(box: Path) -> None:
    writer = new_store(store_of(box))
    for shard in writer.todo():
        stage(writer, shard, truth()).commit()
    writer.finish()


def sound(root: Path) -> None:
    """Whole at full depth, also what is derived, every sample right, and nothing left over."""
    found = [str(f) for f in Verifier(root, "full").findings()]
    assert not found, "\n".join(found)
    with Store.open(root) as store:
        for i, source_index in enumerate(store.index.source_index.tolist()):
            true = truth()[source_index]
            np.testing.assert_array_equal(store.input_ids(i), true.input_ids)
            np.testing.assert_array_equal(store.hidden(i, "final"), true.states["final"])
    clean(root)


def clean(root: Path) -> None:
    left = [str(p) for p in root.rglob("*") if durable.is_temporary(p.name)]
    left += [str(p) for p in (root / paths.STAGING).iterdir()]
    left += [str(p) for p in root.parent.iterdir() if p.name.startswith(".")]
    assert not left, f"left over: {left}"


def all_well(ends: Sequence[End]) -> None:
    for _, error in ends:
        if error is not None:
            raise error


def state_of(root: Path) -> object:
    with Store.open(root) as store:
        return store.manifest_id, len(store.index), sorted(p.relative_to(root).as_posix() for p in root.rglob("*"))


def copy_now(box: Path) -> Copy:
    work = Copy(open_place(str(store_of(box))), open_place(str(copy_of(box))), jobs=1)
    list(work.events())
    return work


def copied(box: Path, ends: list[End]) -> None:
    """All end well and say the same manifest."""
    all_well(ends)
    ids = {work.summary.manifest_id for work, _ in ends if isinstance(work, Copy)}
    with Store.open(store_of(box)) as store:
        assert ids == {store.manifest_id}
    sound(copy_of(box))


SCENARIOS: tuple[Scenario, ...] = (
    Scenario(
        name="two copies",
        prepare=complete_store,
        actors=(copy_now, copy_now),
        judge=copied,
        state=lambda box: state_of(copy_of(box)),
    ),
    Scenario(
        name="three copies into a directory",
        prepare=lambda box: (complete_store(box), copy_of(box).mkdir()),
        actors=(copy_now, copy_now, copy_now),
        judge=copied,
        state=lambda box: state_of(copy_of(box)),
    ),
)
