"""What a training run is asked to do: one record, checked once, passed to every rank.

Responsible for: the values, their bounds, and which of them a resumed run must share with the run it continues.
Leaves the spelling on the command line to `cli`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hsstore.errors import UsageError
from hsstore.records import sha256_hex
from trainer.schedule import ScheduleName

# The numbers of a resumed run depend on these; everything else (workers, logging, where the store is read from …) may
# change between the parts of a run. The horizon (epochs, max_steps) matters only where the rate decays towards it.
PINNED = (
    "max_seq_len", "overflow", "seed", "lr", "warmup_steps", "schedule", "weight_decay", "grad_clip", "ttt_steps",
    "ttt_decay", "noise_std", "draft_vocab", "draft_config", "train_head", "compute_dtype",
)  # fmt: skip
HORIZON = ("epochs", "max_steps")
MOST_EPOCHS = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """Defaults are the origin run's values."""

    source: str
    """Path of a store, or URL of a service."""
    verifier: str
    """Directory of the verifier's checkpoint."""
    out: str
    """Directory of the run."""
    store: str | None = None
    """Name of the store, when a service has several."""
    nproc: int = 1
    """W, when this process starts the ranks itself."""
    max_seq_len: int = 4096
    overflow: Literal["truncate", "drop"] = "truncate"
    epochs: int = 5
    max_steps: int | None = None
    """End of the run, and of the learning rate's decay, where that comes before `epochs`."""
    stop_at: int | None = None
    """End this part of the run after that many steps in all; the schedule does not know of it."""
    seed: int = 0
    lr: float = 3e-5
    warmup_steps: int | None = None
    """None = 1 % of all steps."""
    schedule: ScheduleName = "cosine"
    weight_decay: float = 0.0
    grad_clip: float = 1.0
    """0 = none."""
    ttt_steps: int = 3
    """K."""
    ttt_decay: float = 1.0
    """γ."""
    noise_std: float = 0.05
    draft_vocab: int = 32000
    """V_d; at most the verifier's vocabulary, 0 = all of it."""
    draft_config: str | None = None
    """JSON file with the drafter's layer; None = by the rule of `draft_layer`."""
    train_head: bool = True
    """Train the draft head, as the origin run did; False freezes it as speculators 0.9 does."""
    compute_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Of activations and frozen weights. Trained weights are float32."""
    num_workers: int = 4
    threads: int | None = None
    """CPU threads per rank; None = cores / ranks on this machine."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    resume: bool = False
    save_every: int = 500
    """Steps between checkpoints inside an epoch; there is always one at its end."""
    keep: int = 2
    """Checkpoints kept."""
    validate_every: int | None = None
    """Steps between validations inside an epoch; None = only at its end."""
    log_every: int = 10
    verify_reads: Literal["off", "sampled", "always"] = "sampled"
    """How many batches are checked against the records' CRCs."""
    backend: Literal["mmap", "pread"] = "mmap"
    """How the files of a store on this machine are read."""
    token: str | None = None

    def __post_init__(self) -> None:
        _finite(self, "lr", "weight_decay", "grad_clip", "ttt_decay", "noise_std")
        _at_least(1, self, "nproc", "max_seq_len", "epochs", "max_steps", "stop_at", "ttt_steps", "threads")
        _at_least(1, self, "save_every", "keep", "validate_every", "log_every")
        _at_least(0, self, "seed", "warmup_steps", "weight_decay", "grad_clip", "noise_std", "num_workers")
        if self.epochs > MOST_EPOCHS:
            raise UsageError(f"--epochs is {self.epochs}, expected at most {MOST_EPOCHS}")
        if self.draft_vocab < 2 and self.draft_vocab != 0:
            raise UsageError(f"--draft-vocab is {self.draft_vocab}, expected at least 2, or 0 for the verifier's")
        if not self.lr > 0:
            raise UsageError(f"--lr is {self.lr}, expected a positive number")
        if not 0 < self.ttt_decay <= 1:
            raise UsageError(f"--ttt-decay is {self.ttt_decay}, expected a number in (0, 1]")
        if self.max_seq_len <= self.ttt_steps:
            raise UsageError(f"--max-seq-len {self.max_seq_len} leaves no rows for --ttt-steps {self.ttt_steps}")

    def pinned(self) -> dict[str, Any]:
        """The values that a resumed run must share, by option name."""
        names = PINNED if self.schedule == "constant" else PINNED + HORIZON
        values = {name: getattr(self, name) for name in names}
        if self.draft_config is not None:  # its contents count, not where it lies
            values["draft_config"] = "SHA-256 " + sha256_hex(Path(self.draft_config).read_bytes())
        return values


def flag(name: str) -> str:
    """`max_seq_len` → `--max-seq-len`."""
    return "--" + name.replace("_", "-")


def _finite(options: TrainOptions, *names: str) -> None:
    for name in names:
        value = getattr(options, name)
        if not math.isfinite(value):
            raise UsageError(f"{flag(name)} is {value}, expected a finite number")


def _at_least(bound: int, options: TrainOptions, *names: str) -> None:
    for name in names:
        value = getattr(options, name)
        if value is not None and not value >= bound:
            raise UsageError(f"{flag(name)} is {value}, expected at least {bound}")
