"""Store → export → import gives the same bits; foreign directories give the values that were written into them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from extractor.foreign.record import NAME
from hsstore.cli import run
from hsstore.store import Store
from hsstore.verify import Verifier
from tests.extractor.foreign import data

# pyarrow and datasets pull in extensions made with an old SWIG; nothing of ours.
pytestmark = pytest.mark.filterwarnings("ignore:builtin type .* has no __module__ attribute:DeprecationWarning")


@pytest.mark.parametrize(("target", "norm"), data.CASES)
def test_export_and_import_give_the_same_bits(tmp_path: Path, target: str, norm: str) -> None:
    """Ids, masks and every state, and the capture: layers, norm, model."""
    samples = data.make_samples()
    with data.make_store(tmp_path / "a", norm, samples) as store:
        capture = store.capture
    assert run(["export", target, str(tmp_path / "a"), "--out", str(tmp_path / "x")]) == 0
    assert run(["import", target, str(tmp_path / "x"), "--out", str(tmp_path / "b")]) == 0
    with Store.open(tmp_path / "b") as back:
        data.assert_same(back, samples)
        assert (back.capture.norm, back.capture.model) == (norm, capture.model)
        assert back.capture.weights_sha256 == capture.weights_sha256
        assert back.capture.flags["import"] == target
    verifier = Verifier(tmp_path / "b", "full")
    assert not [f for f in verifier.findings() if f.severity == "damage"]


@pytest.mark.parametrize(("target", "norm"), data.CASES)
def test_an_export_is_read_without_its_record_too(tmp_path: Path, target: str, norm: str) -> None:
    """What the files hold is enough, once the model and, where no default is safe, the layers are said."""
    samples = data.make_samples()
    data.make_store(tmp_path / "a", norm, samples).close()
    assert run(["export", target, str(tmp_path / "a"), "--out", str(tmp_path / "x")]) == 0
    (tmp_path / "x" / NAME).unlink()
    arguments = ["import", target, str(tmp_path / "x"), "--out", str(tmp_path / "b"), *data.MODEL]
    assert run([*arguments, "--layers", "2,4,5"]) == 0
    with Store.open(tmp_path / "b") as back:
        data.assert_same(back, samples)
        assert back.capture.norm == norm


def test_specforge_files_as_its_program_writes_them(tmp_path: Path) -> None:
    """By default they are after 2, n/2 and n − 3 layers, and after the norm."""
    samples = data.make_samples()
    data.write_specforge(tmp_path / "x", samples)
    assert run(["import", "specforge", str(tmp_path / "x"), "--out", str(tmp_path / "b"), *data.MODEL]) == 0
    with Store.open(tmp_path / "b") as back:
        data.assert_same(back, samples, ("after_2", "after_4", "after_5", "final"))
        assert back.capture.norm == "post"


def test_packed_specforge_files(tmp_path: Path) -> None:
    samples = data.make_samples()
    data.write_specforge(tmp_path / "x", samples, packed=True)
    assert run(["import", "specforge", str(tmp_path / "x"), "--out", str(tmp_path / "b"), *data.MODEL]) == 0
    with Store.open(tmp_path / "b") as back:
        data.assert_same(back, samples)


def test_packed_export_is_what_gunzip_of_the_plain_one_is(tmp_path: Path) -> None:
    import gzip

    samples = data.make_samples()
    data.make_store(tmp_path / "a", "post", samples).close()
    for name, options in (("plain", []), ("packed", ["--gzip"])):
        assert run(["export", "specforge", str(tmp_path / "a"), "--out", str(tmp_path / name), *options]) == 0
    plain = sorted((tmp_path / "plain").rglob("*.ckpt"))
    packed = sorted((tmp_path / "packed").rglob("*.ckpt.gz"))
    assert [p.name for p in plain] == [p.name.removesuffix(".gz") for p in packed]
    assert len(plain) == len(samples)
    for a, b in zip(plain, packed, strict=True):
        with gzip.open(b) as file:
            left, right = torch.load(a, weights_only=True), torch.load(file, weights_only=True)
        assert left.keys() == right.keys()
        assert all(torch.equal(left[k], right[k]) for k in left)


def test_speculators_0_4_files_are_one_layer_later(tmp_path: Path) -> None:
    """Its worker captured outputs of the ids [2, n/2, n−3, n−1]; `speculators` finds the older format by itself."""
    samples = data.make_samples()
    data.write_speculators_pt(tmp_path / "x", samples)
    assert run(["import", "speculators", str(tmp_path / "x"), "--out", str(tmp_path / "b"), *data.MODEL]) == 0
    with Store.open(tmp_path / "b") as back:
        data.assert_same(back, samples, ("after_3", "after_5", "after_6", "final"))
        assert back.capture.norm == "pre"
        assert back.capture.flags["import"] == "speculators-0.4"


def test_speculators_0_4_takes_the_layers_that_its_config_records(tmp_path: Path) -> None:
    samples = data.make_samples()
    data.write_speculators_pt(tmp_path / "x", samples)
    config = {"hidden_states": {"layer_ids": [1, 3, 4, 7]}, "speculators_version": "0.4.0"}
    (tmp_path / "x" / "data_config.json").write_text(json.dumps(config))
    assert run(["import", "speculators", str(tmp_path / "x"), "--out", str(tmp_path / "b"), *data.MODEL]) == 0
    with Store.open(tmp_path / "b") as back:
        data.assert_same(back, samples, ("after_2", "after_4", "after_5", "final"))
        assert back.capture.engine_version == "0.4.0"
        assert back.capture.flags["import.layers"] == "recorded in data_config.json"


@pytest.mark.parametrize("prenorm", [False, True])
def test_torchspec_files_as_its_program_writes_them(tmp_path: Path, prenorm: bool) -> None:
    """The norm is what dataset.json records; names, order and extra fields of the manifest do not matter."""
    samples = data.make_samples()
    data.write_torchspec(tmp_path / "x", samples, prenorm=prenorm)
    layers = ["--layer-ids", "1,3,4"] if prenorm else []
    assert run(["import", "torchspec", str(tmp_path / "x"), "--out", str(tmp_path / "b"), *data.MODEL, *layers]) == 0
    with Store.open(tmp_path / "b") as back:
        data.assert_same(back, samples)
        assert back.capture.norm == ("pre" if prenorm else "post")


@pytest.mark.parametrize("prenorm", [False, True])
def test_modelopt_files_as_its_programs_write_them(tmp_path: Path, prenorm: bool) -> None:
    samples = data.make_samples()
    data.write_modelopt(tmp_path / "x", samples, prenorm=prenorm)
    layers = ["--layers", "2,4,5"] if prenorm else []
    assert run(["import", "modelopt", str(tmp_path / "x"), "--out", str(tmp_path / "b"), *data.MODEL, *layers]) == 0
    with Store.open(tmp_path / "b") as back:
        data.assert_same(back, samples)
        assert back.capture.norm == ("pre" if prenorm else "post")


def test_files_come_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    """data_10 after data_2: source_index follows the numbers, not the spelling."""
    samples = data.make_samples([3] * 12)
    data.write_specforge(tmp_path / "x", samples)
    assert run(["import", "specforge", str(tmp_path / "x"), "--out", str(tmp_path / "b"), *data.MODEL]) == 0
    with Store.open(tmp_path / "b") as back:
        data.assert_same(back, samples)


def test_split_and_limit_choose_what_is_exported(tmp_path: Path) -> None:
    """Both sides together are all of it, and TorchSpec's own split follows the store's."""
    samples = data.make_samples([4 + i % 5 for i in range(30)])
    data.make_store(tmp_path / "a", "post", samples).close()
    names = {}
    for split in ("all", "train", "validation"):
        out = tmp_path / split
        assert run(["export", "torchspec", str(tmp_path / "a"), "--out", str(out), "--split", split]) == 0
        rows = [json.loads(line) for line in (out / "manifest.jsonl").read_text().splitlines()]
        names[split] = {(row["data_id"], row["split"]) for row in rows}
    assert names["all"] == names["train"] | names["validation"]
    assert {side for _, side in names["train"]} == {"train"}
    assert {side for _, side in names["validation"]} == {"eval"}
    assert run(["export", "torchspec", str(tmp_path / "a"), "--out", str(tmp_path / "few"), "--limit", "7"]) == 0
    assert len(list((tmp_path / "few" / "samples").iterdir())) == 7
