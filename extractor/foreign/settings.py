"""What a user asks of `hsstore import` and `hsstore export`, as records. Leaves their spelling to `cli`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from extractor.foreign.sample import Norm
from hsstore import paths

FORMATS = ("specforge", "speculators", "speculators-0.4", "torchspec", "modelopt")


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportSettings:
    format: str
    source: Path
    """The foreign directory."""
    out: Path
    """Directory of the store."""
    model: str | None = None
    """Directory of the verifier, or a hub id in the local cache."""
    layers: str | None = None
    """k of each auxiliary state, comma-separated."""
    layer_ids: str | None = None
    """The same in the project's own numbering."""
    norm: Norm | None = None
    n_layers: int | None = None
    vocab_size: int | None = None
    model_name: str | None = None
    hidden_states: Path | None = None
    """Of speculators: directory of the files with states; None = hidden_states/ in the dataset."""
    mask_missing: Literal["reject", "ones"] = "reject"
    cast: bool = False
    shard_rows: int | None = None
    validation_fraction: float = 0.05
    split_salt: str = "hsstore"
    weights_digest: Literal["full", "sampled"] | None = None
    resume: bool = False
    failed_out: Path | None = None

    @property
    def out_is_store(self) -> bool:
        return (self.out / paths.HEADER).is_file()

    @property
    def report(self) -> Path:
        return self.failed_out or self.out.with_name(f"{self.out.name}.failed.jsonl")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportSettings:
    format: str
    store: Path
    out: Path
    """The foreign directory to make."""
    split: Literal["all", "train", "validation"] = "all"
    limit: int | None = None
    apply_norm: bool = False
    model: str | None = None
    """Where the final norm is taken from."""
    gzip: bool = False
    failed_out: Path | None = None

    @property
    def report(self) -> Path:
        return self.failed_out or self.out.with_name(f"{self.out.name}.failed.jsonl")
