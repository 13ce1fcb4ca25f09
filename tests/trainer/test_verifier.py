"""Reading a verifier: the names checkpoints use, tied heads, nested configs, and what is said when something lacks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from hsstore.errors import ConflictError, DamagedError, NotFoundError, UsageError
from tests.trainer.tiny import CONFIG, HIDDEN, VOCAB, write_verifier
from trainer.verifier import load_verifier, locate, read_config

DATA = Path(__file__).parent / "data"
WRAPPED = {"architectures": ["Wrapped"], "model_type": "wrapped", "text_config": CONFIG, "vision_config": {}}


@pytest.mark.parametrize("sharded", [False, True], ids=["one file", "index"])
@pytest.mark.parametrize(
    ("prefix", "head", "config"),
    [
        ("model.", "lm_head.weight", CONFIG),
        ("language_model.model.", "language_model.lm_head.weight", WRAPPED),
        ("model.language_model.", "lm_head.weight", WRAPPED),
    ],
)
def test_reads_the_three_tensors_under_every_spelling(tmp_path, prefix, head, config, sharded):
    """Kimi-K2.5 keeps its language model under `language_model.`; reading by the plain names would find nothing."""
    written = write_verifier(tmp_path, prefix=prefix, head=head, config=config, sharded=sharded)
    weights = load_verifier(tmp_path)
    assert torch.equal(weights.embed, written["embed"])
    assert torch.equal(weights.lm_head, written["lm_head"])
    assert torch.equal(weights.norm, written["norm"])
    assert weights.embed.dtype == torch.bfloat16
    assert not weights.places.tied
    assert weights.facts.hidden_size == HIDDEN


@pytest.mark.parametrize("says", [True, None], ids=["config says tied", "config says nothing"])
def test_a_tied_model_lends_its_embedding_as_head(tmp_path, says):
    config = {k: v for k, v in CONFIG.items() if k != "tie_word_embeddings"}
    written = write_verifier(
        tmp_path, head=None, config=config if says is None else {**config, "tie_word_embeddings": says}
    )
    weights = load_verifier(tmp_path)
    assert weights.places.tied
    assert torch.equal(weights.lm_head, written["embed"])


def test_a_tied_model_ignores_a_head_left_in_its_files(tmp_path):
    """The engines that captured the states computed with the embedding; the left-over head is some other matrix."""
    written = write_verifier(tmp_path, config={**CONFIG, "tie_word_embeddings": True})
    assert torch.equal(load_verifier(tmp_path).lm_head, written["embed"])


def test_selects_rows_of_the_head(tmp_path):
    written = write_verifier(tmp_path)
    t2d = torch.zeros(VOCAB, dtype=torch.bool)
    t2d[[3, 8, 49]] = True
    weights = load_verifier(tmp_path, t2d=t2d.numpy())
    assert torch.equal(weights.lm_head, written["lm_head"][[3, 8, 49]])


def test_flat_and_nested_kimi_configs_give_the_same_facts():
    """The numbers are Kimi-K2.5's own; head_dim stays unknown because config.json has none (transformers says 64)."""
    flat, nested = read_config(DATA / "kimi_k2_flat.json"), read_config(DATA / "kimi_k2.5_nested.json")
    for facts in (flat, nested):
        assert (facts.model_type, facts.vocab_size, facts.hidden_size) == ("kimi_k2", 163_840, 7168)
        assert (facts.n_layers, facts.num_attention_heads, facts.intermediate_size) == (61, 64, 18_432)
        assert (facts.kv_lora_rank, facts.head_dim, facts.tied) == (512, None, False)
        assert facts.rope_parameters["rope_type"] == "yarn"
        assert facts.rope_parameters["rope_theta"] == 50_000.0
    assert nested.architectures == ("KimiK25ForConditionalGeneration",)


def test_both_spellings_of_rope_are_one(tmp_path):
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    old.write_text(json.dumps(CONFIG))
    bare = {k: v for k, v in CONFIG.items() if k != "rope_theta"}
    new.write_text(json.dumps({**bare, "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}))
    assert read_config(old).rope_parameters == read_config(new).rope_parameters


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        (None, NotFoundError, "no config.json"),
        ("{", UsageError, "not JSON"),
        ("[]", UsageError, "expected an object"),
        ("{}", UsageError, "no num_attention_heads"),
        (json.dumps({**CONFIG, "hidden_size": "16"}), UsageError, "hidden_size is '16'"),
        (json.dumps({**CONFIG, "text_config": 3}), UsageError, "text_config is int"),
        (json.dumps({**CONFIG, "hidden_size": 10**30}), UsageError, "hidden_size is 1000.*up to 1,048,576"),
        ('{"hidden_size": ' + "1" * 5000 + "}", UsageError, "not JSON"),
        ("[" * 200_000, UsageError, "too deeply"),
        (json.dumps({**CONFIG, "rms_norm_eps": "a"}), UsageError, "rms_norm_eps is 'a', expected a positive number"),
        (json.dumps({**CONFIG, "rms_norm_eps": float("nan")}), UsageError, "rms_norm_eps is nan"),
        (json.dumps({**CONFIG, "rope_theta": "x"}), UsageError, "rope_theta is 'x'"),
        (json.dumps({**CONFIG, "rope_theta": 10**400}), UsageError, "rope_theta is 1000"),
        (json.dumps({**CONFIG, "rope_scaling": 5}), UsageError, "rope_scaling is 5, expected an object"),
        (json.dumps({**CONFIG, "rope_scaling": {"type": 1}}), UsageError, "rope_scaling: rope_type is 1"),
        (json.dumps({**CONFIG, "hidden_act": 1}), UsageError, "hidden_act is 1, expected a string"),
        (json.dumps({**CONFIG, "architectures": 1}), UsageError, "architectures is 1"),
        (json.dumps({**CONFIG, "tie_word_embeddings": "false"}), UsageError, "tie_word_embeddings is 'false'"),
    ],
)
def test_a_bad_config_is_named(tmp_path, text, error, words):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(error, match=words) as caught:
        read_config(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_a_directory_without_weights_is_named(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(NotFoundError, match="only safetensors are read"):
        load_verifier(tmp_path)


def test_a_head_that_config_promises_and_no_file_has(tmp_path):
    write_verifier(tmp_path, head=None)
    with pytest.raises(NotFoundError, match="tie_word_embeddings is false"):
        load_verifier(tmp_path)


def test_unknown_names_are_not_guessed(tmp_path):
    """A suffix match would happily take the embedding of a vision tower."""
    write_verifier(tmp_path, prefix="vision_tower.")
    with pytest.raises(NotFoundError, match="no input embedding"):
        load_verifier(tmp_path)


def test_another_shape_than_config_says(tmp_path):
    write_verifier(tmp_path, config={**CONFIG, "vocab_size": VOCAB + 1})
    with pytest.raises(ConflictError, match=r"embed_tokens.weight has shape \[50, 16\], expected \[51, 16\]"):
        locate(tmp_path, read_config(tmp_path))


def test_a_shard_that_is_missing_or_torn(tmp_path):
    write_verifier(tmp_path, sharded=True)
    shard = tmp_path / "model-00001-of-00004.safetensors"
    shard.write_bytes(shard.read_bytes()[:-7])
    with pytest.raises(DamagedError, match="not a safetensors file"):
        load_verifier(tmp_path)
    shard.unlink()
    with pytest.raises(NotFoundError, match=r"00001-of-00004.safetensors is missing"):
        load_verifier(tmp_path)
