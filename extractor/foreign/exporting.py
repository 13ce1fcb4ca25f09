"""One export from start to end: what can be written, one sample at a time, what lies beside the files, account.

Every block of C rows that a sample lies in is compared with its CRC32C before the sample is written, so a damaged store
is not spread. A file that is there was written whole by an earlier run of the same export and is kept.

Letters: T tokens, C rows of a block.
"""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass, field

import numpy as np

from extractor.foreign import finalnorm, formats, record
from extractor.foreign.conventions import CONVENTIONS, Convention
from extractor.foreign.files import remove_leftovers, write_whole
from extractor.foreign.outgoing import Outgoing, Place, Writer
from extractor.foreign.report import ExportOutcome, Failure, warn_failures, write_failures
from extractor.foreign.sample import Norm
from extractor.foreign.settings import ExportSettings
from extractor.verifier import read_verifier
from hsstore import index
from hsstore.console import Progress, human_bytes
from hsstore.digest import crc32c
from hsstore.errors import ConflictError, DamagedError, HsstoreError, UsageError
from hsstore.records import Capture
from hsstore.store import Store


def run(settings: ExportSettings) -> ExportOutcome:
    """Export. Raises the errors of `hsstore.errors`; whatever is raised, files that were written stay and are whole."""
    if settings.out.absolute().is_relative_to(settings.store.absolute()):
        raise UsageError(f"--out {settings.out} lies inside the store", hint="give a place beside it")
    started = time.time()
    with Store(settings.store, backend="pread") as store:  # maps of a whole store would fill the memory with its pages
        convention = CONVENTIONS[settings.format]
        norm = _norm_of(settings, store.capture, convention)
        applied = finalnorm.load(read_verifier(settings.model or ""), store.capture) if norm.applied else None
        capture = dataclasses.replace(store.capture, norm=norm.side, flags=store.capture.flags | norm.flags)
        places, n_failed = _chosen(store, settings)
        if not places:
            raise UsageError(f"{settings.store} has no sample with states in --split {settings.split}")
        made = record.make(settings.format, store.manifest_id, _options(settings), capture)
        record.begin(settings.out, made)
        writer = formats.open_target(settings, store, norm.side)
        export = _Export(settings, store, writer, norm.side, applied)
        with Progress(len(places), f"exporting to {settings.out.name}", unit="samples") as progress:
            for place in places:
                export.one(place)
                progress.update(progress.done + 1, f"{human_bytes(export.n_bytes / max(1e-9, progress.seconds))}/s")
        writer.finish(export.done, capture)
        remove_leftovers(settings.out, started)
        return export.outcome(len(places) + n_failed, n_failed, capture, progress.seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class _NormChoice:
    side: Norm
    applied: bool

    @property
    def flags(self) -> dict[str, str]:
        return {"export.norm": "computed from the states before it"} if self.applied else {}


def _norm_of(settings: ExportSettings, capture: Capture, convention: Convention) -> _NormChoice:
    """The side of the norm that the export is on. Raises `ConflictError` where the format wants the other one."""
    if settings.gzip and settings.format != "specforge":
        raise UsageError("--gzip is for specforge; the other formats are read as they are")
    if len(capture.layers) < 2 or capture.layers[-1] != "final":
        raise ConflictError(
            f"the store holds {', '.join(capture.layers)}; {convention.name} files have auxiliary states, too",
            hint="extract with --layers eagle3",
        )
    if settings.apply_norm:
        if capture.norm == "post":
            raise UsageError("--apply-norm: the states of this store are after the norm already", hint="leave it out")
        if settings.model is None:
            raise UsageError("--apply-norm needs the model's norm", hint="give --model DIR")
        if "post" not in convention.writes:
            raise UsageError(f"--apply-norm: {convention.name} files hold states before the norm", hint="leave it out")
        return _NormChoice(side="post", applied=True)
    if capture.norm in convention.writes:
        return _NormChoice(side=capture.norm, applied=False)
    if capture.norm == "post":
        raise ConflictError(
            f"{convention.name} files hold the final state before the model's norm, this store has it after:"
            " the norm cannot be undone",
            hint="export to specforge, torchspec or modelopt",
        )
    raise ConflictError(
        f"{convention.name} files hold the final state after the model's norm, this store has it before",
        hint="--apply-norm --model DIR computes it (not bit-equal to an engine's); or export to speculators",
    )


def _options(settings: ExportSettings) -> dict[str, str]:
    return {
        "split": settings.split,
        "limit": "" if settings.limit is None else str(settings.limit),
        "apply-norm": "yes" if settings.apply_norm else "",
        "gzip": "yes" if settings.gzip else "",
    }


def _chosen(store: Store, settings: ExportSettings) -> tuple[list[Place], int]:
    """Samples with states in ascending source_index, and how many of the split have none."""
    columns, split = store.index, store.header.split
    validation, usable = index.in_validation(columns, split), index.usable(columns)
    wanted = np.ones(len(columns), bool)
    if settings.split != "all":
        wanted = validation if settings.split == "validation" else ~validation
    rows = np.flatnonzero(wanted)[: settings.limit]
    good = [int(i) for i in rows if usable[i]]
    places = [
        Place(
            number=number,
            row=i,
            source_index=int(columns.source_index[i]),
            n_tokens=int(columns.n_tokens[i]),
            split="validation" if validation[i] else "train",
        )
        for number, i in enumerate(good)
    ]
    return places, len(rows) - len(good)


@dataclass(slots=True)
class _Export:
    settings: ExportSettings
    store: Store
    writer: Writer
    norm: Norm
    final_norm: finalnorm.FinalNorm | None
    done: list[Place] = field(default_factory=list)
    n_written: int = 0
    n_bytes: int = 0
    damaged: list[Failure] = field(default_factory=list)

    def one(self, place: Place) -> None:
        """Write the file of one sample, or find it there, or note why not."""
        path = self.writer.path(place)
        if not path.exists():
            try:
                sample = self._sample(place)
            except DamagedError as error:
                self._note_damage(place, error)
                return
            write_whole(path, lambda at: self.writer.write(sample, at))
            self.n_written += 1
        self.n_bytes += path.stat().st_size
        self.done.append(place)

    def _note_damage(self, place: Place, error: DamagedError) -> None:
        name = f"sample {place.source_index}"
        self.damaged.append(Failure(file=name, status="damaged", reason="damaged", detail=error.message))

    def _sample(self, place: Place) -> Outgoing:
        i = place.row
        for array in (f"hidden/{state}" for state in self.store.layers):
            _check_blocks(self.store, i, array)
        for array in ("tokens/input_ids", "tokens/loss_mask"):
            _check_blocks(self.store, i, array)
        states = [np.array(self.store.hidden(i, state)) for state in self.store.layers]
        if self.final_norm is not None:
            states[-1] = self.final_norm.apply(states[-1])
        return Outgoing(
            place=place,
            input_ids=np.array(self.store.input_ids(i)),
            loss_mask=np.array(self.store.loss_mask(i)),
            states=tuple(states),
            norm=self.norm,
        )

    def outcome(self, n_asked: int, n_failed: int, capture: Capture, seconds: float) -> ExportOutcome:
        listed = write_failures(self.settings.report, self.damaged)
        warn_failures(self.damaged, listed)
        outcome = ExportOutcome(
            directory=str(self.settings.out),
            format=self.settings.format,
            manifest_id=self.store.manifest_id,
            asked=n_asked,
            written=self.n_written,
            kept=len(self.done) - self.n_written,
            failed=n_failed,
            damaged=len(self.damaged),
            layers=capture.layers,
            norm=capture.norm,
            tokens=sum(place.n_tokens for place in self.done),
            bytes=self.n_bytes,
            seconds=round(seconds, 3),
            failures_file=listed,
        )
        if outcome.written + outcome.kept + outcome.failed + outcome.damaged != outcome.asked:
            raise HsstoreError(f"{outcome.balance} does not come out", hint="run `hsstore verify manifest`")
        return outcome


def _check_blocks(store: Store, i: int, array: str) -> None:
    """Raise `DamagedError` unless the blocks that hold a sample are those that were committed."""
    chunk, columns = store.header.chunk_rows, store.index
    shard, row, n_rows = int(columns.shard[i]), int(columns.row[i]), int(columns.n_tokens[i])
    crcs = store.block_crcs(array, shard)
    for block in range(row // chunk, -(-(row + n_rows) // chunk)):
        if crc32c(store.rows(array, shard, block * chunk, chunk)) != int(crcs[block]):
            first, last = block * chunk, (block + 1) * chunk - 1
            raise DamagedError(f"rows {first} to {last} of {array} in shard {shard} are not those that were committed")
