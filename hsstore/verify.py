"""Is everything that was committed still there, whole, and nothing else? Streams findings, never changes a byte.

Every depth checks every record's own hash, names, sizes, footers, metadata and small files; `full` and `Part` read
files to the last byte, `Sample` and `Budget` blocks drawn at random. A finding names file, rows, sample ids and source
lines. Never raises on damage. Puts in order what `checks` (the store's own documents), `filecheck` (one shard file),
`depth` (what is read) and `ledger` (what was verified before) do.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hsstore import checks, filecheck, ledger, manifest, paths, plausible
from hsstore.depth import Budget, Choice, Depth, Part, Sample, choose
from hsstore.errors import DamagedError, NotFoundError
from hsstore.filecheck import Outcome, Target
from hsstore.findings import Finding, Summary, damage
from hsstore.known import Known
from hsstore.parallel import cores, unordered
from hsstore.reading import RateLimit, Reading

__all__ = ["Budget", "Depth", "Options", "Part", "Sample", "Verifier"]

_QUICK_JOBS = 16  # one footer after the other is what a network disk is slow at


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How a verification works; none of these changes what it finds."""

    jobs: int | None = None
    """Files that are read at once; as many as cores without it."""
    cached: bool = False
    """Whether the page cache may answer for the disk. `quick` always lets it."""
    bytes_per_second: int | None = None
    """Most that is read, all threads together."""
    state: Path | None = None
    """Directory of the ledger; without it nothing is noted or left out."""
    resume: bool = False
    """Leave out what the last verification of this depth, which did not end, read whole."""
    newer_than_s: float | None = None
    """Leave out what was read whole in the last so many seconds."""


class _Notes:
    """What one run has to do with the ledger. The first error ends that with one warning; verification goes on."""

    def __init__(self, root: Path, depth: Depth, options: Options, warn: Callable[[str], None]) -> None:
        self.root, self.depth, self.options, self.warn = root, str(depth), options, warn
        self.begun = time.time()
        self.history = ledger.History()
        self._ledger: ledger.Ledger | None = None

    def open(self, uuid: str) -> float | None:
        """Begin. Returns since when a file must have been read whole to be left out; None: nothing is left out."""
        if self.options.state is None:
            return None
        self._ledger = ledger.Ledger(uuid, self.options.state)
        with self._guarded() as book:
            self.history = book.read()
        since = None
        if self.options.newer_than_s is not None:
            since = self.begun - self.options.newer_than_s
        elif self.options.resume:
            since = self.history.unfinished(self._store(), self.depth)
        if self.depth != "quick":
            resumed = self.options.resume and since is not None
            self._run(since=since if resumed and since is not None else self.begun)
        return since

    def looked_at(self, outcome: Outcome) -> None:
        """Note a file that is damaged, or was read to its last byte (by quick the page cache may have answered)."""
        ok = not any(f.severity == "damage" for f in outcome.findings)
        if ok and (not outcome.choice.whole or self.depth == "quick"):
            return
        identity, sha256 = ledger.identity(outcome.target.status), outcome.target.sha256[:32]
        with self._guarded() as book:
            book.add(ledger.FileLine(at=time.time(), identity=identity, sha256=sha256, ok=ok))

    def flush(self) -> None:
        with self._guarded() as book:
            book.flush()

    def end(self, summary: Summary) -> None:
        seconds = round(time.time() - self.begun, 3)
        self._run(since=self.begun, ended=True, damage=summary.damage, bytes_read=summary.bytes_read, seconds=seconds)
        with self._guarded() as book:
            book.compact()

    def _run(
        self, *, since: float, ended: bool = False, damage: int = 0, bytes_read: int = 0, seconds: float = 0.0
    ) -> None:
        with self._guarded() as book:
            line = ledger.RunLine(
                at=time.time(),
                depth=self.depth,
                store=self._store(),
                since=since,
                ended=ended,
                damage=damage,
                bytes_read=bytes_read,
                seconds=seconds,
            )
            book.add(line)
            book.flush()

    def _store(self) -> tuple[int, int]:
        try:
            return ledger.store_identity(self.root)
        except OSError:
            return 0, 0  # its store.json went while we looked: no line of it is ever asked for

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[ledger.Ledger]:
        book = self._ledger or ledger.Nowhere()
        try:
            yield book
        except OSError as error:
            self._ledger = None
            self.warn(
                f"what is verified cannot be noted in {book.path}: {(error.strerror or str(error)).lower()};"
                " give another directory by HSSTORE_STATE_DIR"
            )


class Verifier:
    """One verification of one store. `findings()` does the work; `summary` counts it.

    `on_plan` is called when it is known what is read, `on_progress` some times a second while it is, `on_warning` with
    what must be seen.
    """

    def __init__(self, root: str | Path, depth: Depth = "quick", options: Options | None = None) -> None:
        self.root = Path(root)
        self.depth = depth
        self.options = options or Options()
        self.summary = Summary(depth=str(depth), seed=getattr(depth, "seed", None))
        self.since: float | None = None
        """A file that was read whole since then is left out; seconds since 1970."""
        self.on_plan: Callable[[], None] = lambda: None
        self.on_progress: Callable[[], None] = lambda: None
        self.on_warning: Callable[[str], None] = lambda text: None
        self._read_lock = threading.Lock()
        self._notes = _Notes(self.root, depth, self.options, warn=self._warn)

    def findings(self) -> Iterator[Finding]:
        """Every finding as it is met.

        Raises `NotFoundError` when the directory is no store, `FormatError` for a format this release cannot judge.
        """
        for finding in self._run():
            if finding.severity == "damage":
                self.summary.damage += 1
            else:
                self.summary.notes += 1
            yield finding

    def _run(self) -> Iterator[Finding]:
        try:
            header = manifest.load_header(self.root)
            wrong = plausible.header(header) or checks.owner(self.root, header)
        except (DamagedError, NotFoundError) as error:
            if isinstance(error, NotFoundError) and not os.path.isdir(self.root / paths.RECORDS):
                raise
            wrong = error.message.removeprefix(f"{self.root}/")
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            wrong = f"cannot be read: {error.strerror}"
        if wrong:
            yield damage("record", paths.HEADER, f"{wrong}; nothing else can be judged without it")
            return
        self.since = self._notes.open(header.uuid)
        known, found = checks.structure(self.root, header)
        self._count(known)
        yield from found
        targets: list[Target] = []
        for item in self._look(known):
            if isinstance(item, Target):
                targets.append(item)
            else:
                yield item
        work = self._plan(targets)
        self.on_plan()
        yield from self._read(work)
        self._notes.end(self.summary)

    def _count(self, known: Known) -> None:
        summary = self.summary
        summary.shards, summary.open_shards = len(known.records), known.open_shards
        summary.quarantined_shards, summary.manifest_id = len(known.quarantined), known.manifest_id
        summary.samples = sum(s.ok for record in known.records.values() for s in record.samples)
        summary.files = len(known.records) * len(known.header.arrays)

    def _look(self, known: Known) -> Iterator[Target | Finding]:
        """Every file that should be there: where it lies, or why it cannot be read."""
        root = str(self.root)
        for record in known.records.values():
            for spec in known.header.arrays:
                found = filecheck.find(root, known.header, record, spec)
                yield found
                if isinstance(found, Target) and not found.published:
                    yield filecheck.unpublished(found)

    def _read(self, work: Sequence[tuple[Target, Choice]]) -> Iterator[Finding]:
        quick = self.depth == "quick"
        rate = self.options.bytes_per_second
        reading = Reading(
            cached=quick or self.options.cached, rate=RateLimit(rate) if rate else None, on_bytes=self._count_bytes
        )
        jobs = self.options.jobs or (max(cores(), _QUICK_JOBS) if quick else cores())
        outcomes = unordered(
            lambda batch: [filecheck.check(target, choice, reading) for target, choice in batch],
            _batches(work, 16 if quick else 1),
            jobs=max(1, min(jobs, len(work))),
            stop=reading.stop,
            tick=self.on_progress,
        )
        try:
            with contextlib.closing(outcomes):
                for batch in outcomes:
                    for outcome in batch:
                        self._notes.looked_at(outcome)
                        yield from outcome.findings
                    self.on_progress()
        finally:
            self._notes.flush()  # also of an interrupted run

    def _plan(self, targets: Sequence[Target]) -> list[tuple[Target, Choice]]:
        """What is read of each file that is there and was not verified before."""
        choices = choose(self.depth, [target.extent for target in targets])
        work = []
        for target, choice in zip(targets, choices, strict=True):
            if choice.whole and self._was_read(target):
                self.summary.files_skipped += 1
            else:
                work.append((target, choice))
        self.summary.files_whole = sum(choice.whole for _, choice in work)
        self.summary.blocks = sum(len(choice.blocks) for _, choice in work)
        self.summary.bytes_to_read = sum(target.to_read(choice) for target, choice in work)
        return work

    def _was_read(self, target: Target) -> bool:
        at = self._notes.history.verified_at(target.status, target.sha256)
        return self.since is not None and at is not None and at >= self.since

    def _warn(self, text: str) -> None:
        self.on_warning(text)

    def _count_bytes(self, n_bytes: int) -> None:
        with self._read_lock:
            self.summary.bytes_read += n_bytes


def _batches(work: Sequence[tuple[Target, Choice]], size: int) -> Iterator[Sequence[tuple[Target, Choice]]]:
    for start in range(0, len(work), size):
        yield work[start : start + size]
