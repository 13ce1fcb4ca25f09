"""The format of speculators 0.5 and later against the package itself: its rows, its checks, its dataset class."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from hsstore.cli import run
from hsstore.store import Store
from tests import stores
from tests.extractor.foreign import data

pytestmark = pytest.mark.filterwarnings("ignore:builtin type .* has no __module__ attribute:DeprecationWarning")


@pytest.fixture(scope="module")
def speculators() -> Any:
    """The package's own modules."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import datasets
        from speculators.data_generation import offline, preprocessing
        from speculators.train import data as train_data

    datasets.disable_progress_bars()

    return {"offline": offline, "preprocessing": preprocessing, "data": train_data, "datasets": datasets}


def write(speculators: Any, root: Path, samples: Sequence[stores.Sample]) -> None:
    """A directory by its own code: rows as prepare-data passes them through, files as the vLLM connector saves them."""
    given = {
        "input_ids": [s.input_ids.tolist() for s in samples],
        "loss_mask": [s.loss_mask.tolist() for s in samples],
    }
    rows = speculators["preprocessing"]._passthrough_pretokenized(given, max_length=4096)
    assert len(rows["input_ids"]) == len(samples)
    dataset = speculators["datasets"].Dataset.from_dict(rows)
    dataset.set_format(type="torch")
    dataset.save_to_disk(str(root))
    (root / "hidden_states").mkdir()
    for i, sample in enumerate(samples):
        states = torch.stack([data.bf16(sample.states[name]) for name in data.LAYERS], dim=1)
        path = root / "hidden_states" / f"hs_{i}.safetensors"
        save_file({"hidden_states": states, "token_ids": data.long(sample.input_ids)}, path)


def trained(samples: Sequence[stores.Sample]) -> list[stores.Sample]:
    """Its preprocessing drops rows without a trained token."""
    return [s for s in samples if s.loss_mask.any()]


def read(speculators: Any, root: Path) -> list[dict[str, torch.Tensor]]:
    """What its own training dataset gives."""
    dataset = speculators["data"].ArrowDataset(max_len=4096, datapath=root, on_missing="raise")
    return [dataset[i] for i in range(len(dataset))]


def assert_items(items: list[dict[str, torch.Tensor]], samples: Sequence[stores.Sample]) -> None:
    assert len(items) == len(samples) > 3
    for item, sample in zip(items, samples, strict=True):
        assert torch.equal(item["hidden_states"].view(torch.int16), data.wide(sample).view(torch.int16))
        final = data.bf16(sample.states["final"])
        assert torch.equal(item["verifier_last_hidden_states"].view(torch.int16), final.view(torch.int16))
        np.testing.assert_array_equal(item["input_ids"].numpy(), sample.input_ids)
        np.testing.assert_array_equal(item["loss_mask"].numpy(), sample.loss_mask)


def test_its_directory_gives_the_values_its_own_dataset_gives(speculators: Any, tmp_path: Path) -> None:
    samples = trained(data.make_samples([12, 40, 9, 33, 70]))
    write(speculators, tmp_path / "x", samples)
    assert_items(read(speculators, tmp_path / "x"), samples)
    assert run(["import", "speculators", str(tmp_path / "x"), "--out", str(tmp_path / "b"), *data.MODEL]) == 0
    with Store.open(tmp_path / "b") as store:
        data.assert_same(store, samples, ("after_2", "after_4", "after_5", "final"))
        assert store.capture.norm == "pre"


def test_its_own_dataset_reads_our_export(speculators: Any, tmp_path: Path) -> None:
    """Tensors equal, files pass its checks, and rows have the types of rows that it makes."""
    samples = trained(data.make_samples([12, 40, 9, 33, 70]))
    data.make_store(tmp_path / "a", "pre", samples).close()
    assert run(["export", "speculators", str(tmp_path / "a"), "--out", str(tmp_path / "x")]) == 0
    assert_items(read(speculators, tmp_path / "x"), samples)
    states = tmp_path / "x" / "hidden_states"
    offline = speculators["offline"]
    indices = offline.get_existing_hidden_state_indices(states)
    assert indices == list(range(len(samples)))
    assert offline.find_corrupt_hidden_state_indices(states, indices) == {}
    from safetensors.torch import load_file

    for i, sample in enumerate(samples):
        offline.check_hidden_states(load_file(states / f"hs_{i}.safetensors"), sample.input_ids.tolist())
    write(speculators, tmp_path / "theirs", samples)
    load = speculators["datasets"].load_from_disk
    ours, theirs = load(str(tmp_path / "x")), load(str(tmp_path / "theirs"))
    assert ours.features == theirs.features
    assert ours.format["type"] == theirs.format["type"] == "torch"
    assert ours["seq_len"][:].tolist() == theirs["seq_len"][:].tolist()


def test_rows_and_files_that_do_not_meet_are_named(speculators: Any, tmp_path: Path) -> None:
    """A row without a file, a file without a row, other ids, a lock left behind, a NaN: counted, the rest imported."""
    samples = trained(data.make_samples([12, 40, 9, 33, 70, 21]))
    root = tmp_path / "x"
    write(speculators, root, samples)
    states = root / "hidden_states"
    (states / "hs_1.safetensors").rename(states / "hs_99.safetensors")
    sample = samples[2]
    wrong = data.long(sample.input_ids)
    wrong[3] += 1
    stacked = torch.stack([data.bf16(sample.states[name]) for name in data.LAYERS], dim=1)
    save_file({"hidden_states": stacked, "token_ids": wrong}, states / "hs_2.safetensors")
    (states / "hs_3.safetensors.lock").touch()
    stacked = torch.stack([data.bf16(samples[4].states[name]) for name in data.LAYERS], dim=1)
    stacked[5, 1, 2] = float("nan")
    save_file({"hidden_states": stacked, "token_ids": data.long(samples[4].input_ids)}, states / "hs_4.safetensors")
    out = tmp_path / "b"
    assert run(["import", "speculators", str(root), "--out", str(out), *data.MODEL]) == 4
    with Store.open(out) as store:
        usable = [i for i in range(len(store.index)) if not int(store.index.flags[i])]
        assert [int(store.index.source_index[i]) for i in usable] == [0, 5]
    listed = data.failures(out)
    assert {row["file"]: (row["status"], row["reason"]) for row in listed} == {
        "hs_1.safetensors": ("skipped", "no_states"),
        "hs_2.safetensors": ("skipped", "ids_differ"),
        "hs_3.safetensors": ("skipped", "damaged"),
        "hs_4.safetensors": ("failed", "not_finite"),
        "hs_99.safetensors": ("skipped", "no_row"),
    }


def test_no_cut_of_a_file_gives_anything_but_a_reason(speculators: Any, tmp_path: Path) -> None:
    """Files with states and the dataset itself, cut and with random bytes: a reason or a sentence.

    pyarrow follows list offsets that lead out of the file, and the process dies; they are validated first.
    """
    samples = trained(data.make_samples([12, 40, 9, 33]))
    root = tmp_path / "x"
    write(speculators, root, samples)
    rng = np.random.default_rng(0)
    states = root / "hidden_states" / "hs_1.safetensors"
    body = states.read_bytes()
    arguments = ["import", "speculators", str(root), *data.MODEL, "--quiet", "--out"]
    for i, cut in enumerate([0, 1, 7, 8, 9, 100, len(body) - 1, *rng.integers(10, len(body), 5).tolist()]):
        states.write_bytes(body[:cut])
        assert run([*arguments, str(tmp_path / f"cut-{i}")]) == 4
        assert [r["reason"] for r in data.failures(tmp_path / f"cut-{i}")] == ["damaged"]
    states.write_bytes(body)
    (arrow,) = root.glob("*.arrow")
    whole, codes = arrow.read_bytes(), set()
    for i, cut in enumerate([0, 1, 50, len(whole) // 2, len(whole) - 1]):
        arrow.write_bytes(whole[:cut])
        codes.add(run([*arguments, str(tmp_path / f"arrow-{i}")]))
    for i in range(20):
        noisy = bytearray(whole)
        for at in rng.integers(0, len(whole), 4).tolist():
            noisy[at] ^= int(rng.integers(1, 256))
        arrow.write_bytes(bytes(noisy))
        codes.add(run([*arguments, str(tmp_path / f"noisy-{i}")]))
    assert codes <= {0, 2, 4}
    assert 2 in codes


@pytest.mark.timeout(120)
def test_a_fifo_in_the_dataset_or_among_its_files_keeps_nobody_waiting(speculators: Any, tmp_path: Path) -> None:
    write(speculators, tmp_path / "x", data.make_samples([5, 6]))
    states = tmp_path / "x/hidden_states/hs_1.safetensors"
    states.unlink()
    os.mkfifo(states)
    command = ["import", "speculators", str(tmp_path / "x"), *data.MODEL]
    assert run([*command, "--out", str(tmp_path / "b")]) == 4
    assert [f["reason"] for f in data.failures(tmp_path / "b")] == ["no_plain_file"]
    (tmp_path / "x/state.json").unlink()
    os.mkfifo(tmp_path / "x/state.json")
    assert run([*command, "--out", str(tmp_path / "c")]) == 2
