"""A store written by the first release. It must open, verify and give these bytes for ever."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

from hsstore import gather
from hsstore.plan import Plan, PlanParameters
from hsstore.store import Store
from hsstore.verify import Verifier
from hsstore.writer import StoreWriter
from tests.models import ROOT
from tests.stores import make_samples

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
