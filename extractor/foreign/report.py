"""What an import or an export says at its end: the sum that must come out, the files that are missing, JSON.

`written + failed + skipped = read` for an import (skipped: the input gives no sample; failed: its states cannot be
used), `written + kept + failed + damaged = asked` for an export (kept: there already; failed: without states in the
store; damaged: the store's bytes are not those it committed).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from extractor.words import counted
from hsstore import durable
from hsstore.console import echo_json, human_bytes, human_seconds, note, warn
from hsstore.findings import printable

_SHOWN = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """An input that is not in the store, or a sample that is not in the export."""

    file: str
    status: str
    """`skipped`, `failed` or `damaged`."""
    reason: str
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportOutcome:
    """The end of an import; what `--json` prints."""

    store: str
    format: str
    manifest_id: str
    complete: bool
    read: int
    """Inputs found: files, or rows, or lines of a manifest."""
    written: int
    failed: int
    skipped: int
    remaining: int
    """Samples whose shard another process is writing; 0 at the end of a whole import."""
    rejected: dict[str, int]
    """Skipped and failed ones by reason."""
    layers: tuple[str, ...]
    norm: str
    tokens: int
    bytes: int
    shards: int
    seconds: float
    failures_file: str
    """Where they are listed, "" when there are none."""

    @property
    def balance(self) -> str:
        left = f" + remaining {self.remaining}" if self.remaining else ""
        return f"written {self.written} + failed {self.failed} + skipped {self.skipped}{left} = read {self.read}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOutcome:
    """The end of an export; what `--json` prints."""

    directory: str
    format: str
    manifest_id: str
    asked: int
    """Samples of the split, up to --limit."""
    written: int
    kept: int
    """Found in the directory, from an earlier run of the same export."""
    failed: int
    damaged: int
    layers: tuple[str, ...]
    norm: str
    tokens: int
    bytes: int
    seconds: float
    failures_file: str

    @property
    def balance(self) -> str:
        return (
            f"written {self.written} + kept {self.kept} + failed {self.failed} + damaged {self.damaged}"
            f" = asked {self.asked}"
        )


def write_failures(path: Path, failures: Sequence[Failure]) -> str:
    """List them as JSON lines; without any, an old list is removed. Returns the path, or ""."""
    if not failures:
        path.unlink(missing_ok=True)
        return ""
    lines = [json.dumps({"file": f.file, "status": f.status, "reason": f.reason, "detail": f.detail}) for f in failures]
    durable.replace(path, ("\n".join(lines) + "\n").encode())
    return str(path)


def warn_failures(failures: Sequence[Failure], listed_in: str) -> None:
    """Name the first few on stderr."""
    for f in failures[:_SHOWN]:
        warn(f"{printable(f.file)} {f.status}: {f.reason}{f' ({printable(f.detail)})' if f.detail else ''}")
    if len(failures) > _SHOWN:
        warn(f"… and {counted(len(failures) - _SHOWN, 'more file')}{f', all in {listed_in}' if listed_in else ''}")


def print_import(outcome: ImportOutcome, *, as_json: bool) -> None:
    note(
        f"{outcome.store}: {counted(outcome.tokens, 'token')}, {human_bytes(outcome.bytes)},"
        f" {counted(outcome.shards, 'shard')} in {human_seconds(outcome.seconds)}"
    )
    if outcome.complete:
        note(f"manifest {outcome.manifest_id}")
        note(f"next: hsstore verify manifest {outcome.store} --full")
    _print(outcome, as_json)


def print_export(outcome: ExportOutcome, *, as_json: bool) -> None:
    note(
        f"{outcome.directory}: {counted(outcome.tokens, 'token')}, {human_bytes(outcome.bytes)}"
        f" in {human_seconds(outcome.seconds)}, layers {', '.join(outcome.layers)}, final {outcome.norm}-norm"
    )
    _print(outcome, as_json)


def _print(outcome: ImportOutcome | ExportOutcome, as_json: bool) -> None:
    """The sum is the last line. With `as_json` stdout gets the document instead."""
    if as_json:
        note(outcome.balance)
        echo_json(outcome)
    else:
        click.echo(outcome.balance)
