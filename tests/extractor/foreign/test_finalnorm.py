"""The final norm that is computed here is the one that transformers computes, for every family that is known here."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from extractor.foreign import finalnorm
from extractor.foreign.normfamilies import ONE_PLUS_WEIGHT, PLAIN_ELSEWHERE, PLAIN_WEIGHT
from extractor.verifier import read_verifier
from hsstore.errors import UsageError
from tests.extractor.tiny import write_tiny_model

MODELS = Path(transformers.__file__).parent / "models"


def test_every_family_as_transformers_has_it() -> None:
    """The class that a family's modelling file makes its final norm of says whether it adds one to the weight."""
    seen = {}
    for file in sorted(MODELS.glob("*/modeling_*.py")):
        source = file.read_text()
        names = set(re.findall(r"self\.norm = (\w+RMSNorm)\(\s*(?:self\.)?config\.hidden_size", source))
        bodies = [m[0] for n in names for m in re.finditer(rf"class {n}\(.*?(?=\n(?:class |def |@))", source, re.S)]
        configs = "".join(other.read_text() for other in file.parent.glob("configuration_*.py"))
        for family in re.findall(r'model_type = "([^"]+)"', configs) if bodies else ():
            seen[family] = {bool(re.search(r"1(\.0)? ?\+ ?self\.weight", body)) for body in bodies}
    assert {f for f in ONE_PLUS_WEIGHT if seen.get(f) != {True}} == set()
    assert {f for f in PLAIN_WEIGHT if seen.get(f) != {False}} == set()
    assert not PLAIN_ELSEWHERE & seen.keys()
    assert not ONE_PLUS_WEIGHT & (PLAIN_WEIGHT | PLAIN_ELSEWHERE)


@pytest.mark.parametrize(
    ("family", "module", "name"),
    [
        ("llama", "llama", "LlamaRMSNorm"),
        ("gemma3_text", "gemma3", "Gemma3RMSNorm"),
        ("gemma3n_text", "gemma3n", "Gemma3nRMSNorm"),
        ("qwen3_next", "qwen3_next", "Qwen3NextRMSNorm"),
    ],
)
def test_rows_equal_transformers_own(tmp_path: Path, family: str, module: str, name: str) -> None:
    """Bit for bit, on rows of bfloat16."""
    model = write_tiny_model(tmp_path / "m")
    as_family(model, family)
    mine = finalnorm.of_model(read_verifier(str(model)))
    weight = mine.weight - (1 if mine.one_plus else 0)
    assert mine.one_plus == (family in ONE_PLUS_WEIGHT)
    kind: Any = getattr(__import__(f"transformers.models.{module}.modeling_{module}", fromlist=[name]), name)
    norm = kind(len(weight), eps=mine.epsilon).to(torch.bfloat16)
    norm.weight.data.copy_(weight)
    rows = torch.randn(50, len(weight), generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    with torch.inference_mode():
        theirs = norm(rows).view(torch.int16).numpy().view("u2")
    assert np.array_equal(mine.apply(rows.view(torch.int16).numpy().view("u2")), theirs)


def test_an_unknown_family_is_not_guessed(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "m")
    as_family(model, "phimoe")  # a LayerNorm, though its config has rms_norm_eps
    with pytest.raises(UsageError, match="family 'phimoe', whose final norm is not known here"):
        finalnorm.of_model(read_verifier(str(model)))


def as_family(model: Path, family: str) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "model_type": family}))
