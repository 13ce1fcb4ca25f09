"""What the extractor asks of a verifier engine, and what an engine answers: a ticket per sample, never numbers.

An engine writes `[T, H]` bfloat16 rows of every captured state straight into the staged files whose places a `Job`
names. Leaves to `extractor.run` which samples form a shard, to `hsstore.writer` what happens to the files.

Letters: T tokens of a sample, H hidden size, n decoder layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What an engine says of itself once it is up; becomes part of the capture record."""

    engine: str
    """`sglang` or `transformers`."""
    version: str
    norm: Literal["post", "pre"]
    """State of `final` as this engine delivers it."""
    compute_dtype: str
    longest_tokens: int
    """Longest prompt it takes; longer ones must not be sent."""
    flags: dict[str, str]
    """Settings that can change a state's bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One sample to capture."""

    source_index: int
    input_ids: npt.NDArray[np.int32]
    """[T]"""
    row: int
    """First row of the sample in each file."""
    files: dict[str, str]
    """Absolute path of the staged file by state name (`after_2` …, `final`); each already has its full size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """Receipt for one job. Exactly one comes back for each job, in any order."""

    source_index: int
    n_rows: int
    """Rows captured; must equal T."""
    crc32c: dict[str, int]
    """CRC32C over the sample's rows by state name, computed where they were captured, before they were written."""
    error: str = ""
    """Reason when there are no states; the rows are then undefined."""
    confirmed: bool = False
    """Whether the engine has read the rows back from the files since, and found these digests."""
    retry: bool = True
    """With an error: whether sending it once more may help."""


Transfer = Literal["auto", "shared", "fetch"]
"""How rows come from a server: it writes the staged files itself, or they are fetched; `auto` tries the first."""


class Engine(Protocol):
    """A running verifier. Construct, `info`, `capture` any number of times, `close`."""

    info: EngineInfo

    def capture(self, jobs: Iterable[Job]) -> Iterator[Ticket]:
        """Run the jobs and yield their tickets as they come in.

        A sample that fails yields a ticket with `error`; an engine that is lost raises `IncompleteError`.
        """
        ...

    def close(self) -> None: ...
