"""The same model in other files is the same model; what cannot be computed alike is not compared."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from extractor.foreign import finalnorm
from extractor.states import norm
from extractor.states.sample import Checked
from tests.extractor.states import planted
from tests.extractor.states.conftest import Verify
from tests.extractor.states.planted import Truth, capture, write
from tests.extractor.tiny import write_tiny_model

LAYERS = ("after_0", "after_5", "final")
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("files") / "tiny")


@pytest.fixture(scope="module")
def store(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model, rng = planted.load(tiny), np.random.default_rng(3)
    ids = [rng.integers(0, 256, n).astype(np.int32) for n in (60, 40, 33)]
    samples: list[Truth] = [planted.truth(model, i, np.ones(len(i), np.uint8)) for i in ids]
    return write(tmp_path_factory.mktemp("store") / "s", samples, capture(tiny, layers=LAYERS))


def as_float32(model: Path) -> None:
    tensors = {name: tensor.float() for name, tensor in load_file(model / WEIGHTS).items()}
    save_file(tensors, model / WEIGHTS, metadata={"format": "pt"})


def as_bin(model: Path) -> None:
    torch.save(load_file(model / WEIGHTS), model / "pytorch_model.bin")
    (model / WEIGHTS).unlink()


def in_shards(model: Path) -> None:
    tensors = load_file(model / WEIGHTS)
    (model / WEIGHTS).unlink()
    places = {}
    for i, names in enumerate((sorted(tensors)[::2], sorted(tensors)[1::2])):
        places |= dict.fromkeys(names, f"part-{i}.safetensors")
        save_file({n: tensors[n] for n in names}, model / f"part-{i}.safetensors", metadata={"format": "pt"})
    (model / f"{WEIGHTS}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


def without_tokenizer(model: Path) -> None:
    for file in model.glob("tokenizer*"):
        file.unlink()


def with_another_config(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "transformers_version": "0"}))


@pytest.mark.parametrize("change", [as_float32, as_bin, in_shards, without_tokenizer, with_another_config])
def test_the_same_model_in_other_files(
    tiny: Path, store: Path, tmp_path: Path, verify: Verify, change: Callable[[Path], None]
) -> None:
    """A note says what differs; the forward says that it does not matter."""
    other = Path(shutil.copytree(tiny, tmp_path / "m"))
    change(other)
    found = verify(store, other)
    assert (found.code, found.damage()) == (0, {})
    assert "digest: " in found.notes()


def test_config_json_written_again_is_equal(tiny: Path, store: Path, tmp_path: Path, verify: Verify) -> None:
    """Its spacing is no part of it."""
    other = Path(shutil.copytree(tiny, tmp_path / "m"))
    (other / "config.json").write_text(json.dumps(json.loads((other / "config.json").read_text())))
    found = verify(store, other, "--head-only")
    assert "config.json" in found.summary["equal_digests"]


def test_without_a_forward_other_weights_stay_damage(tiny: Path, store: Path, tmp_path: Path, verify: Verify) -> None:
    other = Path(shutil.copytree(tiny, tmp_path / "m"))
    as_float32(other)
    assert set(verify(store, other, "--head-only").damage()) == {"weights"}


def test_quantised_weights_get_no_forward(tiny: Path, store: Path, tmp_path: Path, verify: Verify) -> None:
    """Neither their memory nor their numbers are those of float32."""
    other = Path(shutil.copytree(tiny, tmp_path / "m"))
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "fp8"}}))
    assert "forward: its weights are quantised (fp8)" in verify(store, other).notes()


def test_states_as_small_as_epsilon_have_no_length_to_judge(tiny: Path, tmp_path: Path, verify: Verify) -> None:
    other = Path(shutil.copytree(tiny, tmp_path / "m"))
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1.0}))
    ids = np.random.default_rng(0).integers(0, 256, 50).astype(np.int32)
    sample = planted.truth(planted.load(other), ids, np.ones(50, np.uint8))
    found = verify(write(tmp_path / "s", [sample], capture(other, layers=LAYERS)), other, "--head-only")
    assert (found.damage(), found.summary["norm"]) == ({}, None)


def test_unreadable_samples_alone_name_the_next_command(
    tiny: Path, store: Path, tmp_path: Path, verify: Verify
) -> None:
    broken = Path(shutil.copytree(store, tmp_path / "s"))
    file = broken / "arrays.zarr/hidden/after_5/c/0/0"
    file.write_bytes(file.read_bytes()[:4000])
    found = verify(broken, tiny)
    assert (found.code, set(found.damage())) == (3, {"read"})
    assert "--full` says what is damaged" in found.err


@pytest.mark.parametrize("one_plus", [False, True])
def test_a_weight_read_under_the_other_convention_is_no_damage(one_plus: bool) -> None:
    """Of rows after the norm; rows before it are refused under either."""
    random = torch.Generator().manual_seed(0)
    weight = 0.5 + torch.rand(64, generator=random)
    true = 1 + weight if one_plus else weight
    rows = torch.randn(40, 64, generator=random)
    after = finalnorm.FinalNorm(weight=true, epsilon=1e-6, one_plus=one_plus).apply(planted.patterns(rows))
    misread = finalnorm.FinalNorm(weight=weight if one_plus else 1 + weight, epsilon=1e-6, one_plus=not one_plus)
    for states, kinds in ((after, []), (planted.patterns(7 * rows), ["norm"])):
        ids, mask = np.zeros(40, np.int32), np.ones(40, np.uint8)
        sample = Checked(source_index=0, input_ids=ids, loss_mask=mask, states={"final": states})
        lengths = norm.measure([sample], misread)
        assert lengths is not None
        assert [f.kind for f in norm.judge(lengths, "post")] == kinds
