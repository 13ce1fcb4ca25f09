"""What hsstore does while calls fail: every step from creating a store to reading, checking and mending one.

Each scenario works in a box of its own; `box/store` is the store, `truth()` what its samples must hold. Leaves to
`harness` the faults and what must hold after each of them.
"""

from __future__ import annotations

import dataclasses
import errno
import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest.mock import patch

import numpy as np

from hsstore import durable, paths
from hsstore.layout import assign
from hsstore.store import Store
from hsstore.verify import Verifier
from hsstore.writer import StagedShard, StoreWriter
from tests.faults.harness import Outcome, Scenario, called, command
from tests.faults.shim import Call, Fault
from tests.stores import Sample, create, input_summary, make_samples

LENGTHS = (30, 5, 33, 60, 2, 17, 8, 41)
FURTHER = (12, 50, 7)
FAILED = 4  # source_index of a sample that the verifier gave no states for


@functools.cache
def truth() -> tuple[Sample, ...]:
    """The samples of the first input, then those of growth."""
    return tuple(make_samples(LENGTHS + FURTHER, layers=("after_2", "final")))


def first_input() -> Sequence[Sample]:
    return truth()[: len(LENGTHS)]


def store_of(box: Path) -> Path:
    return box / "store"


def new_store(box: Path) -> StoreWriter:
    return create(store_of(box), first_input(), shard_rows=64, chunk_rows=16)


def complete_store(box: Path) -> None:
    writer = new_store(box)
    fill(writer)
    writer.finish()


def fill(writer: StoreWriter) -> None:
    """Commit every open shard."""
    for shard in writer.todo():
        staged(writer, shard).commit()


def staged(writer: StoreWriter, shard: int) -> StagedShard:
    """A shard with its states, written as the engines write them."""
    layout = next(x for x in writer.layouts if shard in x.numbers)
    known = {s.entry.source_index: s for s in truth()}
    rows = len(LENGTHS)
    mine = [s.entry for s in truth() if (s.entry.source_index < rows) == (layout.first_shard == 0)]
    entries = assign(mine, writer.header.shard_rows)[shard - layout.first_shard]
    tokens = {e.source_index: (known[e.source_index].input_ids, known[e.source_index].loss_mask) for e in entries}
    attempt = writer.stage(shard, entries, tokens)
    for state, path in attempt.files.items():
        with open(path, "r+b", buffering=0) as file:
            for e in entries:
                states = known[e.source_index].states[state]
                durable.pwrite_all(file.fileno(), states.data, e.row * states.strides[0])
    for e in entries:
        if e.source_index == FAILED:
            attempt.fail(FAILED, "the verifier ran out of memory")
    return attempt


def whole(box: Path, outcome: Outcome, raised: Sequence[Call]) -> None:
    """Nothing visible that is not whole: no damage at full depth, every visible sample's bytes right."""
    sound(store_of(box))


def sound(root: Path) -> None:
    if not root.exists():
        return
    damage = [str(f) for f in Verifier(root, "full").findings() if f.severity == "damage"]
    assert not damage, "\n".join(damage)
    with Store.open(root) as store:
        assert_right(store)


def assert_right(store: Store) -> None:
    for i, source_index in enumerate(store.index.source_index.tolist()):
        true = truth()[source_index]
        assert store.index.uid_hex(i) == true.entry.uid
        np.testing.assert_array_equal(store.input_ids(i), true.input_ids)
        np.testing.assert_array_equal(store.loss_mask(i), true.loss_mask)
        for state in store.layers:
            expected = np.zeros_like(true.states[state]) if store.index.flags[i] else true.states[state]
            np.testing.assert_array_equal(store.hidden(i, state), expected)


def finished(box: Path) -> None:
    """What a user does: open, extract what is open, build what is derived."""
    writer = StoreWriter.open(store_of(box)) if store_of(box).exists() else new_store(box)
    fill(writer)
    writer.finish()


def end_state(box: Path) -> object:
    """Manifest id and every file but those that a killed or failed writer may leave."""
    root = store_of(box)
    sound(root)
    with Store.open(root) as store:
        return store.manifest_id, len(store.index), names_of(root)


def names_of(root: Path) -> list[str]:
    files = (p for p in root.rglob("*") if p.is_file() and not durable.is_temporary(p.name))
    return sorted(p.relative_to(root).as_posix() for p in files if p.relative_to(root).parts[0] != paths.STAGING)


def scenario(
    name: str,
    prepare: Callable[[Path], object],
    act: Callable[[Path], object],
    promise: Callable[[Path, Outcome], None],
    *,
    check: Callable[[Path, Outcome, Sequence[Call]], None] = whole,
    finish: Callable[[Path], None] = finished,
    state: Callable[[Path], object] = end_state,
    codes: Callable[[Fault, Call], set[int]] | None = None,
) -> Scenario:
    """A scenario with what most of them share. An act that gives no outcome of its own is called as Python."""

    def ended(box: Path) -> Outcome:
        results: list[object] = []
        outcome = called(lambda: results.append(act(box)))
        given = results[0] if results else None
        return given if isinstance(given, Outcome) else outcome

    options = {"codes": codes} if codes else {}
    return Scenario(
        name=name,
        prepare=lambda box: prepare(box) and None,
        act=ended,
        promise=promise,
        check=check,
        finish=finish,
        state=state,
        **options,
    )


def is_committed(box: Path, outcome: Outcome) -> None:
    assert paths.record(store_of(box), 0).is_file()
    with Store.open(store_of(box)) as store:
        assert 0 in {s.shard for s in store.manifest.shards}


def unpublished_store(box: Path) -> None:
    """Every shard committed, none published: what a crash right after the record leaves."""
    with patch("hsstore.staged.publish"):
        fill(new_store(box))


def is_published(box: Path, outcome: Outcome) -> None:
    with Store.open(store_of(box)) as store:
        for shard in store.manifest.shards:
            assert all((store_of(box) / name).is_file() for name in shard.files)


def stale_store(box: Path) -> None:
    """A manifest that is older than the records."""
    writer = new_store(box)
    staged(writer, writer.todo()[0]).commit()
    writer.finish()
    fill(writer)


def is_built(box: Path, outcome: Outcome) -> None:
    notes = list(Verifier(store_of(box)).findings())
    assert not notes, notes


def grow(box: Path) -> None:
    writer = StoreWriter.open(store_of(box))
    if len(writer.layouts) == 1:
        further = [s.entry for s in truth()[len(LENGTHS) :]]
        writer.add_layout(further, input_summary(len(further)), offset=len(LENGTHS))


def is_grown(box: Path, outcome: Outcome) -> None:
    assert len(StoreWriter.open(store_of(box)).layouts) == 2


def grown_and_finished(box: Path) -> None:
    grow(box)
    finished(box)


def read_everything(box: Path) -> None:
    with Store.open(store_of(box)) as store:
        assert_right(store)
        assert len(store.index) == len(LENGTHS)


def nothing(box: Path, outcome: Outcome) -> None:
    """A reader that saw no error has compared what it read itself."""


def damage_is_reported(box: Path, outcome: Outcome, raised: Sequence[Call]) -> None:
    """What could not be read is a finding with a file, beside the summary that counts it; nothing was changed."""
    if outcome.output:
        findings = [json.loads(line) for line in outcome.output.splitlines()]
        damage = [f for f in findings[:-1] if f["severity"] == "damage"]
        assert all(f["file"] and f["detail"] for f in damage)
        assert findings[-1]["damage"] == len(damage)
        assert bool(damage) == (outcome.code == 3)
    else:
        assert outcome.code not in (0, 3)
    whole(box, outcome, raised)


def codes_of_verify(fault: Fault, call: Call) -> set[int]:
    """A disk that gives errors is damage. Everything else may also be said as what it is."""
    if fault.code == errno.EIO:
        return {3}
    return {errno.EACCES: {2, 3}, errno.EMFILE: {1}, errno.ENOMEM: {1}}[fault.code]


def is_sound(box: Path, outcome: Outcome) -> None:
    assert json.loads(outcome.output.splitlines()[-1])["damage"] == 0


def verify(depth: str) -> Scenario:
    return scenario(
        f"verify {depth}",
        complete_store,
        lambda box: command("verify", "manifest", store_of(box), f"--{depth}", "--json", "--quiet"),
        is_sound,
        check=damage_is_reported,
        codes=codes_of_verify,
    )


def shows(*arguments: str) -> Scenario:
    """A command that prints what a store holds: with a fault it prints the same or fails."""
    expected: list[str] = []

    def prepare(box: Path) -> None:
        complete_store(box)
        expected.append(printed(box).output)

    def printed(box: Path) -> Outcome:
        outcome = command(arguments[0], store_of(box), *arguments[1:], "--json")
        return dataclasses.replace(outcome, output=outcome.output.replace(str(box), "BOX"))

    def prints_the_same(box: Path, outcome: Outcome) -> None:
        assert outcome.output == expected[0].replace(str(box.with_name("template")), "BOX")

    return scenario(" ".join(arguments), prepare, printed, prints_the_same)


SCENARIOS: tuple[Scenario, ...] = (
    scenario("create", lambda box: None, new_store, lambda box, _: StoreWriter.open(store_of(box)) and None),
    scenario(
        "commit",
        new_store,
        lambda box: staged(StoreWriter.open(store_of(box)), 0).commit() and None,
        is_committed,
    ),
    scenario(
        "roll forward",
        unpublished_store,
        lambda box: StoreWriter.open(store_of(box)) and None,
        is_published,
    ),
    scenario("manifest build", stale_store, lambda box: command("manifest", "build", store_of(box)), is_built),
    scenario("grow", complete_store, grow, is_grown, finish=grown_and_finished),
    scenario("read", complete_store, read_everything, nothing),
    verify("quick"),
    verify("full"),
    shows("info"),
    shows("ls"),
    shows("show", "3"),
)
