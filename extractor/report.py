"""What a run says at its end: the sum that must come out, the lines that gave nothing, JSON for machines.

`written + failed + skipped = input`, in lines of the prompts file: written = samples with states, failed = samples the
engine gave no states for, skipped = lines that are no sample (each with its reason). Data goes to stdout, the rest to
stderr.
"""

from __future__ import annotations

import errno
import json
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import click

from extractor.estimate import Estimate
from extractor.prompts import Prompts
from extractor.words import counted
from hsstore.console import echo_json, human_bytes, human_count, human_seconds, note, table, warn

_SHOWN = 10
_ALWAYS = ("line", "status", "reason", "detail")
_NOT_WRITABLE = {errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT}


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A line that has no states in the store."""

    line: int
    """1-based."""
    status: str
    """`skipped` (no sample) or `failed` (no states)."""
    reason: str
    detail: str
    source_index: int | None = None
    """In the store; None for a line that is no sample."""
    id: str = ""
    """The line's own `id`, where it has one."""
    uid: str = ""
    n_tokens: int | None = None
    tries: int | None = None
    """How often it was sent; None where that is not known any more."""
    time: str = ""
    """When it was given up, UTC."""

    def as_json(self) -> str:
        """One line of the list; what is not known is left out."""
        found = {name: getattr(self, name) for name in self.__slots__}
        rows = {k: v for k, v in found.items() if k in _ALWAYS or v not in (None, "")}
        return json.dumps(rows, ensure_ascii=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartOutcome:
    """What `--shard` made a process do of a run."""

    part: str
    """`i/n`"""
    failed: int
    """Samples of this part without states."""
    remaining: int
    """Samples of this part that are not extracted."""
    shards_elsewhere: int
    """Shards of other parts that were not committed at the end of this one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The end of a run; what `--json` prints."""

    store: str
    manifest_id: str
    complete: bool
    input: int
    """Lines of the prompts file."""
    written: int
    failed: int
    skipped: int
    remaining: int
    """Samples that are not extracted yet; 0 at the end of a whole run."""
    rejected: dict[str, int]
    """Skipped lines by reason."""
    truncated: int
    tokens: int
    bytes: int
    shards: int
    seconds: float
    """Of this run's extraction, without loading the engine."""
    tokens_per_second: float
    """0 when nothing was left to do."""
    failures_file: str
    """"" when no line failed or was skipped."""
    part: PartOutcome | None = None
    """Of a process that did one part; the other numbers are of the whole store."""

    @property
    def unfinished(self) -> bool:
        """Whether something of what was asked for has no states."""
        mine = self.part or self
        return bool(mine.failed or mine.remaining)

    @property
    def balance(self) -> str:
        left = f" + remaining {self.remaining}" if self.remaining else ""
        return f"written {self.written} + failed {self.failed} + skipped {self.skipped}{left} = input {self.input}"


def skipped(prompts: Prompts) -> list[Failure]:
    return [Failure(line=r.line, status="skipped", reason=r.reason, detail=r.detail) for r in prompts.rejections]


def write_failures(path: Path, failures: Iterable[Failure]) -> str:
    """List them as JSON lines, in line order; without any, an old list is removed. Returns the path, or ""."""
    lines = [f.as_json() for f in sorted(failures, key=lambda f: f.line)]
    if not lines:
        with _tolerant(path):
            path.unlink(missing_ok=True)
        return ""
    target = path.resolve()  # a link stays one
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}.tmp")
    with _tolerant(path):
        try:
            temporary.write_text("\n".join(lines) + "\n", encoding="utf-8", errors="backslashreplace")
            temporary.replace(target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        return str(path)
    return ""


@contextmanager
def _tolerant(path: Path) -> Iterator[None]:
    """A complete store may lie on a read-only disk, the list on a full one: that is only warned about."""
    try:
        yield
    except OSError as error:
        if error.errno not in _NOT_WRITABLE:
            raise
        warn(f"the list of failed lines {path} cannot be written: {str(error.strerror).lower()} (give --failed-out)")


def warn_failures(failures: list[Failure], listed_in: str) -> None:
    """Name the first few on stderr."""
    for f in failures[:_SHOWN]:
        warn(f"line {f.line} {f.status}: {f.reason}{f' ({f.detail})' if f.detail else ''}")
    if len(failures) > _SHOWN:
        warn(f"… and {counted(len(failures) - _SHOWN, 'more line')}{f', all in {listed_in}' if listed_in else ''}")


def print_outcome(outcome: Outcome, *, as_json: bool) -> None:
    """The last words of a run; the sum is the last line. With `as_json` stdout gets the document instead of the sum."""
    speed = f", {human_count(round(outcome.tokens_per_second))} tok/s" if outcome.tokens_per_second else ""
    took = f" in {human_seconds(outcome.seconds)}{speed}" if outcome.seconds else ""
    note(
        f"{outcome.store}: {counted(outcome.tokens, 'token')}, {human_bytes(outcome.bytes)},"
        f" {counted(outcome.shards, 'shard')}{took}"
    )
    if outcome.complete and not outcome.remaining:
        note(f"manifest {outcome.manifest_id}")
        note(f"next: hsstore verify manifest {outcome.store} --full")
    elif outcome.part and not outcome.part.remaining:
        left = counted(outcome.part.shards_elsewhere, "shard")
        note(f"part {outcome.part.part} is complete; {left} left to the other parts")
    elif outcome.remaining:  # a shard was quarantined while this ran
        remaining = counted(outcome.remaining, "sample")
        note(f"{remaining} not extracted: another process changed the store meanwhile; run the same with --resume")
    if as_json:
        note(outcome.balance)
        echo_json(outcome)
    else:
        click.echo(outcome.balance)


def print_estimate(estimate: Estimate, *, as_json: bool) -> None:
    """The dry run."""
    if as_json:
        echo_json(
            {f: getattr(estimate, f) for f in estimate.__slots__}
            | {"states_bytes": estimate.states_bytes, "fits": estimate.fits}
        )
        return
    e = estimate
    rejected = ", ".join(f"{reason} {human_count(n)}" for reason, n in e.rejected.items())
    done = f", {human_count(e.shards_done)} of them committed" if e.shards_done else ""
    rows = [
        ("lines", human_count(e.lines)),
        ("samples", human_count(e.samples)),
        ("rejected", f"{human_count(e.lines - e.samples)}{f' ({rejected})' if rejected else ''}"),
        ("truncated", human_count(e.truncated)),
        ("tokens", f"{human_count(e.tokens)} ({human_count(e.assistant_tokens)} of the assistant)"),
        ("longest sample", counted(e.longest_tokens, "token")),
        ("states", f"{', '.join(e.layers)} of width {human_count(e.hidden_size)}"),
        ("bytes per token", human_count(e.bytes_per_token)),
        ("bytes per sample", f"{human_bytes(e.bytes_per_sample_mean)} mean, {human_bytes(e.bytes_per_sample_max)} max"),
        (
            "shards",
            f"{human_count(e.shards)} of S = {counted(e.shard_rows, 'row')}, blocks of C = {e.chunk_rows}{done}",
        ),
        ("total", f"{human_bytes(e.states_bytes)} of states, {human_bytes(e.total_bytes)} on disk in whole blocks"),
        ("still needed", human_bytes(e.needed_bytes)),
        ("free space", f"{human_bytes(e.free_bytes)}{'' if e.fits else '  ← does not fit'}"),
    ]
    table(rows)
