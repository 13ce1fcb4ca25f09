"""One foreign sample, checked: ids, mask and states as arrays that may be maps of its file.

Responsible for turning whatever tensors a file holds into these arrays, or into a reason why not. Leaves to the formats
which tensor is what, to `importing` what is done with them.

Letters: T tokens, H hidden size, L auxiliary states.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from extractor.foreign.reasons import Rejected

if TYPE_CHECKING:
    import torch

Norm = Literal["post", "pre"]
Rows = npt.NDArray[np.uint16]

_EXPONENT = np.uint16(0x7F80)  # of bfloat16: all ones in NaN and infinity
_INTEGERS = ("int64", "int32", "int16", "uint8", "int8")
_FLOATS = ("bfloat16", "float16", "float32")


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One input: a file, a row of a dataset, a line of a manifest."""

    name: str
    """What people call it: a path below the imported directory, or a row."""
    path: Path
    """The file with the states."""
    row: int = -1
    """Row of the dataset beside the files, -1 where the format has none."""
    label: str = ""
    """What the manifest calls it, where there is one."""
    fault: tuple[str, str] | None = None
    """Reason and detail, when the listing alone shows that it is no sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignSample:
    """What a file holds, in the words of a store. The arrays may be maps of the file."""

    input_ids: npt.NDArray[np.int32]
    """[T]"""
    loss_mask: npt.NDArray[np.uint8] | None
    """[T] of 0 and 1, None when the file has none."""
    states: tuple[Rows, ...]
    """L auxiliary states in ascending layer, then the final one: bfloat16 patterns [T, H] each, rows maybe strided."""
    norm: Norm | None = None
    """Side of the final norm, where the file says it."""
    cast_from: str = ""
    """dtype the states had, when they were converted."""
    mapped: bool = True
    """Whether the states are maps of the file (else they lie in memory)."""
    unchecked: bool = False
    """Whether the file was written without checksums."""

    @property
    def n_tokens(self) -> int:
        return len(self.input_ids)

    @property
    def hidden_size(self) -> int:
        return int(self.states[-1].shape[1])


class Reader(Protocol):
    """A directory of one format."""

    def items(self) -> list[Item]:
        """Every input, in the order that numbers the samples. Raises `UsageError` when it is no such directory."""
        ...

    def read(self, item: Item, *, whole: bool) -> ForeignSample:
        """Open it. With `whole` the file's own checksums are verified, which reads all of it. Raises `Rejected`."""
        ...


def plain(entries: dict[str, Any], name: str) -> torch.Tensor:
    """A tensor of a file by its name. Raises `Rejected` for everything but a dense one whose rows are all there."""
    if name not in entries:
        raise Rejected("missing_tensor", f"no {name}; there are {', '.join(sorted(map(str, entries)))}")
    return plain_tensor(entries[name], name)


def plain_tensor(value: Any, name: str) -> torch.Tensor:
    """The same for a value at hand."""
    import torch

    if type(value) is not torch.Tensor or value.layout is not torch.strided or value.device.type != "cpu":
        raise Rejected("wrong_type", f"{name} is a {type(value).__name__}, expected a tensor")
    if value.is_quantized or value.is_conj() or value.is_neg():
        raise Rejected("wrong_type", f"{name} is no plain tensor")
    if value.numel() * value.element_size() > value.untyped_storage().nbytes():  # a stride of 0: few bytes, any shape
        raise Rejected("wrong_shape", f"{name} is {tuple(value.shape)} and holds fewer values")
    tensor: torch.Tensor = value.detach()
    return tensor


def token_row(tensor: torch.Tensor, name: str) -> npt.NDArray[Any]:
    """[T] of a tensor [T] or [1, T] of integers (or booleans)."""
    if tensor.dim() == 2 and tensor.shape[0] == 1:
        tensor = tensor[0]
    if tensor.dim() != 1:
        raise Rejected("wrong_shape", f"{name} is {tuple(tensor.shape)}, expected [T]")
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in (*_INTEGERS, "bool"):
        raise Rejected("wrong_dtype", f"{name} is {dtype}, expected integers")
    return np.array(tensor.numpy())


def ids_of(row: npt.NDArray[Any]) -> npt.NDArray[np.int32]:
    """int32 ids. Raises `Rejected` for one that no int32 holds."""
    if row.dtype == np.bool_:
        raise Rejected("wrong_dtype", "the ids are booleans")
    if len(row) and not (int(row.min()) >= 0 and int(row.max()) < 1 << 31):
        raise Rejected("ids_outside_vocabulary", f"ids from {int(row.min())} to {int(row.max())}")
    return row.astype(np.int32)


def mask_of(row: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """uint8 mask of 0 and 1."""
    if len(row) and not (int(row.min()) >= 0 and int(row.max()) <= 1):
        raise Rejected("bad_mask", f"values from {int(row.min())} to {int(row.max())}")
    return row.astype(np.uint8)


def rows_of(tensor: torch.Tensor, name: str, *, cast: bool) -> tuple[Rows, str]:
    """bfloat16 patterns [T, W] of a tensor [T, W] or [1, T, W], and the dtype it was converted from ("" for none)."""
    import torch

    if tensor.dim() == 3 and tensor.shape[0] == 1:
        tensor = tensor[0]
    if tensor.dim() != 2 or tensor.shape[1] == 0:
        raise Rejected("wrong_shape", f"{name} is {tuple(tensor.shape)}, expected [T, width]")
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in _FLOATS or (dtype != "bfloat16" and not cast):
        raise Rejected("wrong_dtype", f"{name} is {dtype}")
    if dtype != "bfloat16":
        tensor = tensor.to(torch.bfloat16)
    if tensor.stride(1) != 1:
        tensor = tensor.contiguous()
    return tensor.view(torch.int16).numpy().view(np.uint16), "" if dtype == "bfloat16" else dtype


def split_width(rows: Rows, width: int, name: str) -> list[Rows]:
    """[T, L·H] → L views [T, H]."""
    if width == 0 or rows.shape[1] % width:
        raise Rejected("wrong_width", f"{name} is {rows.shape[1]} wide, no multiple of {width}")
    return [rows[:, i : i + width] for i in range(0, rows.shape[1], width)]


def all_finite(rows: Rows) -> bool:
    """Whether no bfloat16 pattern is NaN or infinite."""
    return not bool(((rows & _EXPONENT) == _EXPONENT).any())
