"""`hsstore audit` from the command line: figures, JSON, and what it refuses."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from hsstore.errors import MissingExtraError, NotFoundError, UsageError
from tests.trainer.tiny import CONFIG, HIDDEN, VOCAB, write_verifier
from trainer.audit_cli import audit

pytestmark = pytest.mark.filterwarnings("ignore:builtin type .* has no __module__ attribute:DeprecationWarning")

DATA = Path(__file__).parent / "data"


def run(*arguments: str) -> str:
    """stdout; errors are raised as the caller of the verb sees them."""
    result = CliRunner().invoke(audit, list(arguments), catch_exceptions=False, standalone_mode=False)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize("name", ["kimi_k2_flat.json", "kimi_k2.5_nested.json"])
def test_kimi(name):
    output = run("--config", str(DATA / name))
    lines = {line.split("  ")[0]: line for line in output.splitlines()}
    assert "1,174,405,120  frozen" in lines["embed_tokens"]
    assert "229,376,000  frozen" in lines["verifier_lm_head"]
    assert "229,376,000  trained" in lines["lm_head"]
    assert "154,140,672  trained" in lines["fc"]
    assert "807,403,520  trained" in lines["decoder layer"]
    assert lines["trained"].endswith("1,190,948,864")
    assert lines["all"].endswith("2,594,737,152")


def test_json():
    report = json.loads(run("--config", str(DATA / "kimi_k2_flat.json"), "--json"))
    assert (report["total"], report["trained"], report["frozen"]) == (2_594_737_152, 1_190_948_864, 1_403_788_288)
    assert report["components"][0] == {
        "component": "embed_tokens",
        "parameters": 1_174_405_120,
        "trained": False,
        "source": "verifier (kimi_k2_flat.json)",
    }
    assert report["problems"] == []


def test_a_verifiers_directory_names_its_tensors(tmp_path):
    write_verifier(tmp_path, sharded=True)
    output = run("--verifier", str(tmp_path), "--draft-vocab", "20")
    assert "model-00001-of-00004.safetensors: model.embed_tokens.weight" in output


def test_a_draft_config_replaces_the_layer(tmp_path):
    layer = {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 18_432}
    (tmp_path / "draft.json").write_text(json.dumps(layer))
    arguments = ("--config", str(DATA / "kimi_k2_flat.json"), "--draft-config", str(tmp_path / "draft.json"), "--json")
    parts = {row["component"]: row["parameters"] for row in json.loads(run(*arguments))["components"]}
    assert parts["decoder layer"] == 807_403_520 - 2 * (64 - 8) * 128 * 2 * 7168


def test_a_frozen_head_and_a_whole_vocabulary():
    report = json.loads(run("--config", str(DATA / "kimi_k2_flat.json"), "--no-train-head", "--json"))
    assert report["trained"] == 1_190_948_864 - 229_376_000
    whole = json.loads(run("--config", str(DATA / "kimi_k2_flat.json"), "--draft-vocab", "0", "--json"))
    assert whole["components"][3]["parameters"] == 1_174_405_120


@pytest.mark.parametrize("arguments", [(), ("--verifier", "a", "--config", "b")])
def test_one_of_two(arguments):
    with pytest.raises(UsageError, match="either --verifier DIR or --config FILE"):
        run(*arguments)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(NotFoundError, match=r"no config\.json at"):
        run("--config", str(tmp_path / "config.json"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_act": "foo"}, "hidden_act is 'foo'"),
        ({"rope_scaling": {"type": "nope"}}, "rope_type is 'nope'"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3"),
        ({"head_dim": None, "hidden_size": 12}, "head_dim is 3"),
        ({"hidden_size": 10**30}, "hidden_size is 1"),
    ],
)
def test_a_bad_config_is_refused_before_torch_is_imported(tmp_path, monkeypatch, change, words):
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, **change}))
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(UsageError, match=words) as caught:
        run("--config", str(tmp_path / "config.json"))
    assert str(tmp_path) in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize("size", ["1", "-3"])
def test_a_draft_vocabulary_of_one_token_is_refused(size):
    with pytest.raises(UsageError, match="expected at least 2, or 0 for the whole"):
        run("--config", str(DATA / "kimi_k2_flat.json"), "--draft-vocab", size)


def test_a_draft_vocabulary_larger_than_the_verifiers_is_the_whole(tmp_path):
    """As training does it, so that the defaults of both fit any verifier."""
    write_verifier(tmp_path)
    report = json.loads(run("--verifier", str(tmp_path), "--json"))
    assert report["components"][3] == {
        "component": "lm_head",
        "parameters": VOCAB * HIDDEN,
        "trained": True,
        "source": "starts as rows of model.safetensors: lm_head.weight",
    }


def test_without_speculators(monkeypatch):
    monkeypatch.setitem(sys.modules, "speculators", None)
    with pytest.raises(MissingExtraError) as caught:
        run("--config", str(DATA / "kimi_k2_flat.json"))
    assert "pip install 'hsstore[train]'" in str(caught.value)
