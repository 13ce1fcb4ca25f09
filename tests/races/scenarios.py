"""What several processes do to one store at once.

Each scenario works in a box of its own; `box/store` is the store, `truth()` what its samples must hold. Leaves what
single actors do to `actors`, to `harness` the interleavings and what must hold after each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from hsstore import manifest, owner, paths
from hsstore.copying import Copy
from hsstore.errors import DamagedError
from hsstore.store import Store
from tests.races import actors as act
from tests.races.actors import copy_of, small_of, store_of
from tests.races.harness import End, Scenario

Judge = Callable[[Path, list[End]], None]


def all_well(ends: Sequence[End]) -> None:
    for _, error in ends:
        if error is not None:
            raise error


def well(box: Path, ends: list[End]) -> None:
    """All end well, and the store is whole, current and clean."""
    all_well(ends)
    act.sound(store_of(box))


def copied(box: Path, ends: list[End]) -> None:
    """All end well and say the same manifest."""
    all_well(ends)
    ids = {work.summary.manifest_id for work, _ in ends if isinstance(work, Copy)}
    with Store.open(store_of(box)) as store:
        assert ids == {store.manifest_id}
    act.sound(copy_of(box))
    act.sound(store_of(box))


def copied_in_part(box: Path, ends: list[End]) -> None:
    """A copy of a store that is written to is a sound store of the shards that there were."""
    all_well(ends)
    act.sound(store_of(box))
    act.sound(copy_of(box))
    assert set(act.shards_of(copy_of(box))) <= set(act.shards_of(store_of(box)))


def one_created(box: Path, ends: list[End]) -> None:
    """One creates the store, the others are told so and go on with it."""
    well(box, ends)
    assert sorted(str(end) for end, _ in ends) == ["created", "was there"]


def mended(box: Path, ends: list[End]) -> None:
    well(box, ends)
    act.sound(box / "replica")


def two_out_of_use(box: Path, ends: list[End]) -> None:
    well(box, ends)
    with Store.open(store_of(box)) as store:
        assert store.manifest_id == manifest.manifest_id(manifest.load(store_of(box)))
        assert not {0, 1} & {s.shard for s in store.manifest.shards}


def one_tombstone_each(box: Path, ends: list[End]) -> None:
    well(box, ends)
    header = manifest.load_header(store_of(box))
    assert set(manifest.quarantined(manifest.load_tombstones(store_of(box), header))) == {0}


def grown_once(box: Path, ends: list[End]) -> None:
    well(box, ends)
    assert len(act.layouts_of(store_of(box))) == 2


def grown_twice(box: Path, ends: list[End]) -> None:
    well(box, ends)
    assert len(act.layouts_of(store_of(box))) == 3


def smaller(box: Path, ends: list[End]) -> None:
    """One or the other begins it; whoever finds it begun continues it."""
    all_well(ends)
    act.sound(small_of(box))
    act.sound(store_of(box))


def reads(box: Path, ends: list[End]) -> None:
    well(box, ends)


def mended_or_told(box: Path, ends: list[End]) -> None:
    """What opens the store for writing before its record is back says that it is damaged."""
    told = [error for _, error in ends if isinstance(error, DamagedError)]
    all_well([end for end in ends if end[1] not in told])
    act.sound(store_of(box))
    act.sound(box / "replica")


def at_most_one(box: Path, ends: list[End]) -> None:
    """Of several that find its holder dead."""
    all_well(ends)
    assert [taken for taken, _ in ends].count(True) == 1, ends
    paths.lease(store_of(box), 1).unlink()
    act.gc(box)
    act.sound(store_of(box))


def late(box: Path, ends: list[End]) -> None:
    """Who was stopped for an hour while it made its attempt finds it gone, and does it again."""
    for _, error in ends:
        if not isinstance(error, FileNotFoundError) or f"/{paths.STAGING}/" not in str(error.filename):
            all_well([(None, error)])
    act.extract(box)
    for left in act.attempts_of(store_of(box)):
        owner.remove(left)  # marked by this process, which lives
    act.sound(store_of(box))


def names(root: Path) -> list[str]:
    """Files of a store without older manifests: who finishes in the midst of another's work builds one."""
    files = (p.relative_to(root) for p in root.rglob("*") if p.is_file())
    return sorted(p.as_posix() for p in files if p.parts[0] != paths.MANIFESTS)


def state(*roots: str) -> Callable[[Path], object]:
    """Samples and files of stores in the box."""

    def look(box: Path) -> object:
        found: list[object] = []
        for name in roots:
            with Store.open(box / name) as store:
                uids = sorted(store.index.uid_hex(i) for i in range(len(store.index)))
                found += [uids, names(box / name), manifest.manifest_id(manifest.load(box / name))]
        return found

    return look


def uids_only(box: Path) -> object:
    """Of a store whose layouts lie in either order."""
    with Store.open(store_of(box)) as store:
        return sorted(store.index.uid_hex(i) for i in range(len(store.index)))


def scenario(
    name: str,
    prepare: Callable[[Path], object],
    *actors: Callable[[Path], object],
    judge: Judge = well,
    ends_as: Callable[[Path], object] | None = None,
    overtakes: bool = True,
) -> Scenario:
    look = ends_as or state("store")
    return Scenario(name=name, prepare=prepare, actors=actors, judge=judge, state=look, overtakes=overtakes)


SCENARIOS: tuple[Scenario, ...] = (
    scenario("two copies", act.complete, act.copy, act.copy, judge=copied, ends_as=state("copy")),
    scenario(
        "three copies into a directory",
        lambda box: (act.complete(box), copy_of(box).mkdir()),
        *(act.copy, act.copy, act.copy),
        judge=copied,
        ends_as=state("copy"),
    ),
    scenario("copy and gc", act.complete, act.copy, act.gc_copy, judge=copied, ends_as=state("copy")),
    scenario("copy of a growing store", act.begun, act.copy, act.extract, judge=copied_in_part),
    scenario("create and create", lambda box: None, act.create, act.create, judge=one_created, ends_as=uids_only),
    scenario(
        "copy of a dead one's shard and gc",
        act.copied_by_a_dead_one,
        act.copy,
        act.gc_copy,
        judge=copied,
        ends_as=state("copy"),
    ),
    scenario(
        "gc and copy of a dead one's shard",
        act.copied_by_a_dead_one,
        act.gc_copy,
        act.copy,
        judge=copied,
        ends_as=state("copy"),
    ),
    scenario("a dead one's lease", act.littered, act.take, act.take, act.take, judge=at_most_one, overtakes=False),
    scenario("two writers", act.empty, act.extract, act.extract),
    scenario("two writers without leases", act.empty, act.write_all, act.write_all),
    scenario("writer and gc", act.littered, act.extract, act.gc),
    scenario("gc and writer", act.littered, act.gc, act.extract),
    scenario("gc and gc", act.littered, act.gc, act.gc),
    scenario("gc an hour later and writer", act.littered, act.late_gc, act.extract, judge=late),
    scenario("roll forward twice", act.unpublished, act.build, act.build),
    scenario("build and writer", act.begun, act.build, act.extract),
    scenario("writer and reader", act.begun, act.extract, act.read, judge=reads),
    scenario("reader and writer", act.begun, act.read, act.extract, judge=reads),
    scenario("verify and writer", act.begun, act.verify, act.extract, judge=reads),
    scenario("verify and roll forward", act.unpublished, act.verify, act.build, judge=reads),
    scenario("repair and repair", act.damaged, act.repair, act.repair, judge=mended),
    scenario("repair and gc", act.damaged, act.repair, act.gc, judge=mended_or_told),
    scenario("repair and writer", act.begun_and_damaged, act.repair, act.extract, judge=mended),
    scenario("two subsets", act.complete, act.subset, act.subset, judge=smaller, ends_as=state("small")),
    scenario("quarantine of two", act.complete3, act.quarantine(0), act.quarantine(1), judge=two_out_of_use),
    scenario("quarantine of one", act.complete3, act.quarantine(0), act.quarantine(0), judge=one_tombstone_each),
    scenario("quarantine and build", act.complete3, act.quarantine(0), act.build, judge=one_tombstone_each),
    scenario("quarantine and reader", act.complete3, act.quarantine(0), act.read, judge=one_tombstone_each),
    scenario("grown by the same twice", act.complete, act.append("b"), act.append("b"), judge=grown_once),
    scenario("grown by two", act.complete, act.append("b"), act.append("c"), judge=grown_twice, ends_as=uids_only),
)
