"""A sample on its way out of a store, and what a format has to do with it.

Letters: T tokens, H hidden size, L auxiliary states.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from extractor.foreign.sample import Norm, Rows
from hsstore.records import Capture

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Which sample of the export it is."""

    number: int
    """0-based, without gaps."""
    row: int
    """Row of the store's index."""
    source_index: int
    """As in the store."""
    n_tokens: int
    split: str
    """`train` or `validation`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outgoing:
    """A sample of the store in memory; the arrays are its own and writable."""

    place: Place
    input_ids: npt.NDArray[np.int32]
    """[T]"""
    loss_mask: npt.NDArray[np.uint8]
    """[T]"""
    states: tuple[Rows, ...]
    """L auxiliary states, then the final one: bfloat16 patterns [T, H]."""
    norm: Norm
    """Side of the final norm that the last of `states` is on."""

    @property
    def ids(self) -> torch.Tensor:
        """int64 [T]"""
        import torch

        return torch.from_numpy(self.input_ids.astype(np.int64))

    @property
    def mask(self) -> torch.Tensor:
        """int64 [T]"""
        import torch

        return torch.from_numpy(self.loss_mask.astype(np.int64))

    @property
    def auxiliary(self) -> torch.Tensor:
        """bfloat16 [T, L·H], one state after the other in each row."""
        return bfloat16(np.concatenate(self.states[:-1], axis=1))

    @property
    def final(self) -> torch.Tensor:
        """bfloat16 [T, H]"""
        return bfloat16(self.states[-1])


def bfloat16(rows: Rows) -> torch.Tensor:
    """A tensor over the same memory."""
    import torch

    return torch.from_numpy(rows.view(np.int16)).view(torch.bfloat16)


def save(entries: dict[str, object], path: Path) -> None:
    """torch.save into memory, then one write: torch turns an error of the disk into words that say nothing."""
    import torch

    buffer = io.BytesIO()
    torch.save(entries, buffer)
    path.write_bytes(buffer.getbuffer())


class Writer(Protocol):
    """A directory of one format that is being made. Every file of it appears whole or not at all."""

    def path(self, place: Place) -> Path:
        """The file that holds the states of that sample: when it is there, the sample is done."""
        ...

    def write(self, sample: Outgoing, path: Path) -> None:
        """Write that file."""
        ...

    def finish(self, done: Sequence[Place], capture: Capture) -> None:
        """Write what lies beside the files, once they are there. `capture` names the layers that were written."""
        ...
