"""A store that is grown, quarantined and redone holds each sample once, and no file name twice."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from hsstore import durable, garbage, growth, manifest, paths
from hsstore.errors import ConflictError, NotFoundError, UsageError
from hsstore.quarantine import quarantine, release, shard_of
from hsstore.records import InputSummary, SampleEntry
from hsstore.store import Store
from hsstore.verify import Verifier
from hsstore.writer import StoreWriter
from tests.stores import Sample, create, input_summary, make_samples

FIRST, MORE = make_samples([60, 20, 50, 40, 30], seed=1), make_samples([25, 64, 10], seed=2)


def summary(name: str, n: int) -> InputSummary:
    return dataclasses.replace(input_summary(n), name=name, sha256=name.ljust(64, "0"))


INPUTS = {"first": FIRST, "more": MORE}


def fill(root: Path, name: str, *, append: bool = False) -> None:
    """What an extractor does for one input: open, place, stage, commit."""
    samples = INPUTS[name]
    entries = [s.entry for s in samples]
    writer, number, placed = growth.open_input(root, entries, summary(name, len(samples)), append=append)
    offset = writer.layouts[number].offset
    for shard in [n for n in writer.todo() if n in placed]:
        by_index = {s.entry.source_index + offset: s for s in samples}
        tokens = {
            e.source_index: (by_index[e.source_index].input_ids, by_index[e.source_index].loss_mask)
            for e in placed[shard]
        }
        staged = writer.stage(shard, placed[shard], tokens)
        for state, path in staged.files.items():
            with open(path, "r+b") as file:
                for e in placed[shard]:
                    rows = by_index[e.source_index].states[state]
                    file.seek(e.row * rows.shape[1] * 2)
                    file.write(rows.tobytes())
        assert staged.commit() is not None
    writer.finish()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    entries = [s.entry for s in FIRST]
    first = create(tmp_path / "s", FIRST, shard_rows=64)
    first_summary = dataclasses.replace(first.layout.input, sha256=summary("first", 5).sha256)
    assert len(entries) == first_summary.lines
    (tmp_path / "s" / "layouts" / "000000.json").unlink()
    record = dataclasses.replace(first.layout, input=summary("first", 5))
    from hsstore.records import canonical, sealed

    durable.write_new(tmp_path / "s" / "layouts" / "000000.json", canonical(sealed(record)))
    fill(tmp_path / "s", "first")
    return tmp_path / "s"


def check(root: Path, *inputs: str) -> Store:
    """Every sample of the inputs once, with its bytes; verify has nothing to say."""
    assert [str(f) for f in Verifier(root, "full").findings() if f.severity == "damage"] == []
    store = Store.open(root)
    expected = [s for name in inputs for s in INPUTS[name]]
    assert store.index.source_index.tolist() == list(range(len(expected)))
    for i, sample in enumerate(expected):
        np.testing.assert_array_equal(store.input_ids(i), sample.input_ids)
        np.testing.assert_array_equal(store.hidden(i, "final"), sample.states["final"])
    return store


def files(root: Path) -> dict[Path, bytes]:
    data = [*(root / "arrays.zarr").rglob("[0-9]*"), *(root / "records").iterdir(), *(root / "layouts").iterdir()]
    return {p: p.read_bytes() for p in data if p.is_file()}


def test_growth_adds_shards_and_changes_none(root: Path) -> None:
    before, old = files(root), check(root, "first")
    fill(root, "more", append=True)
    grown = check(root, "first", "more")
    assert {p: files(root)[p] for p in before} == before
    assert grown.manifest_id != old.manifest_id
    assert (root / "manifests" / f"{old.manifest_id}.json").is_file()
    import zarr

    rows = zarr.open_group(root / "arrays.zarr", mode="r")["tokens/input_ids"]
    assert rows.shape[0] == 64 * sum(len(x.shards) for x in manifest.load_layouts(root, grown.header))
    fill(root, "more", append=True)  # once more: found, not added
    fill(root, "first")
    assert check(root, "first", "more").manifest_id == grown.manifest_id


def test_an_unknown_input_is_refused_without_append(root: Path) -> None:
    with pytest.raises(ConflictError, match="--append"):
        fill(root, "more")
    assert len(list((root / "layouts").iterdir())) == 1


def test_growth_killed_before_the_zarr_documents_is_a_note_and_is_finished(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layout is the commit of growth; the shape in zarr.json follows, by whoever opens for writing."""
    monkeypatch.setattr(StoreWriter, "_write_zarr_documents", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
    writer = StoreWriter(root, *_loaded(root))
    with pytest.raises(KeyboardInterrupt):
        growth.grow(writer, [s.entry for s in MORE], summary("more", 3))
    monkeypatch.undo()
    found = list(Verifier(root, "full").findings())
    assert {f.severity for f in found} == {"note"}
    assert any(f.kind == "stale" and f.file.endswith("zarr.json") for f in found)
    check(root, "first")
    fill(root, "more", append=True)
    check(root, "first", "more")


def _loaded(root: Path):
    header = manifest.load_header(root)
    return header, manifest.load_layouts(root, header), manifest.load_tombstones(root, header)


def test_of_two_who_grow_at_once_both_get_their_own_shards(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second sees the name taken, opens again and goes behind the first."""
    INPUTS["third"] = make_samples([33, 12], seed=3)
    real = durable.write_new
    raced = []

    def raced_write(path: Path, data: bytes) -> bool:
        if path.parent.name == "layouts" and not raced:
            raced.append(path)
            fill(root, "third", append=True)
        return real(path, data)

    monkeypatch.setattr(durable, "write_new", raced_write)
    fill(root, "more", append=True)
    assert raced
    check(root, "first", "third", "more")


def test_what_is_quarantined_is_out_of_use_and_redone_under_a_new_number(root: Path) -> None:
    whole = check(root, "first")
    shard = shard_of(root, 2)
    quarantine(root, shard, "rows 3 to 9 of after_2 are bad")
    assert quarantine(root, shard, "again").reason == "rows 3 to 9 of after_2 are bad"
    lost = [s.source_index for s in whole.record(shard).samples]
    with Store.open(root) as store:
        assert set(store.index.source_index.tolist()) == set(range(5)) - set(lost)
        assert store.manifest_id != whole.manifest_id
    before = files(root)
    path = root / "arrays.zarr" / "hidden" / "final" / "c" / str(shard) / "0"
    path.chmod(0o644)
    path.write_bytes(b"damaged")
    (root / "records" / f"{shard:06d}.json").write_bytes(b"{")
    assert {f.severity for f in Verifier(root, "full").findings()} == {"note"}
    fill(root, "first")
    check(root, "first")
    assert manifest.load_layouts(root, whole.header)[1].samples == tuple(sorted(lost))
    changed = {p for p, data in files(root).items() if p in before and before[p] != data}
    assert changed == {path, root / "records" / f"{shard:06d}.json"}, "no name is used twice"
    garbage.remove(garbage.find(root, quarantined=True))
    assert not path.exists()
    check(root, "first")


def test_a_redone_shard_may_be_quarantined_too(root: Path) -> None:
    for _ in range(3):
        quarantine(root, shard_of(root, 2), "again")
        # the tombstoned record still exists: the newest is what counts
        with Store.open(root) as store:
            assert 2 not in store.index.source_index.tolist()
        fill(root, "first")
        with Store.open(root) as store:
            shard = int(store.index.shard[store.index.find("2")])
        check(root, "first")
        quarantine(root, shard, "and its redo")
        fill(root, "first")
        check(root, "first")


def test_release_takes_back_what_was_not_redone(root: Path) -> None:
    whole = check(root, "first")
    shard = shard_of(root, 0)
    with pytest.raises(UsageError, match="not quarantined"):
        release(root, shard, "")
    quarantine(root, shard, "by mistake")
    release(root, shard, "it was the cable")
    assert check(root, "first").manifest_id == whole.manifest_id
    quarantine(root, shard, "after all")
    fill(root, "first")
    with pytest.raises(ConflictError, match="placed again"):
        release(root, shard, "")


def test_quarantine_refuses_what_it_cannot_mean(root: Path) -> None:
    with pytest.raises(NotFoundError, match="no shard 99"):
        quarantine(root, 99, "x")
    with pytest.raises(UsageError, match="reason"):
        quarantine(root, 0, "  ")
    with pytest.raises(NotFoundError, match="holds sample 77"):
        shard_of(root, 77)


def test_a_damaged_tombstone_is_not_overlooked(root: Path) -> None:
    """Whether its shard may be used is then not known; reading on could use what must not be used."""
    quarantine(root, 1, "bad")
    path = root / "tombstones" / "000001.0.json"
    path.chmod(0o644)
    path.write_bytes(path.read_bytes().replace(b"bad", b"odd"))
    assert [f.kind for f in Verifier(root).findings() if f.severity == "damage"] == ["tombstone"]
    from hsstore.errors import DamagedError

    with pytest.raises(DamagedError, match="tombstones"):
        Store.open(root)


def test_a_missing_layout_is_damage(root: Path) -> None:
    fill(root, "more", append=True)
    (root / "layouts" / "000000.json").unlink()
    assert any(f.kind == "layout" for f in Verifier(root).findings() if f.severity == "damage")
    with pytest.raises(Exception, match="layout"):
        StoreWriter.open(root)


def test_entries_of_growth_must_come_behind(root: Path) -> None:
    writer = StoreWriter.open(root)
    with pytest.raises(UsageError, match="must begin at 5"):
        writer.add_layout([SampleEntry("0" * 32, 3, 0, 5)], summary("x", 1))
    assert writer.next_source_index() == 5
    assert isinstance(paths.numbered(1), str)


def samples_of(name: str) -> list[Sample]:
    return INPUTS[name]


def test_failed_samples_are_placed_again_on_request(root: Path) -> None:
    """Only then, once at a time, and what has states by then counts; the manifest counts each sample once."""
    shard = shard_of(root, 2)
    quarantine(root, shard, "to be done again")
    fill_with_failures(root, {2})
    with Store.open(root) as store:
        assert (store.totals.n_samples, store.totals.n_failed) == (4, 1)
    layouts = len(list((root / "layouts").iterdir()))
    fill(root, "first")
    assert len(list((root / "layouts").iterdir())) == layouts
    for failing in ({2}, set()):
        entries = [s.entry for s in FIRST]
        writer, _, placed = growth.open_input(root, entries, summary("first", 5), retry_failed=True)
        assert [[e.source_index for e in placed[n]] for n in writer.todo()] == [[2]]
        again, _, same = growth.open_input(root, entries, summary("first", 5), retry_failed=True)
        assert (again.todo(), same) == (writer.todo(), placed)  # it is on its way already
        fill_with_failures(root, failing)
        compiled = manifest.load(root)
        assert (compiled.n_samples, compiled.n_failed) == (5 - len(failing), len(failing))
    check(root, "first")
    writer, _, _ = growth.open_input(root, [s.entry for s in FIRST], summary("first", 5), retry_failed=True)
    assert writer.todo() == []


def fill_with_failures(root: Path, failing: set[int]) -> None:
    """Do what is left of the first input; those samples get no states."""
    real = StoreWriter.stage

    def stage(self: StoreWriter, shard: int, entries: object, tokens: object):
        staged = real(self, shard, entries, tokens)  # type: ignore[arg-type]
        for i in failing & set(tokens):  # type: ignore[call-overload]
            staged.fail(i, "engine")
        return staged

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StoreWriter, "stage", stage)
        fill(root, "first")
