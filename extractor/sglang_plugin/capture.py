"""One request's states on their way from the scheduler's tensors to their rows, chunk by chunk.

Responsible for the place of each chunk, the columns of each state, the digests and the receipt. Knows nothing of
SGLang: `hooks` says when a chunk is there, `writer` brings the rows to disk.

Letters: t rows of a chunk, K captured `after_k` states, H hidden size.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from extractor.sglang_plugin.protocol import FINAL, Receipt, Target
from extractor.sglang_plugin.writer import Rows
from hsstore.digest import crc32c


class Capture:
    """State of one request between its first chunk and its receipt."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.chunks: list[int] = []
        self.done = False
        self._crc32c = dict.fromkeys(target.files, 0)
        self._deadline = time.monotonic() + target.seconds if target.seconds else math.inf

    @property
    def n_rows(self) -> int:
        return sum(self.chunks)

    def add(self, aux_tKH: torch.Tensor, last_tH: torch.Tensor, put: Callable[[Rows], None]) -> None:
        """Take the next chunk of the prompt: its rows follow those taken so far."""
        n_rows, hidden_size = last_tH.shape
        if self.n_rows + n_rows > self.target.n_tokens:
            self.chunks.append(n_rows)  # counted, so that the receipt says how many came
            return
        target, row_bytes = self.target, 2 * hidden_size
        complete = self.n_rows + n_rows == target.n_tokens
        for state, (name, path) in enumerate(target.files.items()):
            data = state_bytes(aux_tKH, last_tH, target.columns[name])
            self._crc32c[name] = crc32c(data.data, self._crc32c[name])
            first_row = target.row if path else state * target.n_tokens
            put(
                Rows(
                    request=target.request,
                    path=path,
                    offset=(first_row + self.n_rows) * row_bytes,
                    data=data,
                    ticket=target.ticket,
                    first=self.n_rows == 0 and state == 0,
                    last=complete and state == len(target.files) - 1,
                    total_bytes=len(target.files) * target.n_tokens * row_bytes,
                    deadline=self._deadline,
                )
            )
        self.chunks.append(n_rows)

    def receipt(self, *, prompt_tokens: int, cached_tokens: int, points: tuple[int, ...]) -> Receipt:
        """Close the request. Rows that a cache, a lost chunk or a repeated one took away show here."""
        self.done = True
        n_tokens = self.target.n_tokens
        if cached_tokens:
            error = f"{cached_tokens} of {n_tokens} tokens came from the prefix cache, which must be off"
        elif prompt_tokens != n_tokens or self.n_rows != n_tokens:
            error = (
                f"captured {self.n_rows} rows in chunks {self.chunks} of {prompt_tokens} tokens, expected {n_tokens}"
            )
        else:
            return Receipt(self.n_rows, self._crc32c, points)
        return Receipt(self.n_rows, {}, points, error=error)


def state_bytes(aux_tKH: torch.Tensor, last_tH: torch.Tensor, column: int) -> npt.NDArray[np.uint8]:
    """The rows of one state as bfloat16 bytes, in memory of their own: SGLang reuses its tensors before the write."""
    n_rows, hidden_size = last_tH.shape
    if aux_tKH.shape[0] != n_rows or aux_tKH.shape[1] % hidden_size:
        raise ValueError(f"states of shape {tuple(aux_tKH.shape)} do not fit final states of {tuple(last_tH.shape)}")
    if column == FINAL:
        source = last_tH
    else:
        source = aux_tKH[:, column * hidden_size : (column + 1) * hidden_size]
        if source.shape[1] != hidden_size:
            raise ValueError(f"no state {column} among {aux_tKH.shape[1] // hidden_size} captured ones")
    rows = torch.empty((n_rows, hidden_size), dtype=torch.bfloat16).copy_(source)
    array: npt.NDArray[np.uint8] = rows.view(torch.uint8).numpy().reshape(-1)
    return array
