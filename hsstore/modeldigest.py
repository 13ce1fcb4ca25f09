"""Digests of a verifier's directory, spelled as a capture record holds them: is it the model that made this store?

Responsible for: which files count, and SHA-256 over them, in one place for the extractor that records it and the
trainer that compares. Leaves to the caller how much may be read, what is missing, and what a difference means.

`full` reads every byte (about 1.5 GB/s a core, files in parallel); `sampled` reads 17 blocks of 1 MiB of each file, for
checkpoints so large that a resume should not read them again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SAMPLED_FLAG = ("weights_digest", "sampled")
"""Entry of `Capture.flags` when the weights were digested by samples of each file."""
_TOKENIZER_FILES = ("merges.txt", "spiece.model", "tiktoken.model", "tokenizer.model", "vocab.json", "vocab.txt")
INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
PATTERNS = ("*.safetensors", "pytorch_model*.bin", "*.bin")
_PIECE = 8 << 20
_SAMPLE, _SAMPLES = 1 << 20, 17


def tokenizer_sha256(model: Path) -> str:
    """Of tokenizer.json, or over `name SHA-256` lines of the vocabulary files; "" without any."""
    whole = model / "tokenizer.json"
    if whole.is_file():
        return hashlib.sha256(whole.read_bytes()).hexdigest()
    files = [model / name for name in _TOKENIZER_FILES if (model / name).is_file()]
    lines = [f"{file.name} {hashlib.sha256(file.read_bytes()).hexdigest()}\n" for file in files]
    return hashlib.sha256("".join(lines).encode()).hexdigest() if lines else ""


def weight_files(model: Path) -> list[Path]:
    """The files that hold the weights, in name order, those that an index names but are not there included."""
    for index in INDEXES:
        if (model / index).is_file():
            try:
                names = {str(name) for name in json.loads((model / index).read_bytes())["weight_map"].values()}
            except (ValueError, KeyError, TypeError, AttributeError):
                return []  # whoever reads a tensor says what is wrong with it
            return [model / name for name in sorted(names)]
    return next((files for pattern in PATTERNS if (files := sorted(model.glob(pattern)))), [])


def weights_sha256(
    files: list[Path], *, sampled: bool, threads: int = 4, on_bytes: Callable[[int], None] = lambda _n: None
) -> str:
    """Over (name, bytes, SHA-256) lines of the files. `on_bytes` hears of bytes done, from any thread."""

    def line(file: Path) -> str:
        size = file.stat().st_size
        sha256 = _file_sha256(file, size, sampled and size > _SAMPLES * _SAMPLE, on_bytes)
        return f"{file.name} {size} {sha256}\n"

    with ThreadPoolExecutor(threads) as pool:  # hashlib releases the GIL
        return hashlib.sha256("".join(pool.map(line, files)).encode()).hexdigest()


def _file_sha256(file: Path, size: int, sampled: bool, on_bytes: Callable[[int], None]) -> str:
    sha = hashlib.sha256()
    with open(file, "rb", buffering=0) as stream:
        if sampled:
            for i in range(_SAMPLES):  # first and last block included
                stream.seek((size - _SAMPLE) * i // (_SAMPLES - 1))
                sha.update(stream.read(_SAMPLE))
            on_bytes(size)
            return sha.hexdigest()
        buffer = memoryview(bytearray(_PIECE))
        while n := stream.readinto(buffer):
            sha.update(buffer[:n])
            on_bytes(n)
    return sha.hexdigest()
