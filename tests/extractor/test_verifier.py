"""Reading a model directory: sizes, digests, and one sentence for everything that can be missing."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from extractor.verifier import Verifier, parse_layers, read_verifier
from extractor.weights import check_complete, weight_files
from hsstore.errors import NotFoundError, UsageError

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 30,
    "hidden_size": 576,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "dtype": "bfloat16",
}


def directory(path: Path, config: Any = CONFIG, **files: str) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    for name, text in files.items():
        (path / name.replace("__", ".")).write_text(text)
    return path


def verifier(tmp_path: Path, n_layers: int = 30) -> Verifier:
    return read_verifier(str(directory(tmp_path / "m", CONFIG | {"num_hidden_layers": n_layers})))


def test_sizes_and_digests(tmp_path: Path) -> None:
    found = read_verifier(str(directory(tmp_path / "SmolLM2", tokenizer__json="{}", chat_template__jinja="x")))
    assert (found.name, found.architecture, found.revision) == ("SmolLM2", "LlamaForCausalLM", "")
    assert (found.n_layers, found.hidden_size, found.vocab_size, found.context_tokens) == (30, 576, 49152, 8192)
    assert len(found.tokenizer_sha256) == len(found.chat_template_sha256) == len(found.config_sha256) == 64


def test_nested_text_config(tmp_path: Path) -> None:
    """Kimi-K2.5 keeps the language model's sizes in `text_config`, its class name outside."""
    inner = {k: v for k, v in CONFIG.items() if k != "architectures"} | {"architectures": ["Inner"]}
    outer = {"architectures": ["KimiK25ForConditionalGeneration"], "text_config": inner, "hidden_size": 1}
    found = read_verifier(str(directory(tmp_path / "k", outer)))
    assert found.architecture == "KimiK25ForConditionalGeneration"
    assert (found.n_layers, found.hidden_size) == (30, 576)


def test_the_config_of_kimi_k25(tmp_path: Path) -> None:
    """Sizes, context and vocabulary from the text model; the vision tower has some of the same names."""
    text = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "kimi_k2",
        "num_hidden_layers": 61,
        "hidden_size": 7168,
        "vocab_size": 163840,
        "max_position_embeddings": 262144,
        "torch_dtype": None,
        "is_encoder_decoder": False,
    }
    vision = {"model_type": "kimi_k25", "hidden_size": 1152, "num_hidden_layers": 27, "text_hidden_size": 7168}
    outer = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "text_config": text,
        "vision_config": vision,
        "torch_dtype": "bfloat16",
    }
    found = read_verifier(str(directory(tmp_path / "k", outer)))
    assert (found.architecture, found.n_layers, found.hidden_size) == ("KimiK25ForConditionalGeneration", 61, 7168)
    assert (found.vocab_size, found.context_tokens, found.dtype) == (163840, 262144, "bfloat16")


def test_digests_follow_the_files_they_name(tmp_path: Path) -> None:
    """A changed vocabulary or template must change the capture, wherever it is kept."""
    a = read_verifier(str(directory(tmp_path / "m", vocab__json="1", merges__txt="1", tokenizer_config__json="{}")))
    b = read_verifier(str(directory(tmp_path / "m", vocab__json="1", merges__txt="2")))
    c = read_verifier(str(directory(tmp_path / "m", tokenizer_config__json='{"chat_template": "x"}')))
    named = [{"name": "tool_use", "template": "y"}, {"name": "default", "template": "x"}]
    d = read_verifier(str(directory(tmp_path / "m", tokenizer_config__json=json.dumps({"chat_template": named}))))
    assert a.tokenizer_sha256 != b.tokenizer_sha256 == c.tokenizer_sha256
    assert a.chat_template_sha256 == b.chat_template_sha256 == ""
    assert c.chat_template_sha256 == d.chat_template_sha256 != ""


def test_hub_cache_gives_name_and_revision(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--org--name" / "snapshots" / "abc123"
    snapshot.parent.mkdir(parents=True)
    found = read_verifier(str(directory(snapshot)))
    assert (found.name, found.revision) == ("org/name", "abc123")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("{", "is not JSON"),
        ("[]", "expected an object"),
        ("{}", "has no num_hidden_layers"),
        ("", "it is empty"),
        ("[" * 200_000, "is not JSON"),
        ('{"vocab_size": ' + "9" * 5000 + "}", "is not JSON"),
        (CONFIG | {"hidden_size": "576"}, "hidden_size is '576', expected a whole number"),
        (CONFIG | {"hidden_size": 10**30}, "hidden_size is 1000.*expected a whole number from 1 to"),
        (CONFIG | {"hidden_size": True}, "hidden_size is True"),
        (CONFIG | {"num_hidden_layers": 10**30}, "num_hidden_layers is 1000"),
        (CONFIG | {"vocab_size": -1}, "vocab_size is -1"),
        (CONFIG | {"max_position_embeddings": "abc"}, "max_position_embeddings is 'abc'"),
        (CONFIG | {"max_position_embeddings": [1]}, r"max_position_embeddings is \[1\]"),
        (CONFIG | {"max_position_embeddings": -5}, "max_position_embeddings is -5"),
        (CONFIG | {"architectures": {"a": 1}}, "architectures is {'a': 1}, expected a list"),
        (CONFIG | {"dtype": "int4"}, "dtype is 'int4', expected one of bfloat16"),
        (CONFIG | {"dtype": None, "torch_dtype": 3}, "torch_dtype is 3"),
        (CONFIG | {"is_encoder_decoder": True}, "encoder-decoder"),
    ],
)
def test_configs_that_are_no_language_model(tmp_path: Path, config: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        read_verifier(str(directory(tmp_path / "m", config)))
    assert len(caught.value.message) < 400
    if config != CONFIG | {"is_encoder_decoder": True}:
        assert caught.value.hint


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("tokenizer_config.json", "[", "is not JSON"),
        ("tokenizer_config.json", "[" * 200_000, "is not JSON"),
        ("tokenizer_config.json", "[]", "expected an object"),
        ("tokenizer_config.json", '{"chat_template": [1, 2]}', "chat_template is"),
        ("tokenizer_config.json", '{"chat_template": 3}', "chat_template is 3"),
        ("tokenizer.json", "[]", "is no tokenizer"),
        ("tokenizer.json", "[" * 200_000, "is no tokenizer"),
        ("tokenizer.json", "", "is no tokenizer"),
    ],
)
@pytest.mark.parametrize("own_template", [False, True])
def test_broken_tokenizer_files(tmp_path: Path, file: str, text: str, words: str, own_template: bool) -> None:
    """Files of others can hold anything: one sentence with the file, whichever of them the template lies in."""
    model = directory(tmp_path / "m", **({"chat_template__jinja": "x"} if own_template else {}))
    (model / file).write_text(text)
    with pytest.raises(UsageError, match=words) as caught:
        read_verifier(str(model))
    assert file in caught.value.message
    assert caught.value.hint


def test_missing_models_name_what_helps(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no model directory") as caught:
        read_verifier("nobody/never-released")
    assert "hf download nobody/never-released" in caught.value.hint
    with pytest.raises(NotFoundError, match="no model directory"):
        read_verifier(str(tmp_path / "none"))
    with pytest.raises(NotFoundError, match=r"no config\.json"):
        read_verifier(str(tmp_path))
    (tmp_path / "file").write_text("x")
    with pytest.raises(UsageError, match="is a file"):
        read_verifier(str(tmp_path / "file"))


@pytest.mark.parametrize(
    ("text", "n", "expected"),
    [
        ("eagle3", 30, ("after_2", "after_15", "after_27", "final")),
        ("eagle3", 61, ("after_2", "after_30", "after_58", "final")),
        ("EAGLE3", 8, ("after_2", "after_4", "after_5", "final")),
        ("2,15,27", 30, ("after_2", "after_15", "after_27", "final")),
        (" 27, after_2 ", 30, ("after_2", "after_27", "final")),
        ("0", 30, ("after_0", "final")),
        ("29", 30, ("after_29", "final")),
    ],
)
def test_layers(tmp_path: Path, text: str, n: int, expected: tuple[str, ...]) -> None:
    assert parse_layers(text, verifier(tmp_path, n)) == expected


@pytest.mark.parametrize(
    ("text", "n", "words"),
    [
        ("eagle3", 6, "no three ascending layers"),
        ("2,2", 30, "twice"),
        ("30", 30, "`final`, always captured"),
        ("31", 30, "30 decoder layers"),
        ("-1", 30, "found '-1'"),
        ("", 30, "found ''"),
        ("2,,3", 30, "found ''"),
        ("eagle", 30, "found 'eagle'"),
        ("²", 30, "found '²'"),
        ("a", 30, "found 'a'"),
        ("999", 30, "30 decoder layers"),
        ("9" * 5000, 30, "found '99999"),
        (",".join(["2"] * 5000), 30, "twice"),
    ],
)
def test_layers_that_are_none(tmp_path: Path, text: str, n: int, words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        parse_layers(text, verifier(tmp_path, n))
    assert caught.value.hint
    assert len(caught.value.message) < 200


def test_weight_files_follow_the_index(tmp_path: Path) -> None:
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "model-1.safetensors").write_bytes(b"1")
    (tmp_path / "consolidated.safetensors").write_bytes(b"not of the model")
    with pytest.raises(NotFoundError, match=r"1 of the 2 weight files .* model-2\.safetensors"):
        weight_files(tmp_path)
    (tmp_path / "model-2.safetensors").write_bytes(b"2")
    assert [f.name for f in weight_files(tmp_path)] == ["model-1.safetensors", "model-2.safetensors"]


def test_no_weights_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="holds no weights"):
        weight_files(tmp_path)
    (tmp_path / "m.gguf").write_bytes(b"")
    with pytest.raises(NotFoundError, match=r"found \.gguf only"):
        weight_files(tmp_path)


@pytest.mark.parametrize("text", ["{}", '{"weight_map": {"a": 5}}', '{"weight_map": []}', "[" * 200_000, "[]", ""])
def test_broken_weight_indexes(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(UsageError, match=r"model\.safetensors\.index\.json") as caught:
        weight_files(tmp_path)
    assert caught.value.hint


def safetensors(header: bytes, data: bytes = b"") -> bytes:
    return len(header).to_bytes(8, "little") + header + data


WHOLE = safetensors(b'{"__metadata__":{},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}', bytes(8))


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="empty"),
        pytest.param(WHOLE[:5], id="cut in the length"),
        pytest.param(WHOLE[:30], id="cut in the header"),
        pytest.param(WHOLE[:-1], id="cut in the data"),
        pytest.param(WHOLE + b"x", id="too long"),
        pytest.param(b"version https://git-lfs.github.com/spec/v1\n", id="pointer"),
        pytest.param(safetensors(b"[" * 200_000), id="deep"),
        pytest.param(safetensors(b"[]"), id="list"),
        pytest.param(safetensors(b'{"a": 5}'), id="no entry"),
        pytest.param(safetensors(b'{"a": {"shape": [1], "data_offsets": ["0", 4]}}'), id="no numbers"),
    ],
)
def test_weights_that_are_cut_short_are_found_by_their_size(tmp_path: Path, data: bytes) -> None:
    """A download that broke off: said before an engine starts, not by whatever an engine raises."""
    whole, broken = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    whole.write_bytes(WHOLE)
    check_complete([whole])
    broken.write_bytes(data)
    with pytest.raises(UsageError, match=r"b\.safetensors") as caught:
        check_complete([whole, broken])
    assert caught.value.hint


@pytest.mark.timeout(60)
def test_a_fifo_for_a_file_of_a_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    os.mkfifo(tmp_path / "m/config.json")
    with pytest.raises(UsageError, match=r"config\.json is no plain file"):
        read_verifier(str(tmp_path / "m"))
