"""What people read: sizes and counts as words, notes on stderr, JSON on stdout, progress that fits the terminal.

Data goes to stdout, everything else to stderr. rich is loaded only where a person looks.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import click

_quiet = False


def set_quiet(quiet: bool) -> None:
    """Silence notes and progress (never warnings or errors) for the rest of the process."""
    global _quiet
    _quiet = quiet


def note(text: str) -> None:
    """A line for people, on stderr, unless --quiet."""
    if not _quiet:
        say(text)


def say(text: str) -> None:
    """A line for people, on stderr."""
    with _nobody_need_listen():
        click.echo(text, err=True)


def warn(text: str) -> None:
    """A line that must be seen, on stderr."""
    say(click.style("warning: ", fg="yellow", bold=True) + text if colours() else f"warning: {text}")


@contextlib.contextmanager
def _nobody_need_listen() -> Iterator[None]:
    """A terminal that is gone, a log on a full disk: what is said is lost, the work goes on. A pipe without a reader
    still ends it, as pipes do."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError:
        pass


def echo_json(document: Any) -> None:
    """One JSON document on stdout: records, dataclasses and plain values."""
    import msgspec

    click.echo(msgspec.json.format(msgspec.json.encode(document), indent=2).decode())


def echo_json_line(document: Any) -> None:
    """One JSON document on one line of stdout."""
    import msgspec

    click.echo(msgspec.json.encode(document).decode())


def colours() -> bool:
    return sys.stderr.isatty() and "NO_COLOR" not in os.environ


def human_bytes(n: float) -> str:
    """1536 → '1.54 kB'; decimal units, as disks are sold and `df -H` prints."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(n) < 1000 or unit == "TB":
            return f"{n:.0f} B" if unit == "B" else f"{n:.3g} {unit}" if n < 999.5 else f"{n:,.0f} {unit}"
        n /= 1000
    raise AssertionError


def human_count(n: int) -> str:
    """37312 → '37,312'."""
    return f"{n:,}"


def human_seconds(seconds: float) -> str:
    """4000 → '1 h 06 min'."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def table(rows: list[tuple[str, str]]) -> None:
    """Aligned 'key  value' lines on stdout."""
    width = max((len(k) for k, _ in rows), default=0)
    for key, value in rows:
        click.echo(f"{key:<{width}}  {value}")


class Progress:
    """Progress over a known amount of work, for people.

    A live line on a terminal; elsewhere a plain line at most every `every_seconds`; nothing under --quiet.
    """

    def __init__(self, total: int, label: str, *, unit: str = "", every_seconds: float = 30.0) -> None:
        self.total, self.label, self.unit = total, label, unit
        self.done, self.detail = 0, ""
        self.eta_seconds: float | None = None
        """What is known better than by the share of what is done."""
        self._every, self._start = every_seconds, time.monotonic()
        self._last = self._start
        self._live = sys.stderr.isatty() and not _quiet
        self._bar: Any = None

    def __enter__(self) -> Progress:
        self._start = self._last = time.monotonic()
        if self._live:
            from rich.console import Console
            from rich.progress import BarColumn, TextColumn
            from rich.progress import Progress as RichProgress

            columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[text]}"))
            self._bar = RichProgress(*columns, console=Console(stderr=True), transient=True)
            self._bar.start()
            self._task = self._bar.add_task(self.label, total=max(self.total, 1), text="")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            with _nobody_need_listen():
                self._bar.stop()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._start

    def line(self) -> str:
        """The state as text, e.g. '120/400 samples · 512 tok/s · ETA 4 min 10 s'."""
        counts = f"{self.done:,}/{self.total:,} {self.unit}".strip()
        if self.unit == "bytes":
            counts = f"{human_bytes(self.done)} of {human_bytes(self.total)}"
        parts = [counts, *filter(None, [self.detail])]
        if 0 < self.done < self.total:
            eta = self.eta_seconds
            parts.append(f"ETA {human_seconds(self.seconds * (self.total / self.done - 1) if eta is None else eta)}")
        return " · ".join(parts)

    def update(self, done: int, detail: str = "") -> None:
        """Set how much is done and what else to say (rates, bytes)."""
        self.done, self.detail = done, detail
        now = time.monotonic()
        if self._bar is not None:
            with _nobody_need_listen():
                self._bar.update(self._task, completed=done, total=max(self.total, 1), text=self.line())
        elif now - self._last >= self._every:
            self._last = now
            note(f"{self.label}: {self.line()}")
