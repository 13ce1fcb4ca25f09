"""Digest of a verifier's weights: which files they are, and SHA-256 over (name, bytes, SHA-256) of each, in name order.

Two ways: `full` reads every byte (about 1.5 GB/s a core, files in parallel), `sampled` reads 17 blocks of 1 MiB a file
and is for checkpoints so large that a resume should not read them again; the capture record names it when used.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

from extractor.modelfiles import COMPLETE, json_object, read, wrong_field
from extractor.words import counted
from hsstore.errors import NotFoundError, UsageError

Mode = Literal["full", "sampled"]

_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_PATTERNS = ("*.safetensors", "pytorch_model*.bin", "*.bin")
_PIECE = 8 << 20
_SAMPLE = 1 << 20
_SAMPLES = 17
_LONGEST_HEADER = 100_000_000  # the format's own limit


def weight_files(model: Path) -> list[Path]:
    """The files that hold the weights, in name order. Raises `NotFoundError` naming those that are missing."""
    for index in _INDEXES:
        if (model / index).is_file():
            return _indexed(model, index)
    for pattern in _PATTERNS:
        if files := sorted(model.glob(pattern)):
            return files
    found = ", ".join(sorted(p.suffix for p in model.glob("*.gguf"))[:1])
    raise NotFoundError(
        f"{model} holds no weights: expected *.safetensors{f', found {found} only' if found else ''}",
        hint="download the model completely, or convert it with transformers' save_pretrained",
    )


def _indexed(model: Path, index: str) -> list[Path]:
    file = model / index
    places = json_object(read(file), file).get("weight_map")
    if not isinstance(places, dict) or not places or not all(isinstance(name, str) for name in places.values()):
        wrong_field(file, "weight_map", places, "an object that gives every tensor its file")
    names = sorted(set(places.values()))
    missing = [name for name in names if not (model / name).is_file()]
    if missing:
        raise NotFoundError(
            f"{len(missing)} of the {counted(len(names), 'weight file')} of {model} {_are(missing)} missing,"
            f" the first is {missing[0]}",
            hint=COMPLETE,
        )
    return [model / name for name in names]


def _are(names: list[str]) -> str:
    return "is" if len(names) == 1 else "are"


def check_complete(files: list[Path]) -> None:
    """Raise `UsageError` for a *.safetensors file that is not as long as its own header says."""
    for file in files:
        if file.suffix == ".safetensors":
            tensor_shapes(file)


def tensor_shapes(file: Path) -> dict[str, list[int]]:
    """Shape of every tensor of a *.safetensors file. Raises `UsageError` when it is cut short or no such file."""
    size = file.stat().st_size
    with open(file, "rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or not 2 <= length <= min(size - 8, _LONGEST_HEADER):
            raise UsageError(f"{file} is cut short, or no safetensors file ({size} bytes)", hint=COMPLETE)
        header = json_object(stream.read(length), file)
    header.pop("__metadata__", None)
    end, shapes = 0, {}
    for name, entry in header.items():
        match entry:
            case {"data_offsets": [int(), int(stop)], "shape": list(shape)}:
                end, shapes[name] = max(end, stop), shape
            case _:
                wrong_field(file, f"the entry of tensor {name[:80]}", entry, "its shape and data_offsets")
    expected = 8 + length + end
    if size != expected:
        raise UsageError(f"{file} has {size} bytes, its header describes {expected}", hint=COMPLETE)
    return shapes


def weights_bytes(files: list[Path]) -> int:
    return sum(file.stat().st_size for file in files)


def weights_sha256(
    files: list[Path], mode: Mode = "full", *, threads: int = 4, on_bytes: Callable[[int], None] = lambda _n: None
) -> str:
    """The digest. `on_bytes` hears how many bytes have been read since the last call, from any thread."""

    def line(file: Path) -> str:
        size = file.stat().st_size
        return f"{file.name} {size} {_digest(file, size, mode, on_bytes)}\n"

    with ThreadPoolExecutor(max(1, threads)) as pool:  # hashlib releases the GIL
        return hashlib.sha256("".join(pool.map(line, files)).encode()).hexdigest()


def _digest(file: Path, size: int, mode: Mode, on_bytes: Callable[[int], None]) -> str:
    sha = hashlib.sha256()
    with open(file, "rb", buffering=0) as stream:
        if mode == "full" or size <= _SAMPLES * _SAMPLE:
            buffer = memoryview(bytearray(_PIECE))
            while n := stream.readinto(buffer):
                sha.update(buffer[:n])
                on_bytes(n)
            return sha.hexdigest()
        for i in range(_SAMPLES):  # first and last block included
            stream.seek((size - _SAMPLE) * i // (_SAMPLES - 1))
            sha.update(stream.read(_SAMPLE))
        on_bytes(size)
    return sha.hexdigest()
