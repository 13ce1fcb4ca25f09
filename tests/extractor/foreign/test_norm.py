"""The side of the final norm: never changed silently, computed only when asked for, and then as transformers does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from extractor.verifier import read_verifier
from hsstore.cli import run
from hsstore.store import Store
from tests.extractor.foreign import data
from tests.extractor.tiny import HIDDEN

PRE = ("speculators", "speculators-0.4")


@pytest.mark.parametrize("target", PRE)
def test_states_after_the_norm_are_not_exported_as_before_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], target: str
) -> None:
    data.make_store(tmp_path / "a", "post", data.make_samples()).close()
    assert run(["export", target, str(tmp_path / "a"), "--out", str(tmp_path / "x")]) == 2
    assert "cannot be undone" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_states_before_the_norm_are_exported_after_it_only_when_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data.make_store(tmp_path / "a", "pre", data.make_samples()).close()
    export = ["export", "specforge", str(tmp_path / "a"), "--out", str(tmp_path / "x")]
    assert run(export) == 2
    assert "--apply-norm --model DIR" in capsys.readouterr().err
    assert run([*export, "--apply-norm"]) == 2
    assert not (tmp_path / "x").exists()


def test_the_norm_is_that_of_transformers(tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Bit-equal to LlamaRMSNorm in bfloat16 with the model's own weight; another model is refused."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    verifier = read_verifier(str(tiny_model))
    samples = data.make_samples([9, 30, 4], hidden=HIDDEN)
    for sample in samples:  # sizes that squares of are numbers
        rng = np.random.default_rng(len(sample.input_ids))
        rows = rng.standard_normal(sample.states["final"].shape).astype(np.float32) * 40
        sample.states["final"][:] = (rows.view(np.uint32) >> 16).astype(np.uint16)
        sample.input_ids[:] %= verifier.vocab_size
    root = tmp_path / "x"
    data.write_speculators_pt(root, samples)
    arguments = ["import", "speculators-0.4", str(root), "--out", str(tmp_path / "a")]
    assert run([*arguments, "--model", str(tiny_model), "--layers", "2,4,5"]) == 0
    out = tmp_path / "y"
    export = ["export", "specforge", str(tmp_path / "a"), "--out", str(out), "--apply-norm", "--model"]
    assert run([*export, str(tiny_model)]) == 0
    norm = LlamaRMSNorm(HIDDEN, eps=1e-6).to(torch.bfloat16)
    with torch.no_grad():
        for i, sample in enumerate(samples):
            entries = torch.load(out / "rows_0-2000" / f"data_{i}.ckpt", weights_only=True)
            expected = norm(data.bf16(sample.states["final"]))
            assert torch.equal(entries["hidden_state"][0].view(torch.int16), expected.view(torch.int16))
            assert torch.equal(entries["aux_hidden_state"][0].view(torch.int16), data.wide(sample).view(torch.int16))
    (tmp_path / "other").mkdir()
    text = (tiny_model / "config.json").read_text()
    (tmp_path / "other" / "config.json").write_text(text + "\n")
    capsys.readouterr()
    assert run([*export[:4], str(tmp_path / "z"), *export[5:], str(tmp_path / "other")]) == 2
    assert "another config.json" in capsys.readouterr().err
    with Store.open(tmp_path / "a") as store:
        assert store.capture.norm == "pre"
