"""One digest for the extractor that records and the trainer that compares: its spelling is part of every store."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from extractor import weights
from hsstore import modeldigest


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def test_a_tokenizer_is_its_json_or_its_vocabulary_files(tmp_path: Path) -> None:
    assert modeldigest.tokenizer_sha256(tmp_path) == ""
    for name in ("vocab.json", "merges.txt", "tokenizer.model"):
        (tmp_path / name).write_bytes(name.encode())
    lines = "".join(f"{n} {sha256(n.encode())}\n" for n in ("merges.txt", "tokenizer.model", "vocab.json"))
    assert modeldigest.tokenizer_sha256(tmp_path) == sha256(lines.encode())
    (tmp_path / "tokenizer.json").write_bytes(b"{}")
    assert modeldigest.tokenizer_sha256(tmp_path) == sha256(b"{}")


def test_weights_are_names_sizes_and_digests_in_name_order(tmp_path: Path) -> None:
    for name in ("b.safetensors", "a.safetensors"):
        (tmp_path / name).write_bytes(name.encode())
    files = modeldigest.weight_files(tmp_path)
    lines = "".join(f"{f.name} 13 {sha256(f.name.encode())}\n" for f in files)
    assert [f.name for f in files] == ["a.safetensors", "b.safetensors"]
    assert modeldigest.weights_sha256(files, sampled=False) == sha256(lines.encode())
    assert modeldigest.weights_sha256(files, sampled=True) == sha256(lines.encode()), "small files are read whole"


def test_a_sampled_file_is_seventeen_blocks(tmp_path: Path) -> None:
    block, size = 1 << 20, 40 << 20
    data = b"".join(bytes([i]) * block for i in range(40))
    (tmp_path / "w.safetensors").write_bytes(data)
    starts = [(size - block) * i // 16 for i in range(17)]
    expected = sha256(b"".join(data[s : s + block] for s in starts))
    line = f"w.safetensors {size} {expected}\n"
    assert modeldigest.weights_sha256([tmp_path / "w.safetensors"], sampled=True) == sha256(line.encode())


@pytest.mark.parametrize("sampled", [False, True])
def test_any_change_of_name_size_or_byte_shows(tmp_path: Path, sampled: bool) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(bytes(1000))
    heard: list[int] = []
    first = modeldigest.weights_sha256([file], sampled=sampled, on_bytes=heard.append)
    assert first == modeldigest.weights_sha256([file], sampled=sampled)
    assert sum(heard) == 1000
    for changed in (bytes(999) + b"\x01", bytes(1001)):
        file.write_bytes(changed)
        assert modeldigest.weights_sha256([file], sampled=sampled) != first
    file.write_bytes(bytes(1000))
    other = file.rename(tmp_path / "other.safetensors")
    assert modeldigest.weights_sha256([other], sampled=sampled) != first


@pytest.mark.parametrize("indexed", [True, False])
def test_both_sides_choose_the_same_files(tmp_path: Path, indexed: bool) -> None:
    """The extractor also refuses what is missing; which files count must not differ."""
    for name in ("b.safetensors", "a.safetensors", "pytorch_model.bin"):
        (tmp_path / name).write_bytes(b"x")
    if indexed:
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "b.safetensors"}}))
    assert modeldigest.weight_files(tmp_path) == weights.weight_files(tmp_path)
    assert len(modeldigest.weight_files(tmp_path)) == (1 if indexed else 2)


def test_the_sampled_digest_reads_the_ends_of_large_files(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    size = 40 << 20
    with open(file, "wb") as f:
        f.truncate(size)
    first = modeldigest.weights_sha256([file], sampled=True)
    for position in (0, size - 1):
        with open(file, "r+b") as f:
            f.seek(position)
            f.write(b"\x01")
        changed = modeldigest.weights_sha256([file], sampled=True)
        assert changed != first
        first = changed
