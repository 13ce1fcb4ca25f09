"""What a run says while it goes: one JSON line per step and validation, a console line every few steps.

Only rank 0 has a `Report` with a file. Leaves the numbers to `metrics`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hsstore.console import human_seconds, note, warn
from trainer import metrics
from trainer.metrics import JsonLines
from trainer.prepare import Setup
from trainer.schedule import StepBins
from trainer.state import METRICS, TrainState

FILE = METRICS


@dataclass(slots=True)
class Clock:
    """Time and work of this part of the run."""

    seconds: float = 0.0
    wait_seconds: float = 0.0
    """Of them, spent waiting for data."""
    rows: int = 0
    steps: int = 0
    last_seconds: float = 0.0
    """Of the last step."""

    def add(self, *, seconds: float, wait_seconds: float, rows: int) -> None:
        self.seconds += seconds
        self.wait_seconds += wait_seconds
        self.rows += rows
        self.steps += 1
        self.last_seconds = seconds

    @property
    def rows_per_second(self) -> float:
        return self.rows / self.seconds if self.seconds else 0.0

    @property
    def wait_share(self) -> float:
        return self.wait_seconds / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFacts:
    """What is known of a step before it is made."""

    bins: StepBins
    rate: float
    rows: int
    """Over all ranks."""
    counted: int
    """Of them, with a loss."""
    guarded: int
    """Of them, trained tokens among the first K − 1 rows of a document (see `data.RowLayout`)."""
    began: float
    """`time.perf_counter()` when its data was asked for."""
    wait_seconds: float


class Report:
    """Lines of one part of a run."""

    def __init__(self, out: Path, *, keep_to_step: int, ttt_steps: int, total_steps: int, log_every: int) -> None:
        self._lines = JsonLines(out / FILE, keep_to_step=keep_to_step)
        self._ttt_steps, self._total_steps, self._log_every = ttt_steps, total_steps, log_every

    def step(self, facts: StepFacts, *, norm: float, ratios: dict[str, float], clock: Clock) -> None:
        """A step that was made; `clock` includes it."""
        bins, k, done = facts.bins, self._ttt_steps, facts.bins.step + 1
        self._lines.write(
            {
                "kind": "train",
                "step": done,
                "epoch": bins.epoch,
                "loss": sum(ratios[f"loss_{i}"] for i in range(k)),
                **ratios,
                "acceptance_length": metrics.acceptance_length(ratios, k),
                "learning_rate": facts.rate,
                "gradient_norm": norm,
                "rows": facts.rows,
                "counted_rows": facts.counted,
                "guarded_rows": facts.guarded,
                "empty_bins": bins.n_empty,
                "time": {"seconds": clock.last_seconds, "wait_seconds": facts.wait_seconds},
            }
        )
        if done % self._log_every == 0 or clock.steps == 1:
            note(self._console(facts, ratios, clock))

    def _console(self, facts: StepFacts, ratios: dict[str, float], clock: Clock) -> str:
        done = facts.bins.step + 1
        eta = human_seconds(clock.seconds / clock.steps * (self._total_steps - done))
        return (
            f"step {done}/{self._total_steps} epoch {facts.bins.epoch} · "
            f"{metrics.console_line(ratios, self._ttt_steps)} · lr {facts.rate:.2e}"
            f" · {clock.rows_per_second:,.0f} tok/s · wait {100 * clock.wait_share:.0f} % · ETA {eta}"
        )

    def validation(self, step: int, epoch: int, ratios: dict[str, float]) -> None:
        self._lines.write({"kind": "validation", "step": step, "epoch": epoch, **ratios})
        note(f"validation at step {step} · {metrics.console_line(ratios, self._ttt_steps)}")

    def sync(self) -> None:
        """Make the lines durable, before a checkpoint says these steps happened."""
        self._lines.sync()

    def close(self) -> None:
        self._lines.close()


def announce(setup: Setup, plan: Sequence[StepBins], total_steps: int, *, starts_over: bool) -> None:
    """What a part of a run is about to do. `plan` holds the steps up to its end."""
    world, options, first = setup.ranks.world, setup.options, setup.epochs[0]
    reached = len({bins.epoch for bins in plan})
    if starts_over:
        note(f"{options.out} holds no checkpoint yet: starting at step 0")
    ranks = f"{_counted(world, 'rank')} on {setup.ranks.device.type}"
    note(
        f"{setup.train.n_samples:,} samples · {first.n_tokens:,} tokens an epoch"
        f" · {_counted(len(plan), 'step')} to step {total_steps:,} in {_counted(reached, 'epoch')} by {ranks}"
        f" · draft vocabulary {setup.vocabulary.draft_size:,} covers {100 * setup.vocabulary.cover:.2f} %"
    )
    if first.n_cut or first.n_dropped:
        note(f"{first.n_cut:,} samples cut to {options.max_seq_len} tokens, {first.n_dropped:,} left out")
    empty = sum(bins.n_empty for bins in plan)
    if empty:
        note(f"{_counted(empty, 'empty bin')} to fill the last step of an epoch: all ranks take part in every step")
    if setup.validation is None:
        warn("the store holds no validation samples: nothing will be measured on held-out data")


def _counted(n: int, noun: str) -> str:
    return f"{n:,} {noun}{'s' * (n != 1)}"


def warn_of_other_numbers(setup: Setup, state: TrainState) -> None:
    """A resumed run is exact for the same ranks and threads only."""
    was, now = (state.world, state.threads), (setup.ranks.world, setup.threads)
    if was != now:
        warn(
            f"saved by {was[0]} ranks of {was[1]} threads, resumed by {now[0]} of {now[1]}: no data is lost or"
            " repeated, but the numbers are not those of an unbroken run to the last bit"
        )
