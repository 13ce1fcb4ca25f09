"""The files of a verifier's weights: which they are, whether they are all there and whole, by their own headers.

Leaves their digest to `hsstore.modeldigest`, their tensors to the engines.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from extractor.modelfiles import COMPLETE, json_object, read, wrong_field
from extractor.words import counted
from hsstore.errors import NotFoundError, UsageError
from hsstore.modeldigest import INDEXES, PATTERNS

Mode = Literal["full", "sampled"]

_LONGEST_HEADER = 100_000_000  # the format's own limit


def weight_files(model: Path) -> list[Path]:
    """The files that hold the weights, in name order. Raises `NotFoundError` naming those that are missing."""
    for index in INDEXES:
        if (model / index).is_file():
            return _indexed(model, index)
    for pattern in PATTERNS:
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
