"""The input, read as a stream: once for its digest, counts and bad lines, and again for the conversations themselves.

Nothing of it is kept in memory but one bit of it a line, so the file may be larger than that. Leaves to `conversation`
what a line means.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from extractor.generate.conversation import Script, Unanswerable, script_of
from extractor.generate.reasons import SKIPPED
from extractor.generate.settings import Turns
from extractor.prompts import LineSource, decode_line
from extractor.reasons import REASONS, Rejected
from extractor.report import Failure
from extractor.words import counted
from hsstore.errors import ConflictError, UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Scan:
    """What the first reading found."""

    name: str
    bytes: int
    sha256: str
    lines: int
    usable: int
    """Lines that can be answered."""
    turns: int
    """Answers that these need."""
    longest: int
    """Characters of the longest line."""
    skipped: list[Failure]
    mark: tuple[int, int, int] | None
    """Of the file before it was read: another one afterwards is another file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line that can be answered."""

    number: int
    """1-based."""
    document: dict[str, Any]
    script: Script


def scan(path: Path, turns: Turns, on_bytes: Callable[[int], None] = lambda _n: None) -> Scan:
    """Read the whole file. Raises `UsageError` when none of its lines can be answered."""
    skipped: list[Failure] = []
    n_lines = usable = n_turns = longest = 0
    with LineSource(path) as source:
        mark = _mark(path)
        for n_lines, raw in enumerate(source, 1):
            found = _read(raw, n_lines, turns)
            if isinstance(found, Failure):
                skipped.append(found)
            else:
                usable += 1
                n_turns += found.script.count(None)
            longest = max(longest, len(raw))
            on_bytes(source.n_bytes)
        if not usable:
            raise UsageError(_nothing(path, n_lines, skipped), hint="see docs/prompts.md for the spellings")
        return Scan(
            name=path.name,
            bytes=source.n_bytes,
            sha256=source.sha256.hexdigest(),
            lines=n_lines,
            usable=usable,
            turns=n_turns,
            longest=longest,
            skipped=skipped,
            mark=mark,
        )


def lines_of(path: Path, turns: Turns, first: Scan) -> Iterator[Line]:
    """The lines that can be answered, in order.

    Raises `ConflictError` when the file is no longer what the first reading found: at once where that shows in its
    size or time, else at its end.
    """
    with LineSource(path) as source:
        for number, raw in enumerate(source, 1):
            if _mark(path) not in (first.mark, None):  # None = removed: it is open here, and its digest decides
                raise _changed(path)
            found = _read(raw, number, turns)
            if isinstance(found, Line):
                yield found
        if source.sha256.hexdigest() != first.sha256:
            raise _changed(path)


def _mark(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def _changed(path: Path) -> ConflictError:
    return ConflictError(
        f"the prompts file {path} was changed while this ran: answers would stand at other lines than they belong to",
        hint="put the old file back and --resume, or give another --out for the new one",
    )


def _read(raw: bytes, number: int, turns: Turns) -> Line | Failure:
    try:
        document = decode_line(raw)
        return Line(number=number, document=document, script=script_of(document, turns))
    except (Rejected, Unanswerable) as r:
        return Failure(line=number, status="skipped", reason=r.reason, detail=r.detail)


def _nothing(path: Path, n_lines: int, skipped: list[Failure]) -> str:
    if not n_lines:
        return f"{path} is empty: expected one JSON object a line"
    first = next((f for f in skipped if f.reason != "blank_line"), skipped[0])
    why = (REASONS | SKIPPED)[first.reason] + (f" [{first.detail}]" if first.detail else "")
    return f"none of the {counted(n_lines, 'line')} of {path} can be answered; line {first.line}: {why}"
