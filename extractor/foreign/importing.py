"""One import from start to end: what is there, what it is taken for, first pass, layout, second pass, account.

The order is that of an extraction: what can be wrong with the call is found before anything is read twice, the layout
is fixed from lengths alone, and shards are committed one by one, so an import that was stopped goes on where it was.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from extractor import estimate, fingerprint
from extractor.foreign import formats
from extractor.foreign.assume import Assumed, Question
from extractor.foreign.copying import ShardCopier
from extractor.foreign.record import find
from extractor.foreign.report import Failure, ImportOutcome, warn_failures, write_failures
from extractor.foreign.sample import Item, Reader
from extractor.foreign.scan import Scan, Scanner, first_norm, refuse_nothing
from extractor.foreign.settings import ImportSettings
from extractor.input import digest_weights
from extractor.settings import Settings
from extractor.target import refuse_unwritable
from extractor.verifier import Verifier, read_verifier
from hsstore import garbage, manifest
from hsstore.console import Progress, human_bytes, human_count, note
from hsstore.errors import ConflictError, HsstoreError, NoSpaceError, NotFoundError, UsageError
from hsstore.growth import Placed, layout_of, open_input
from hsstore.records import Capture, Split
from hsstore.writer import StoreWriter


def run(settings: ImportSettings) -> ImportOutcome:
    """Import. Raises the errors of `hsstore.errors`; whatever is raised, committed shards are kept."""
    _refuse(settings)
    plan = _Plan(settings)
    writer, placed = plan.open()
    todo = [number for number in writer.todo() if number in placed]
    plan.refuse_if_full(placed, todo)
    seconds = _copy(plan, writer, placed, todo) if todo else 0.0
    return _finish(plan, writer, placed, seconds)


def _refuse(settings: ImportSettings) -> None:
    """Raise for what can be seen before the directory is read."""
    if not settings.source.is_dir():
        raise NotFoundError(f"there is no directory {settings.source}")
    if settings.out_is_store and not settings.resume:
        raise ConflictError(
            f"{settings.out} is a store already", hint="add --resume to continue it, or give another --out"
        )
    if (
        not settings.out_is_store
        and settings.out.exists()
        and (not settings.out.is_dir() or any(settings.out.iterdir()))
    ):
        raise ConflictError(f"{settings.out} exists and is no store", hint="give another --out")
    if settings.out.absolute().is_relative_to(settings.source.absolute()):
        raise UsageError(f"--out {settings.out} lies inside the imported directory", hint="give a place beside it")
    refuse_unwritable(Settings(model="", prompts=settings.source, out=settings.out, failed_out=settings.failed_out))


class _Plan:
    """All that is known before the first state is copied."""

    def __init__(self, settings: ImportSettings) -> None:
        self.settings = settings
        found = formats.open_source(settings)
        self.reader: Reader = found.reader
        verifier = read_verifier(settings.model) if settings.model else None
        question = Question(settings, found.convention, found.facts, find(settings.source), verifier)
        items = self.reader.items()
        if not items:
            raise UsageError(f"{settings.source} holds no {settings.format} files", hint=found.expected)
        self.assumed: Assumed = question.answer(first_norm(self.reader, items))
        self.scan: Scan = self._scan(items, verifier)
        self.capture: Capture = question.capture(self.assumed, self.scan.hidden_size, self._digest(verifier))
        self.split = Split(salt=settings.split_salt, validation_fraction=settings.validation_fraction)
        self.shape = self._shape()

    def _scan(self, items: list[Item], verifier: Verifier | None) -> Scan:
        record = find(self.settings.source)
        width = verifier.hidden_size if verifier else record.capture.hidden_size if record else None
        scan = Scanner(self.reader, self.settings, self.assumed, width).run(items)
        refuse_nothing(scan, self.settings.source)
        note(
            f"{human_count(len(scan.entries))} of {human_count(len(items))} files are samples:"
            f" {', '.join(self.assumed.layers)} of width {human_count(scan.hidden_size)},"
            f" final {self.assumed.norm}-norm (layers {self.assumed.flags['import.layers']},"
            f" norm {self.assumed.flags['import.norm']})"
        )
        return scan

    def _digest(self, verifier: Verifier | None) -> str:
        return digest_weights(verifier, self.settings.weights_digest or "full") if verifier else ""

    def _shape(self) -> estimate.Shape:
        stored = manifest.load_header(self.settings.out).shard_rows if self.settings.out_is_store else None
        return estimate.shape_of(self.scan.entries, self.scan.hidden_size, self.settings.shard_rows or stored)

    @property
    def bytes_per_token(self) -> int:
        return estimate.bytes_per_token(self.assumed.layers, self.scan.hidden_size)

    def refuse_if_full(self, placed: Placed, todo: list[int]) -> None:
        """Raise `NoSpaceError` when those shards cannot fit."""
        out, shape = self.settings.out, replace(self.shape, shards=placed)
        needed, free = estimate.needed_bytes(shape, todo, self.bytes_per_token), estimate.free_bytes(out)
        if needed > free:
            raise NoSpaceError(
                f"the states need {human_bytes(needed)}, the file system of {out} has {human_bytes(free)} free",
                hint="free space, or give --out on a larger disk",
            )

    def open(self) -> tuple[StoreWriter, Placed]:
        """The store, new or continued, and its shards. Raises `ConflictError` naming all that differs from it."""
        settings = self.settings
        if not settings.out_is_store:
            self.refuse_if_full(dict(self.shape.shards), list(self.shape.shards))
            writer = StoreWriter.create(
                settings.out,
                capture=self.capture,
                split=self.split,
                samples=self.scan.entries,
                input_summary=self.scan.summary,
                shard_rows=settings.shard_rows,
            )
            writer.check_layout(list(self.shape.shards.values()))
            return writer, dict(self.shape.shards)
        header = manifest.load_header(settings.out)
        differences = fingerprint.capture_differences(header.capture, self.capture)
        differences += fingerprint.header_differences(header, self.split, settings.shard_rows)
        layouts = manifest.load_layouts(settings.out, header)
        if layout_of(layouts, self.scan.summary) is None:
            differences.append(f"files: those of {layouts[0].input.name} when it was begun → others, or changed ones")
        fingerprint.refuse(settings.out, differences)
        if freed := garbage.remove(garbage.find(settings.out)):
            note(f"removed {human_bytes(freed)} that a killed run had left in {settings.out}")
        writer, _, placed = open_input(settings.out, self.scan.entries, self.scan.summary)
        return writer, placed


@dataclass(slots=True)
class _Listener:
    progress: Progress
    per_token: int
    n_tokens: int = 0

    def sample_done(self, n_tokens: int) -> None:
        self.n_tokens += n_tokens
        rate = self.n_tokens * self.per_token / max(1e-9, self.progress.seconds)
        self.progress.update(self.progress.done + 1, f"{human_bytes(rate)}/s")


def _copy(plan: _Plan, writer: StoreWriter, placed: Placed, todo: list[int]) -> float:
    copier = ShardCopier(writer, plan.reader, plan.scan, plan.settings, plan.assumed)
    with Progress(sum(len(placed[n]) for n in todo), "importing", unit="samples") as progress:
        listener = _Listener(progress, plan.bytes_per_token)
        for number in todo:
            copier.copy(number, placed[number], listener)
    if copier.n_unchecked:
        note(f"{human_count(copier.n_unchecked)} files carry no checksums: their states were taken as they are")
    return progress.seconds


def _finish(plan: _Plan, writer: StoreWriter, placed: Placed, seconds: float) -> ImportOutcome:
    """Rebuild what is derived, and account for every input."""
    settings, scan = plan.settings, plan.scan
    records = [r for r in manifest.load_records(writer.root, writer.header) if r.shard in placed]
    manifest_id = writer.finish()
    samples = {s.source_index: s for record in records for s in record.samples}
    reasons = {int(i): reason for record in records for i, reason in record.failures.items()}
    failed = [
        Failure(file=scan.items[i].name, status="failed", reason=why.partition(": ")[0], detail=why.partition(": ")[2])
        for i, why in sorted(reasons.items())
    ]
    skipped = [Failure(file=r.name, status="skipped", reason=r.reason, detail=r.detail) for r in scan.rejections]
    listed = write_failures(settings.report, [*skipped, *failed])
    warn_failures([*skipped, *failed], listed)
    outcome = ImportOutcome(
        store=str(settings.out),
        format=plan.assumed.flags["import"],
        manifest_id=manifest_id,
        complete=not writer.todo(),
        read=len(scan.items),
        written=len(samples) - len(failed),
        failed=len(failed),
        skipped=len(skipped),
        remaining=len(scan.entries) - len(samples),
        rejected=_counts([*skipped, *failed]),
        layers=plan.assumed.layers,
        norm=plan.assumed.norm,
        tokens=sum(s.n_tokens for s in samples.values() if s.ok),
        bytes=sum(entry.bytes for record in records for entry in record.files.values()),
        shards=len(records),
        seconds=round(seconds, 3),
        failures_file=listed,
    )
    if outcome.written + outcome.failed + outcome.skipped + outcome.remaining != outcome.read:
        raise HsstoreError(f"{outcome.balance} does not come out", hint="run `hsstore verify manifest`")
    return outcome


def _counts(failures: list[Failure]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for failure in failures:
        counts[failure.reason] = counts.get(failure.reason, 0) + 1
    return dict(sorted(counts.items()))
