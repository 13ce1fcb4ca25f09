"""What a directory says about all of its files, beside the files themselves."""

from __future__ import annotations

from dataclasses import dataclass

from extractor.foreign.sample import Norm


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    norm: Norm | None = None
    layer_ids: tuple[int, ...] = ()
    """Ids of the auxiliary states in the project's own numbering; empty when nothing says them."""
    last_id: int | None = None
    """Id of the final state, where it is named with the others."""
    version: str = ""
    """Version of the program that wrote the files."""
    source: str = ""
    """File that says it."""
