"""A store written by the first release. It must open, verify and give these bytes for ever."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import msgspec
import pytest

from hsstore import gather
from hsstore.errors import ConflictError, FormatError
from hsstore.plan import Plan, PlanParameters
from hsstore.records import canonical, sha256_hex
from hsstore.store import Store
from hsstore.verify import Verifier
from hsstore.writer import StoreWriter
from tests.models import ROOT
from tests.stores import Sample, make_samples

FORMAT_1 = ROOT / "tests/data/format-1"
MANIFEST_ID = "5b357ffce35cc98d70d5f03f97496f020d288488872a05d4078b9abc80b1b7a1"
PLAN_ID = "47f87a16718cfdf5dbc714c0c2d62aa2b9f0a2899518663e6dda83f81d5e872c"
BATCH_SHA256 = "55b366de7cfc9f6baaade31edc829d7af3189fe9c5c2a652b3bfdc467198a60a"


def test_it_verifies() -> None:
    verifier = Verifier(FORMAT_1, "full")
    assert list(verifier.findings()) == []
    assert verifier.summary.manifest_id == MANIFEST_ID
    assert (verifier.summary.shards, verifier.summary.samples) == (2, 7)


def test_it_reads() -> None:
    store = Store.open(FORMAT_1)
    samples = make_samples([5, 30, 2, 17, 9, 33, 1, 12], seed=1, hidden_size=4, layers=("after_2", "after_4", "final"))
    for s in samples:
        i = store.index.find(s.entry.uid)
        assert store.input_ids(i).tolist() == s.input_ids.tolist()
        failed = s.entry.source_index == 4
        assert bool(store.index.flags[i]) == failed
        for state, rows in s.states.items():
            assert store.hidden(i, state).tolist() == (rows * (not failed)).tolist()


def test_its_batches_have_the_same_bytes() -> None:
    store = Store.open(FORMAT_1)
    parameters = PlanParameters(max_seq_len=40, split="all")
    plan = Plan(store.index, store.header.split, store.manifest_id, parameters)
    body = b"".join(gather.BatchView(store, plan, 0, 1).pieces())
    assert plan.plan_id == PLAN_ID
    assert hashlib.sha256(body).hexdigest() == BATCH_SHA256


def test_it_opens_for_writing_in_a_copy_without_its_empty_directories(tmp_path: Path) -> None:
    """git, like some copy tools, keeps no empty directory."""
    shutil.copytree(FORMAT_1, tmp_path / "copy")
    writer = StoreWriter.open(tmp_path / "copy")
    assert writer.todo() == []
    assert writer.abandoned() == []
    assert writer.finish() == MANIFEST_ID


GROWN = ROOT / "tests/data/format-1-grown"
GROWN_ID = "956cad91d413639aea057a82b58b7e892b5e30427af72e43777ffe5cde95967b"
BEFORE_QUARANTINE_ID = "70b9562245de1ed323007146def70dee52aeb193ac0f77d81122a0fc3e9d450d"
FIRST_INPUT_ID = "f7480806e346c317dfd6254a3ce8c975e70877aaa81b325cc1c8163a5dc2b84a"


def grown_samples() -> dict[int, Sample]:
    """By source index: five of the first input, a line that gave none, three of the second."""
    options = {"hidden_size": 4, "layers": ("after_2", "final")}
    first, more = make_samples([5, 30, 2, 17, 9], seed=1, **options), make_samples([12, 3, 25], seed=2, **options)
    return {s.entry.source_index: s for s in first} | {s.entry.source_index + 6: s for s in more}


def test_a_grown_and_redone_store_verifies() -> None:
    """A second input, a shard quarantined, released, quarantined and redone: three layouts, three tombstones."""
    verifier = Verifier(GROWN, "full")
    assert [f.kind for f in verifier.findings()] == ["quarantined"]
    assert verifier.summary.manifest_id == GROWN_ID
    assert (verifier.summary.shards, verifier.summary.samples) == (4, 8)


def test_a_grown_and_redone_store_reads() -> None:
    store, samples = Store.open(GROWN), grown_samples()
    assert store.index.source_index.tolist() == sorted(samples)
    assert 0 not in store.index.shard.tolist()
    for i, index in enumerate(sorted(samples)):
        assert store.input_ids(i).tolist() == samples[index].input_ids.tolist()
        for state, rows in samples[index].states.items():
            assert store.hidden(i, state).tolist() == rows.tolist()


def test_its_earlier_states_can_be_pinned() -> None:
    assert len(Store.open(GROWN, manifest_id=FIRST_INPUT_ID).index) == 5
    assert len(Store.open(GROWN, manifest_id=BEFORE_QUARANTINE_ID).index) == 8
    with pytest.raises(ConflictError, match="another state"):
        Store.open(GROWN, manifest_id=MANIFEST_ID)


def test_it_can_be_grown_further_in_a_copy(tmp_path: Path) -> None:
    shutil.copytree(GROWN, tmp_path / "copy")
    writer = StoreWriter.open(tmp_path / "copy")
    assert (writer.todo(), sorted(writer.quarantined), writer.next_source_index()) == ([], [0], 10)
    assert writer.finish() == GROWN_ID


@pytest.mark.parametrize("number", [0, 2])
@pytest.mark.parametrize("document", ["store.json", "layouts/000000.json", "records/000001.json"])
def test_another_format_is_refused_both_ways(tmp_path: Path, document: str, number: int) -> None:
    """A reader of this format must not guess at an older or a newer one: it says which release to use."""
    shutil.copytree(FORMAT_1, tmp_path / "copy")
    path = tmp_path / "copy" / document
    fields = msgspec.json.decode(path.read_bytes()) | {"format": number, "self_sha256": ""}
    fields["self_sha256"] = sha256_hex(canonical(fields))
    path.chmod(0o644)
    path.write_bytes(canonical(fields))
    with pytest.raises(FormatError, match=f"format {number}; this hsstore reads format 1"):
        StoreWriter.open(tmp_path / "copy")
    if not document.startswith("layouts"):  # a reader needs no layouts
        with pytest.raises(FormatError, match=f"format {number}; this hsstore reads format 1"):
            Store.open(tmp_path / "copy").record(1)
