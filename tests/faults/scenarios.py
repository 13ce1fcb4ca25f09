"""What hsstore does while calls fail: every step from creating a store to reading, checking and mending one.

Each scenario works in a box of its own; `box/store` is the store, `truth()` what its samples must hold. Leaves to
`harness` the faults and what must hold after each of them.
"""

from __future__ import annotations

import dataclasses
import errno
import functools
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest.mock import patch

import numpy as np

from hsstore import durable, owner, paths
from hsstore.layout import assign
from hsstore.leases import Leases
from hsstore.store import Store
from hsstore.verify import Verifier
from hsstore.writer import StagedShard, StoreWriter
from tests.faults.harness import EXIT_CODES, Outcome, Scenario, called, command, copy_tree
from tests.faults.shim import SHORT, Call, Fault
from tests.stores import Sample, create, input_summary, make_samples

LENGTHS = (30, 5, 33, 60, 2, 17, 8, 41)
FURTHER = (12, 50, 7)
OPENED_QUICKLY = '"opened_from": "derived files"'
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
        if store.index.flags[i] and not store.input_ids(i).any():
            assert not store.loss_mask(i).any()
            continue  # of a subset: the source's tokens could not be read
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
    """Files of a store, without work in progress and without older manifests: a stopped run may have built one."""
    files = (p for p in root.rglob("*") if p.is_file() and not durable.is_temporary(p.name))
    relative = (p.relative_to(root) for p in files)
    return sorted(p.as_posix() for p in relative if p.parts[0] not in (paths.STAGING, paths.MANIFESTS))


def scenario(
    name: str,
    prepare: Callable[[Path], object],
    act: Callable[[Path], object],
    promise: Callable[[Path, Outcome], None],
    *,
    check: Callable[[Path, Outcome, Sequence[Call]], None] = whole,
    finish: Callable[[Path], None] = finished,
    state: Callable[[Path], object] = end_state,
    codes: Callable[[Fault, Call], set[int]] = lambda fault, _: EXIT_CODES[fault.code],
    may_pass: Callable[[Fault, Call], bool] = lambda fault, call: True,
) -> Scenario:
    """A scenario with what most of them share. An act that gives no outcome of its own is called as Python."""

    def ended(box: Path) -> Outcome:
        results: list[object] = []
        outcome = called(lambda: results.append(act(box)))
        given = results[0] if results else None
        return given if isinstance(given, Outcome) else outcome

    return Scenario(
        name=name,
        prepare=lambda box: prepare(box) and None,
        act=ended,
        promise=promise,
        check=check,
        finish=finish,
        state=state,
        codes=codes,
        may_pass=may_pass,
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


def may_be_passed_over(fault: Fault, call: Call) -> bool:
    """What verify could not read it must not call sound; its own notes are no part of the store, nor is advice.

    `_state` only compares what was there before with what is there after, `invoke` is the command line's own look.
    """
    harmless = ("advise", "close", "closeread")
    looks = ("hsstore/checks.py", "_state"), ("hsstore/cli.py", "invoke"), ("hsstore/ledger.py", "")
    by_others = any(call.place.startswith(file) and call.place.endswith(function) for file, function in looks)
    in_state = ("hsstore/checks.py", "<genexpr>")  # the same, inside of its generator
    by_others |= call.kind == "readdir" and (call.place.split(":")[0], call.place.split(" ")[-1]) == in_state
    # Looked at before it is judged: a failure that is gone by then is none.
    again = not fault.lasting and call.path.startswith((f"store/{paths.LAYOUTS}", "store/manifest."))
    return fault.code == SHORT or call.kind in harmless or not call.path.startswith("store") or by_others or again


def is_sound(box: Path, outcome: Outcome) -> None:
    assert json.loads(outcome.output.splitlines()[-1])["damage"] == 0


def with_state(box: Path, *arguments: str | Path) -> Outcome:
    """A command whose notes of what was verified lie in the box, so that they fail too."""
    with patch.dict(os.environ, HSSTORE_STATE_DIR=str(box / "state")):
        return command(*arguments)


def verify(depth: str) -> Scenario:
    return scenario(
        f"verify {depth}",
        complete_store,
        lambda box: with_state(box, "verify", "manifest", store_of(box), f"--{depth}", "--json", "--quiet"),
        is_sound,
        check=damage_is_reported,
        codes=codes_of_verify,
        may_pass=may_be_passed_over,
    )


def shows(*arguments: str) -> Scenario:
    """A command that prints what a store holds: with a fault it prints the same or fails."""
    expected: list[str] = []

    def prepare(box: Path) -> None:
        complete_store(box)
        expected.append(printed(box).output)

    def printed(box: Path) -> Outcome:
        outcome = with_state(box, arguments[0], store_of(box), *arguments[1:], "--json")
        output = re.sub(r'"verified": .*?(?=\n  ["}])', '"verified": …', outcome.output, flags=re.DOTALL)
        output = output.replace(str(box), "BOX").replace('"opened_from": "records"', OPENED_QUICKLY)
        return dataclasses.replace(outcome, output=output)

    def prints_the_same(box: Path, outcome: Outcome) -> None:
        assert outcome.output == expected[0]

    return scenario(" ".join(arguments), prepare, printed, prints_the_same)


def copy_of(box: Path) -> Path:
    return box / "copy"


def copy_now(box: Path) -> Outcome:
    return command("copy", store_of(box), copy_of(box), "--jobs", "1", "--quiet")


def processes_end(box: Path) -> None:
    """Leases end with their process; this one goes on, so it takes away what it could not give back."""
    for place in box.glob("*/staging/*.lease"):
        place.unlink()


def is_copied(box: Path, outcome: Outcome) -> None:
    with Store.open(store_of(box)) as a, Store.open(copy_of(box)) as b:
        assert a.manifest_id == b.manifest_id
        assert len(b.index) == len(LENGTHS)


def both_are_whole(box: Path, outcome: Outcome, raised: Sequence[Call]) -> None:
    sound(store_of(box))
    sound(copy_of(box))


def copied_at_last(box: Path) -> None:
    processes_end(box)
    assert copy_now(box).code == 0


def both_states(box: Path) -> object:
    with Store.open(copy_of(box)) as store:
        return end_state(box), store.manifest_id, names_of(copy_of(box))


def subset_of(box: Path) -> Path:
    return box / "small"


def subset_now(box: Path) -> Outcome:
    return command("subset", store_of(box), subset_of(box), "--layers", "final", "--samples", "0-6", "--quiet")


def is_subset(box: Path, outcome: Outcome) -> None:
    with Store.open(subset_of(box)) as small:
        assert small.index.source_index.tolist() == [i for i in range(7) if i != FAILED]
        assert not small.index.flags.any()


def subset_is_whole(box: Path, outcome: Outcome, raised: Sequence[Call]) -> None:
    """Samples that could not be read are flagged, so that what is visible is right or zero."""
    both_are_whole(box, outcome, raised)
    sound(subset_of(box))


def subset_at_last(box: Path) -> None:
    """Samples that a bad medium cost stay flagged; then the subset is made anew, as the message says."""
    outcome = subset_now(box)
    if outcome.code == 3:
        shutil.rmtree(subset_of(box))
        outcome = subset_now(box)
    assert outcome.code == 0, outcome.message


def subset_state(box: Path) -> object:
    with Store.open(subset_of(box)) as store:
        return store.manifest_id, names_of(subset_of(box))


def quarantined_store(box: Path) -> None:
    complete_store(box)
    assert quarantine_now(box).code == 0


def quarantine_now(box: Path) -> Outcome:
    return command("quarantine", store_of(box), "--shard", "1", "--reason", "rows of another run")


def release_now(box: Path) -> Outcome:
    return command("quarantine", store_of(box), "--shard", "1", "--release")


def shards_in_use(box: Path) -> set[int]:
    with Store.open(store_of(box)) as store:
        return {s.shard for s in store.manifest.shards}


def is_out_of_use(box: Path, outcome: Outcome) -> None:
    assert 1 not in shards_in_use(box)


def is_in_use(box: Path, outcome: Outcome) -> None:
    assert 1 in shards_in_use(box)


def quarantined_at_last(box: Path) -> None:
    assert quarantine_now(box).code == 0
    finished(box)


def released_at_last(box: Path) -> None:
    if 1 not in shards_in_use(box):
        assert release_now(box).code == 0
    finished(box)


def littered_store(box: Path) -> None:
    """What killed writers leave: an attempt of a dead process, files that never got their names, a lease."""
    writer = new_store(box)
    staged(writer, 0).commit()
    dead = subprocess.Popen(["true"])
    identity = owner.identity(dead.pid)
    dead.wait()
    attempt = staged(writer, 1)
    (attempt.directory / owner.MARK).write_text(identity)
    old = [attempt.directory, store_of(box) / paths.RECORDS / f".000001.json.{7:016x}.tmp"]
    old[1].write_bytes(b"{")
    lease = paths.lease(store_of(box), 2)
    lease.write_text(f"0\n{identity}")
    for path in [*old, *attempt.directory.iterdir(), lease]:
        os.utime(path, (1, 1))


def gc_now(box: Path) -> Outcome:
    return command("gc", store_of(box), "--yes", "--quiet")


def is_clean(box: Path, outcome: Outcome) -> None:
    left = [p for p in store_of(box).rglob("*") if durable.is_temporary(p.name)]
    assert not left + list((store_of(box) / paths.STAGING).iterdir())


def clean_at_last(box: Path) -> None:
    for place in (store_of(box) / paths.STAGING).iterdir():
        if place.is_dir() and not any(place.iterdir()):
            os.utime(place, (1, 1))  # a directory that lost its mark last of all goes when it is ten minutes old
    outcome = gc_now(box)  # what was left in doubt, a mark that could not be read, goes now
    assert outcome.code == 0
    is_clean(box, outcome)
    finished(box)


def damaged_store(box: Path) -> None:
    """Beside a replica: a flipped bit in one file, another one gone, a record that is cut, a wrong index."""
    complete_store(box)
    copy_tree(store_of(box), box / "replica")
    flipped = store_of(box) / "arrays.zarr/hidden/final/c/0/0"
    data = bytearray(flipped.read_bytes())
    data[100] ^= 1
    for path, contents in {
        flipped: bytes(data),
        store_of(box) / "arrays.zarr/tokens/input_ids/c/1": None,
        paths.record(store_of(box), 2): b"{",
        store_of(box) / paths.INDEX / "row.npy": b"",
    }.items():
        path.unlink()
        if contents is not None:
            path.write_bytes(contents)


def repair_now(box: Path) -> Outcome:
    return with_state(box, "repair", store_of(box), "--from", box / "replica", "--full", "--quiet")


def codes_where_files_are_judged(fault: Fault, call: Call) -> set[int]:
    """What may not be read cannot be mended or copied: it is named, the rest is done, that is exit code 3."""
    return EXIT_CODES[fault.code] | ({3} if fault.code == errno.EACCES else set())


def is_repaired(box: Path, outcome: Outcome) -> None:
    sound(store_of(box))


def nothing_is_worse(box: Path, outcome: Outcome, raised: Sequence[Call]) -> None:
    """No file is damaged that was whole before, and the replica is as it was."""
    before = {"arrays.zarr/hidden/final/c/0/0", "arrays.zarr/tokens/input_ids/c/1", "records/000002.json"}
    before |= {"index/row.npy"}
    found = {f.file for f in Verifier(store_of(box), "full").findings() if f.severity == "damage"}
    assert found <= before, found - before
    sound(box / "replica")


def repaired_at_last(box: Path) -> None:
    outcome = repair_now(box)
    assert outcome.code == 0, outcome.message


def follow(box: Path) -> None:
    """Open an older state, read it, take up what was committed since, read that."""
    kept = json.loads((box / "older.json").read_text())
    with Store.open(store_of(box), backend="pread", manifest_id=kept) as store:
        assert_right(store)
        assert store.refresh()
        assert_right(store)
        assert len(store.index) == len(LENGTHS)


def grown_store(box: Path) -> None:
    stale_store(box)
    StoreWriter.open(store_of(box)).finish()
    older = [p.stem for p in (store_of(box) / paths.MANIFESTS).iterdir()]
    with Store.open(store_of(box)) as store:
        older.remove(store.manifest_id)
    (box / "older.json").write_text(json.dumps(older[0]))


def lease(box: Path) -> None:
    leases = Leases(store_of(box))
    assert leases.take(0)
    assert not Leases(store_of(box)).take(0)
    leases.release(0)


def is_free(box: Path, outcome: Outcome) -> None:
    assert Leases(store_of(box)).take(0)


def leased_and_finished(box: Path) -> None:
    """A lease is advice: whatever became of it, the work is done."""
    processes_end(box)
    finished(box)


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
    scenario(
        "copy",
        complete_store,
        copy_now,
        is_copied,
        codes=codes_where_files_are_judged,
        check=both_are_whole,
        finish=copied_at_last,
        state=both_states,
    ),
    scenario(
        "subset",
        complete_store,
        subset_now,
        is_subset,
        check=subset_is_whole,
        finish=subset_at_last,
        state=subset_state,
    ),
    scenario("quarantine", complete_store, quarantine_now, is_out_of_use, finish=quarantined_at_last),
    scenario("release", quarantined_store, release_now, is_in_use, finish=released_at_last),
    scenario("gc", littered_store, gc_now, nothing, finish=clean_at_last),
    scenario(
        "repair",
        damaged_store,
        repair_now,
        is_repaired,
        check=nothing_is_worse,
        finish=repaired_at_last,
        codes=codes_where_files_are_judged,
    ),
    scenario("follow", grown_store, follow, nothing),
    scenario("lease", new_store, lease, is_free, finish=leased_and_finished),
)
