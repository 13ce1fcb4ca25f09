"""A subset holds exactly the bytes of what was selected, says where they are from, and never hides damage."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from hsstore import index, manifest, paths, zarrmeta
from hsstore.errors import ConflictError, NoSpaceError, UsageError
from hsstore.index import in_validation
from hsstore.records import Derivation, ShardRecord, canonical, sealed
from hsstore.staged import StagedShard
from hsstore.store import Store
from hsstore.subset import Result, Selection, Subset
from hsstore.verify import Verifier
from hsstore.writer import StoreWriter
from tests.faults.harness import command
from tests.stores import Sample, create, make_samples, make_store, stage


def subset(source: Path, target: Path, **selection: object) -> Result:
    with Subset(source, target, Selection(**selection)) as making:  # type: ignore[arg-type]
        return making.copy()


def damage(root: Path) -> list[str]:
    return [str(f) for f in Verifier(root, "full").findings() if f.severity == "damage"]


def assert_holds(root: Path, samples: list[Sample], source_indexes: list[int], layers: tuple[str, ...]) -> None:
    assert not damage(root)
    with Store.open(root) as store:
        assert store.layers == layers
        assert store.index.source_index.tolist() == source_indexes
        for i, source_index in enumerate(source_indexes):
            true = samples[source_index]
            assert store.index.uid_hex(i) == true.entry.uid
            np.testing.assert_array_equal(store.input_ids(i), true.input_ids)
            np.testing.assert_array_equal(store.loss_mask(i), true.loss_mask)
            for state in layers:
                np.testing.assert_array_equal(store.hidden(i, state), true.states[state])


@pytest.mark.parametrize(
    ("selection", "expected", "layers"),
    [
        ({"layers": "final,after_2"}, list(range(20)), ("after_2", "final")),
        ({"samples": "3-5,17"}, [3, 4, 5, 17], ("after_2", "after_3", "final")),
        ({"samples": "0-99", "limit": 4, "layers": "final"}, [0, 1, 2, 3], ("final",)),
        ({"limit": 7}, list(range(7)), ("after_2", "after_3", "final")),
    ],
)
def test_a_subset_holds_what_was_selected(
    shared_store: Store,
    samples: list[Sample],
    tmp_path: Path,
    selection: dict[str, object],
    expected: list[int],
    layers: tuple[str, ...],
) -> None:
    result = subset(shared_store.root, tmp_path / "small", **selection)
    assert_holds(tmp_path / "small", samples, expected, layers)
    assert (result.n_samples, result.n_failed) == (len(expected), 0)
    assert result.n_tokens == sum(len(samples[i].input_ids) for i in expected)


@pytest.mark.parametrize("side", ["train", "validation"])
def test_a_side_of_the_split_stays_that_side(tmp_path: Path, side: index.SplitName) -> None:
    """The salt is kept: whatever is left out, no sample changes to the side that a drafter is judged by."""
    made = make_samples([5, 6, 7, 8] * 12)
    source = make_store(tmp_path / "s", made)
    expected = index.members(source.index, source.header.split, side)
    assert 0 < len(expected) < len(made)
    subset(source.root, tmp_path / "small", split=side)
    with Store.open(tmp_path / "small") as small:
        assert small.index.source_index.tolist() == source.index.source_index[expected].tolist()
        assert (in_validation(small.index, small.header.split) == (side == "validation")).all()


def test_uids_and_a_file_of_samples_are_understood(shared_store: Store, samples: list[Sample], tmp_path: Path) -> None:
    listed = tmp_path / "chosen.txt"
    listed.write_text(f"# the good ones\n{samples[9].entry.uid}\n2-3, 7\n")
    subset(shared_store.root, tmp_path / "small", samples=str(listed))
    assert_holds(tmp_path / "small", samples, [2, 3, 7, 9], ("after_2", "after_3", "final"))
    assert str(tmp_path) not in (tmp_path / "small" / paths.HEADER).read_text(), "no path of this machine"


def test_it_says_what_it_was_taken_from(shared_store: Store, tmp_path: Path) -> None:
    result = subset(shared_store.root, tmp_path / "small", samples="1,4", layers="final")
    with Store.open(tmp_path / "small") as small:
        assert small.header.derived_from == Derivation(
            uuid=shared_store.header.uuid,
            manifest_id=shared_store.manifest_id,
            selection={"samples": "1,4", "layers": "final"},
        )
        assert small.header.derived_from == result.derived_from
        assert small.capture.norm == shared_store.capture.norm
        assert small.capture.weights_sha256 == shared_store.capture.weights_sha256
        assert small.header.split == shared_store.header.split


@pytest.mark.parametrize(
    ("selection", "message"),
    [
        ({"layers": "after_22"}, "no state 'after_22'.*did you mean 'after_2'"),
        ({"layers": ""}, "no state is named"),
        ({"samples": "3,99"}, "no sample 99; the nearest is 19"),
        ({"samples": "40-50"}, "no sample in 40-50; the nearest is 19"),
        ({"samples": "ffffffffffff"}, "no sample ffffffffffff"),
        ({"samples": "ids.txt"}, "there is no such file"),
        ({"samples": "0-99"}, "leaves nothing out"),
        ({}, "leaves nothing out"),
    ],
)
def test_what_is_not_there_is_refused(
    shared_store: Store, tmp_path: Path, selection: dict[str, object], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        subset(shared_store.root, tmp_path / "small", **selection)
    assert not (tmp_path / "small").exists()


@pytest.mark.parametrize(("text", "message"), [("", "names no sample"), ("3 x", "has 'x'"), ("\0\xff", "expected a")])
def test_a_list_that_is_none_is_refused(shared_store: Store, tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "list.txt").write_bytes(text.encode("latin-1"))
    with pytest.raises(UsageError, match=message):
        subset(shared_store.root, tmp_path / "small", samples=str(tmp_path / "list.txt"))


def test_a_killed_run_is_taken_up_where_it_was(
    shared_store: Store, samples: list[Sample], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is committed is not copied again, and the end is that of a run never stopped."""
    whole = subset(shared_store.root, tmp_path / "whole", layers="final")
    commits: list[int] = []
    real = StagedShard.commit

    def commit_once(staged: StagedShard) -> object:
        if commits:
            raise KeyboardInterrupt
        commits.append(staged.shard)
        return real(staged)

    monkeypatch.setattr(StagedShard, "commit", commit_once)
    with pytest.raises(KeyboardInterrupt):
        subset(shared_store.root, tmp_path / "small", layers="final")
    monkeypatch.undo()
    with Subset(shared_store.root, tmp_path / "small", Selection(layers="final")) as making:
        assert not set(making.todo) & set(commits)
        assert 0 < making.n_done < making.n_samples
        result = making.copy()
    assert result.manifest_id == whole.manifest_id
    assert_holds(tmp_path / "small", samples, list(range(20)), ("final",))


def test_another_selection_or_source_is_refused(shared_store: Store, samples: list[Sample], tmp_path: Path) -> None:
    subset(shared_store.root, tmp_path / "small", layers="final")
    with pytest.raises(ConflictError, match="not begun as this subset"):
        subset(shared_store.root, tmp_path / "small", layers="after_2")
    twin = make_store(tmp_path / "twin", samples)
    with pytest.raises(ConflictError, match="not begun as this subset"):
        subset(twin.root, tmp_path / "small", layers="final")
    with pytest.raises(ConflictError, match="not begun as this subset"):
        subset(shared_store.root, twin.root, layers="final")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.txt").write_text("mine")
    with pytest.raises(ConflictError, match="exists already"):
        subset(shared_store.root, tmp_path / "other", layers="final")


def test_a_target_inside_the_source_is_refused(store_path: Path) -> None:
    for target in (store_path, store_path / "small"):
        with pytest.raises(UsageError, match="lies inside"):
            subset(store_path, target, layers="final")
    assert not damage(store_path)


def test_a_run_goes_on_from_the_state_it_was_begun_with(tmp_path: Path, samples: list[Sample]) -> None:
    """The source grew meanwhile: without the pinned state two halves of one subset would follow two selections."""
    writer = create(tmp_path / "s", samples)
    first, *rest = writer.todo()
    stage(writer, first, samples).commit()
    writer.finish()
    with Store.open(tmp_path / "s") as source:
        before = source.index.source_index.tolist()
    subset(tmp_path / "s", tmp_path / "small", layers="final")
    for shard in rest:
        stage(writer, shard, samples).commit()
    writer.finish()
    subset(tmp_path / "s", tmp_path / "small", layers="final")
    assert_holds(tmp_path / "small", samples, before, ("final",))
    assert len(before) < len(samples)


@pytest.mark.parametrize("array", ["hidden/final", "tokens/input_ids"])
def test_a_damaged_sample_is_flagged_and_named(
    tmp_path: Path, store_path: Path, samples: list[Sample], array: str
) -> None:
    """One flipped bit costs the samples of its block, never the run, and never passes for states."""
    with Store.open(store_path) as store:
        i = store.index.find("4")
        shard, row = int(store.index.shard[i]), int(store.index.row[i])
        spec = store.header.array(array)
        path = store_path / zarrmeta.chunk_path(spec, shard)
        block = row // store.header.chunk_rows
        touched = {
            e.source_index
            for e in store.record(shard).samples
            if e.row // 16 <= block <= (e.row + e.n_tokens - 1) // 16
        }
    path.chmod(0o644)
    with open(path, "r+b") as file:
        file.seek(row * spec.row_bytes)
        byte = file.read(1)[0]
        file.seek(row * spec.row_bytes)
        file.write(bytes([byte ^ 4]))
    outcome = command("subset", store_path, tmp_path / "small", "--layers", "after_2,final", "--json")
    assert outcome.code == 3
    assert f"{len(touched)} sample" in outcome.message
    document = json.loads(outcome.output)
    assert {int(i) for i in document["failures"]} == touched
    assert all("CRC32C of block" in why for why in document["failures"].values())
    assert not damage(tmp_path / "small")
    with Store.open(tmp_path / "small") as small:
        failed = {int(s) for s, f in zip(small.index.source_index, small.index.flags, strict=True) if f}
        assert failed == touched
        good = small.index.find(str(min(set(range(20)) - touched)))
        true = samples[int(small.index.source_index[good])]
        np.testing.assert_array_equal(small.hidden(good, "final"), true.states["final"])
    assert command("subset", store_path, tmp_path / "small", "--layers", "after_2,final").code == 3, "not forgotten"


def test_a_missing_file_costs_its_samples_only(tmp_path: Path, store_path: Path) -> None:
    with Store.open(store_path) as store:
        lost = {s.source_index for s in store.record(1).samples}
        (store_path / zarrmeta.chunk_path(store.header.array("hidden/after_3"), 1)).unlink()
    result = subset(store_path, tmp_path / "small", limit=19)
    assert {int(i) for i in result.failures} == lost - {19}
    assert all("is missing" in why for why in result.failures.values())
    assert not subset(store_path, tmp_path / "other", layers="after_2,final").failures, "another state is whole"


def test_a_record_that_is_lost_is_no_smaller_store(tmp_path: Path, store_path: Path) -> None:
    paths.record(store_path, 1).unlink()
    outcome = command("subset", store_path, tmp_path / "small", "--limit", "19")
    assert (outcome.code, "000001.json is missing" in outcome.message) == (3, True)
    assert not (tmp_path / "small").exists()


def test_a_record_that_is_lost_later_costs_its_samples(tmp_path: Path, store_path: Path) -> None:
    with Subset(store_path, tmp_path / "small", Selection(limit=19)) as making:
        lost = {s.source_index for s in making.source.record(1).samples} - {19}
        paths.record(store_path, 1).unlink()
        assert {int(i) for i in making.copy().failures} == lost


def _file(**changes: object) -> Callable[[ShardRecord], ShardRecord]:
    def change(record: ShardRecord) -> ShardRecord:
        files = {name: dataclasses.replace(entry, **changes) for name, entry in record.files.items()}  # type: ignore[arg-type]
        return dataclasses.replace(record, files=files)

    return change


def _sample(**changes: object) -> Callable[[ShardRecord], ShardRecord]:
    return lambda r: dataclasses.replace(r, samples=(msgspec.structs.replace(r.samples[0], **changes), *r.samples[1:]))


@pytest.mark.parametrize("derived", ["kept", "removed"])
@pytest.mark.parametrize(
    "change",
    [
        _file(crc32c_blocks="!!!"),
        _file(crc32c_blocks="AAAA"),
        lambda r: dataclasses.replace(r, n_rows=10**30),
        _sample(uid=""),
        _sample(n_tokens=1 << 70),
        _sample(n_tokens=1 << 40),
        _sample(n_tokens=0),
        _sample(row=-1),
    ],
)
def test_a_record_that_makes_no_sense_is_damage(
    tmp_path: Path, store_path: Path, change: Callable[[ShardRecord], ShardRecord], derived: str
) -> None:
    """Its hash is right: with the manifest it was made from, and with none, it ends in exit 3 and no traceback."""
    header = manifest.load_header(store_path)
    path = paths.record(store_path, 1)
    path.chmod(0o644)
    path.write_bytes(canonical(sealed(change(manifest.load_record(store_path, header, 1)))))
    if derived == "removed":
        (store_path / paths.MANIFEST).unlink()
    assert command("subset", store_path, tmp_path / "small", "--limit", "19").code == 3


@pytest.mark.parametrize("changes", [{"chunk_rows": 0}, {"shard_rows": 1 << 62}, {"row_shape": (10**18,)}])
def test_a_header_that_makes_no_sense_is_damage(tmp_path: Path, store_path: Path, changes: dict[str, object]) -> None:
    header = manifest.load_header(store_path)
    if "row_shape" in changes:
        changes = {"arrays": tuple(dataclasses.replace(a, **changes) for a in header.arrays)}  # type: ignore[arg-type]
    path = store_path / paths.HEADER
    path.chmod(0o644)
    path.write_bytes(canonical(sealed(dataclasses.replace(header, **changes))))  # type: ignore[arg-type]
    assert command("subset", store_path, tmp_path / "small", "--limit", "19").code == 3
    assert not (tmp_path / "small").exists()


def test_samples_without_states_are_left_out(tmp_path: Path, samples: list[Sample]) -> None:
    writer = create(tmp_path / "s", samples)
    for shard in writer.todo():
        staged = stage(writer, shard, samples)
        if any(e.source_index == 4 for e in staged.entries):
            staged.fail(4, "the verifier ran out of memory")
        staged.commit()
    writer.finish()
    with Subset(tmp_path / "s", tmp_path / "small", Selection(samples="3-5")) as making:
        assert (making.n_samples, making.n_left_out) == (2, 1)
        making.copy()
    assert_holds(tmp_path / "small", samples, [3, 5], ("after_2", "after_3", "final"))


def test_a_full_disk_is_said_before_the_first_byte(
    shared_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = os.statvfs_result((4096, 4096, 100, 1, 1, 10, 10, 10, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda _: usage)
    with pytest.raises(NoSpaceError, match="bytes are needed"):
        subset(shared_store.root, tmp_path / "small", layers="final")
    assert not (tmp_path / "small").exists(), "nothing is begun"
    monkeypatch.undo()
    assert subset(shared_store.root, tmp_path / "small", layers="final").n_samples == 20


def test_a_subset_of_a_subset_can_grow(shared_store: Store, samples: list[Sample], tmp_path: Path) -> None:
    """It is a store like any other: source indexes stay the lines of the first input."""
    subset(shared_store.root, tmp_path / "a", samples="2-9")
    subset(tmp_path / "a", tmp_path / "b", samples="4-5")
    assert_holds(tmp_path / "b", samples, [4, 5], ("after_2", "after_3", "final"))
    assert StoreWriter.open(tmp_path / "b").next_source_index() == 20


def test_the_command_prints_what_it_made(shared_store: Store, tmp_path: Path) -> None:
    outcome = command("subset", shared_store.root, tmp_path / "small", "--layers", "after_2", "--quiet")
    assert outcome.code == 0
    assert "samples   20 (0 failed)" in outcome.output
    again = command("subset", shared_store.root, tmp_path / "small", "--layers", "after_2", "--json")
    assert json.loads(again.output)["n_samples"] == 20
    assert command("subset", shared_store.root, tmp_path / "x", "--layers", "after_9").code == 2
    assert command("subset", tmp_path / "none", tmp_path / "x", "--layers", "final").code == 10
