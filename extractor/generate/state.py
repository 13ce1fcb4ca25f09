"""What earlier runs left in their files, and what all runs together have made. Leaves bytes to `journal`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from extractor.generate import journal, record
from extractor.generate.journal import ANSWERED, Answers
from extractor.generate.reasons import LATER
from extractor.generate.scan import Scan
from extractor.generate.settings import Settings
from extractor.report import Failure
from hsstore.errors import UsageError


class _Listed(msgspec.Struct):
    line: int
    status: str
    reason: str
    detail: str = ""


_LISTED = msgspec.json.Decoder(_Listed)


@dataclass(slots=True, kw_only=True)
class State:
    finished: Answers
    """Of a run that came to its end."""
    part: Answers
    decided: dict[int, Failure]
    """By line: those that were skipped once the verifier had been asked."""
    runs: list[dict[str, Any]]
    """Entries of the sidecar."""

    @property
    def done(self) -> set[int]:
        return {*self.finished.lines, *self.part.lines, *self.decided}

    @classmethod
    def read(cls, settings: Settings, identity: dict[str, Any], found: Scan) -> State:
        """Repairs the part. Raises `ConflictError` when it was made from something else."""
        old = record.load(settings.meta)
        if old is None and (settings.out.exists() or settings.part.stat().st_size):
            raise UsageError(
                f"{settings.meta} is missing: nothing says what {settings.out} was made from",
                hint=f"give another --out, or remove {settings.out.name} and its .part",
            )
        if old is not None:
            record.refuse_other(settings.meta, old, identity)
        finished, part = journal.read_finished(settings.out), journal.recover(settings.part)
        written = {*finished.lines, *part.lines}
        listed = failures_in(settings.failures) if old else []
        known = {*written, *(f.line for f in found.skipped)}  # the list may be old, or of another run
        decided = {f.line: f for f in listed if f.line not in known and 1 <= f.line <= found.lines and _is_decided(f)}
        return cls(finished=finished, part=part, decided=decided, runs=old["runs"] if old else [])


def _is_decided(failure: Failure) -> bool:
    return failure.status == "skipped" and failure.reason in LATER


def failures_in(path: Path) -> list[Failure]:
    """The whole lines of a list of failures; a line that is torn is one that is made again."""
    found = []
    if path.is_file():
        for raw in path.read_bytes().splitlines():
            try:
                entry = _LISTED.decode(raw)
            except (msgspec.MsgspecError, UnicodeDecodeError):
                continue
            found.append(Failure(line=entry.line, status=entry.status, reason=entry.reason, detail=entry.detail))
    return found


def listed(failure: Failure) -> bytes:
    """A line of the list."""
    return failure.as_json().encode(errors="backslashreplace")


@dataclass(slots=True)
class Counts:
    """Of a file of answers."""

    lines: set[int] = field(default_factory=set)
    truncated: int = 0
    answers: int = 0
    inexact: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0

    @classmethod
    def of(cls, path: Path) -> Counts:
        counts = cls()
        with open(path, "rb") as file:
            for raw in file:
                written = ANSWERED.decode(raw)
                turns = written.generate.turns
                counts.lines.add(written.generate.line)
                counts.truncated += written.finish_reason == "length"
                counts.answers += len(turns)
                counts.inexact += sum(turn.exact is False for turn in turns)
                counts.prompt_tokens += sum(turn.prompt_tokens for turn in turns)
                counts.completion_tokens += sum(turn.completion_tokens for turn in turns)
        return counts
