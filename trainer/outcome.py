"""How a run ended, as a record that travels from a rank to whoever started it, and the words for it.

Free of torch: `cli` and `launch` use it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hsstore.console import human_count, human_seconds, note
from hsstore.errors import HsstoreError, class_of

Status = Literal["finished", "paused", "interrupted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a run, or this part of it, ended."""

    status: Status
    """`paused`: --stop-at was reached; `interrupted`: by a signal."""
    step: int
    total_steps: int
    epochs_done: int
    tokens: int
    """Rows trained on, over all ranks and parts of the run."""
    seconds: float
    """Time in training steps, over all parts."""
    tokens_per_second: float
    """Of this part."""
    wait_share: float
    """Share of this part's time in steps that rank 0 waited for data."""
    first: dict[str, float]
    """Validation before the first step, without what was undefined; empty without a validation split."""
    last: dict[str, float]
    """Last validation."""
    world: int
    draft_vocab: int
    draft_vocab_cover: float
    plan_id: str
    manifest_id: str
    out: str
    metrics: str
    """Path of the JSONL file."""
    checkpoint: str | None
    """Path of the last checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """What a rank leaves behind in the launcher's directory."""

    outcome: Outcome | None = None
    kind: str = ""
    """Of its error (`hsstore.errors`); "" when there was none."""
    message: str = ""
    hint: str = ""
    traceback: str = ""
    """Of an error without a name."""
    time: float = 0.0


def rebuild(report: RankReport) -> HsstoreError:
    """The error that a rank reported, of the class it had."""
    return class_of(report.kind)(report.message, hint=report.hint)


def describe(outcome: Outcome) -> None:
    """The last lines of a run, for people."""
    note(
        f"{outcome.status} at step {outcome.step}/{outcome.total_steps} · {human_count(outcome.tokens)} tokens in"
        f" {human_seconds(outcome.seconds)} ({outcome.tokens_per_second:,.0f} tok/s,"
        f" {100 * outcome.wait_share:.0f} % of it waiting for data)"
    )
    both = [n for n in ("loss_0", "full_acc_0", "acceptance_length") if n in outcome.first and n in outcome.last]
    if both:
        changes = [f"{name} {outcome.first[name]:.3f} → {outcome.last[name]:.3f}" for name in both]
        note(f"validation: {' · '.join(changes)}")
    note(f"metrics: {outcome.metrics}")
    if outcome.checkpoint is not None:
        note(f"checkpoint: {outcome.checkpoint}")
    if outcome.status != "finished":
        note("to go on, run the same command with --resume" + (" and another --stop-at" * (outcome.status == "paused")))
