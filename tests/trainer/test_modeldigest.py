"""The digests that the trainer compares are those that the extractor recorded."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from extractor import verifier as recorded
from extractor import weights
from hsstore import modeldigest


@pytest.mark.parametrize(
    "names", [["tokenizer.json", "vocab.json"], ["vocab.json", "merges.txt", "tokenizer.model"], []]
)
def test_the_tokenizer(tmp_path: Path, names: list[str]) -> None:
    for name in names:
        (tmp_path / name).write_text('{"a": 1}')
    assert modeldigest.tokenizer_sha256(tmp_path) == recorded._tokenizer_sha256(tmp_path)
    assert bool(modeldigest.tokenizer_sha256(tmp_path)) == bool(names)


@pytest.mark.parametrize("mode", ["full", "sampled"])
@pytest.mark.parametrize("indexed", [True, False])
def test_the_weights(tmp_path: Path, mode: weights.Mode, indexed: bool) -> None:
    for name, size in (("b.safetensors", 18 << 20), ("a.safetensors", 9), ("pytorch_model.bin", 5)):
        (tmp_path / name).write_bytes(os.urandom(size))
    if indexed:
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "b.safetensors"}}))
    files = modeldigest.weight_files(tmp_path)
    assert files == weights.weight_files(tmp_path)
    assert len(files) == (1 if indexed else 2)
    found = modeldigest.weights_sha256(files, sampled=mode == "sampled")
    assert found == weights.weights_sha256(files, mode)
