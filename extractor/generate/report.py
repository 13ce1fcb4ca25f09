"""What a run of `hsstore generate` says: what it would do, how far it is, and the sum at its end.

`written + failed + skipped = input`, in lines of the prompts file. Data goes to stdout, the rest to stderr.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

import click

from extractor.generate.settings import Sampling
from extractor.words import counted
from hsstore.console import Progress, echo_json, human_bytes, human_count, human_seconds, note, table


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The end of a run; what `--json` prints."""

    out: str
    input: int
    """Lines of the prompts file."""
    written: int
    failed: int
    skipped: int
    reasons: dict[str, int]
    """Failed and skipped lines by reason."""
    truncated: int
    """Written lines with an answer that --max-new-tokens cut."""
    inexact: int
    """Answers whose tokens the template does not give back."""
    answers: int
    prompt_tokens: int
    tokens: int
    """Of all answers."""
    seconds: float
    """Of this run's answering, without loading the engine."""
    tokens_per_second: float
    """0 when nothing was left to do."""
    failures_file: str
    meta_file: str

    def counts(self) -> dict[str, Any]:
        """What the sidecar keeps."""
        kept = asdict(self)
        for name in ("out", "seconds", "tokens_per_second", "failures_file", "meta_file"):
            del kept[name]
        return kept

    @property
    def balance(self) -> str:
        return f"written {self.written} + failed {self.failed} + skipped {self.skipped} = input {self.input}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What `--dry-run` finds."""

    lines: int
    usable: int
    rejected: dict[str, int]
    answers: int
    """Answers that the usable lines need."""
    done: int
    """Lines that an interrupted run has written."""
    prompt_tokens: int
    """Of the first question of each line."""
    longest_prompt_tokens: int
    most_new_tokens: int
    """If every answer were as long as it may be."""
    source: str
    sampling: Sampling


class Meter:
    """Progress with tokens a second."""

    def __init__(self, progress: Progress) -> None:
        self._progress, self._begun = progress, time.monotonic()
        self._tokens = self.done = self.failed = 0

    def tokens(self, n: int) -> None:
        """`n` tokens of this run's answers so far; 0 = no news."""
        self._tokens = max(self._tokens, n)
        self._show()

    def line(self, tokens: int) -> None:
        """One more line is settled; `tokens` of this run's answers are there."""
        self.done += 1
        self.tokens(tokens)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._begun

    def _show(self) -> None:
        rate = self._tokens / max(self.seconds, 1e-9)
        self._progress.update(self.done, f"{human_count(self._tokens)} tokens · {human_count(round(rate))} tok/s")


def print_outcome(outcome: Outcome, *, as_json: bool) -> None:
    """The last words; the sum is the last line. With `as_json` stdout gets the document instead of the sum."""
    speed = f", {human_count(round(outcome.tokens_per_second))} tok/s" if outcome.tokens_per_second else ""
    took = f" in {human_seconds(outcome.seconds)}{speed}" if outcome.seconds else ""
    note(
        f"{outcome.out}: {counted(outcome.written, 'line')}, {counted(outcome.answers, 'answer')},"
        f" {counted(outcome.tokens, 'token')}{took}"
    )
    if outcome.truncated:
        note(
            f"{counted(outcome.truncated, 'line')} cut by --max-new-tokens: what ends the turn there is the template's"
            " word, not the verifier's (--drop-truncated leaves them out)"
        )
    if outcome.inexact:
        note(
            f"{counted(outcome.inexact, 'answer')} of {human_count(outcome.answers)} become other tokens in the"
            ' template than the verifier said ("exact": false in the line)'
        )
    if outcome.failed:
        note(f"the same command with --resume tries the {counted(outcome.failed, 'failed line')} again")
    else:
        note(f"next: hsstore extract --prompts {outcome.out} …")
    if as_json:
        note(outcome.balance)
        echo_json(outcome)
    else:
        click.echo(outcome.balance)


def print_estimate(estimate: Estimate, *, as_json: bool) -> None:
    if as_json:
        echo_json(asdict(estimate))
        return
    e, s = estimate, estimate.sampling
    rejected = ", ".join(f"{reason} {human_count(n)}" for reason, n in e.rejected.items())
    rows = [
        ("lines", human_count(e.lines)),
        ("to be answered", f"{human_count(e.usable)}{f', {human_count(e.done)} of them are' if e.done else ''}"),
        ("skipped", f"{human_count(e.lines - e.usable)}{f' ({rejected})' if rejected else ''}"),
        ("answers", human_count(e.answers)),
        ("first prompts", f"{counted(e.prompt_tokens, 'token')}, the longest {human_count(e.longest_prompt_tokens)}"),
        ("new tokens", f"at most {human_count(e.most_new_tokens)}, about {human_bytes(4.0 * e.most_new_tokens)}"),
        ("by", e.source),
        ("sampling", f"temperature {s.temperature:g}, top_p {s.top_p:g}, top_k {s.top_k or 'off'}, seed {s.seed}"),
    ]
    table(rows)
