"""The list of failed samples while a run goes: a line as soon as a sample is given up.

What counts is in the records of committed shards; the list is made anew from them when a run ends, with what only the
list knows (tries, time) carried over. Until then it may name samples of a shard that is never committed. Leaves when it
is made anew to `extractor.account`, its form to `extractor.report`.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from extractor.prompts import Sample
from extractor.report import Failure
from extractor.watch.events import Deaf
from extractor.watch.lines import LineFile
from extractor.words import counted
from hsstore.console import warn
from hsstore.records import ShardRecord

NO_REASON = "no reason was recorded"


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


class FailureList(Deaf):
    """A `Watcher` that appends each failure to the list."""

    def __init__(
        self,
        path: Path,
        samples: Mapping[int, Sample],
        offset: int = 0,
        *,
        now: Callable[[], str] = _now,
        say: Callable[[str], None] = warn,
    ) -> None:
        """`samples` by source_index in the store, `offset` what was added to a line number there."""
        self._path, self._samples, self._offset = path, samples, offset
        self._now, self._say = now, say
        self._file: LineFile | None = None
        self.unlisted = 0
        """Failures that the file did not take; the end of the run lists them all."""

    def sample_failed(self, source_index: int, reason: str, tries: int) -> None:
        failure = failed_sample(
            self._samples[source_index], source_index, self._offset, reason, {"tries": tries, "time": self._now()}
        )
        error = self._append(failure.as_json())
        if error is not None:
            self.unlisted += 1
            if self.unlisted == 1:
                self._say(
                    f"the list of failed lines {self._path} takes no line now ({error.strerror}); the run goes on"
                )

    def _append(self, line: str) -> OSError | None:
        if self._file is None:
            self._file = LineFile(str(self._path))
        return self._file.write(line)

    def run_finished(self, written: int, failed: int, skipped: int, remaining: int) -> None:
        self.close()

    def run_failed(self, kind: str, reason: str) -> None:
        if self.unlisted:
            self._say(f"{counted(self.unlisted, 'failed sample')} not listed in {self._path}: --resume lists them all")
        self.close()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def failed_sample(
    sample: Sample, source_index: int, offset: int, detail: str, remembered: Mapping[str, Any] | None = None
) -> Failure:
    """The entry of a sample that the engine gave no states for."""
    known = remembered or {}
    return Failure(
        line=source_index + 1 - offset,
        status="failed",
        reason="engine",
        detail=detail,
        source_index=source_index,
        id=sample.id,
        uid=sample.uid,
        n_tokens=len(sample.input_ids),
        tries=known.get("tries"),
        time=known.get("time", ""),
    )


def committed_failures(
    records: Iterable[ShardRecord], samples: Mapping[int, Sample], offset: int, path: Path
) -> list[Failure]:
    """Of the samples whose last word in the records is that they have no states; `path` is the list as it was."""
    reasons: dict[int, str] = {}
    good: set[int] = set()
    for record in sorted(records, key=lambda r: r.shard):
        for s in record.samples:
            if s.ok:
                good.add(s.source_index)
            else:
                reasons[s.source_index] = record.failures.get(str(s.source_index), NO_REASON)
    remembered = remember(path) if reasons.keys() - good else {}
    return [
        failed_sample(samples[i], i, offset, reason, remembered.get((i, reason)))
        for i, reason in sorted(reasons.items())
        if i not in good
    ]


def remember(path: Path) -> dict[tuple[int, str], dict[str, Any]]:
    """What a list says of failed samples, by source_index and detail. What is no line of ours is passed over: the
    list is only a memory, and is made anew."""
    found: dict[tuple[int, str], dict[str, Any]] = {}
    try:
        lines = path.read_bytes().splitlines()
    except OSError:  # none, or none that can be read: then tries and times are not known
        return found
    for line in lines:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        match row:
            case {"status": "failed", "source_index": int(i), "detail": str(detail), "tries": int(n), "time": str(t)}:
                found[i, detail] = {"tries": n, "time": t}
    return found
