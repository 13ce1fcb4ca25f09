"""Writing a store: create it, grow it, take a shard, finish it.

The commit protocol stands in docs/design/002-commit.md. Correct for any number of writers without a lock: a store
appears whole, a layout is added by a link that must not exist yet, a shard belongs to the attempt whose record was
first. Leaves one attempt at a shard to `staged`, publication to `publishing`, which shards are worth doing to the
caller.

Letters: T tokens of a sample, S rows of a shard, C rows of a block, H hidden size.
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
import uuid
from collections.abc import Sequence
from pathlib import Path

from hsstore import durable, layout, manifest, paths, zarrmeta
from hsstore.errors import ConflictError, UsageError
from hsstore.publishing import publish, roll_forward
from hsstore.records import (
    FORMAT,
    OMITTED,
    Capture,
    Derivation,
    InputSummary,
    LayoutRecord,
    SampleEntry,
    ShardRecord,
    Split,
    StoreHeader,
    Tombstone,
    canonical,
    sealed,
)
from hsstore.staged import StagedShard, Tokens, now

__all__ = ["StagedShard", "StoreWriter", "Tokens"]


class StoreWriter:
    """A store opened for writing. Opening finishes what a crash left half done; nothing else is changed."""

    def __init__(
        self,
        root: Path,
        header: StoreHeader,
        layouts: Sequence[LayoutRecord],
        tombstones: Sequence[Tombstone] = (),
    ) -> None:
        self.root = root
        self.header = header
        self.layouts = list(layouts)
        self.quarantined = manifest.quarantined(tombstones)

    @property
    def layout(self) -> LayoutRecord:
        """The first layout: of the input that the store was created for."""
        return self.layouts[0]

    @classmethod
    def create(
        cls,
        root: str | Path,
        *,
        capture: Capture,
        split: Split,
        samples: Sequence[SampleEntry],
        input_summary: InputSummary,
        shard_rows: int | None = None,
        chunk_rows: int | None = None,
        derived_from: Derivation | None = None,
    ) -> StoreWriter:
        """Create a store whose layout is fixed by the samples' lengths (their `row` is ignored).

        The directory appears whole or not at all. Raises `ConflictError` when something lies there already,
        `UsageError` without samples or for a sample that does not fit into a shard.
        """
        root = Path(root)
        if not samples:
            raise UsageError("a store needs at least one sample, found none", hint="look at the rejected input lines")
        _refuse_duplicates(samples)
        rows, chunk = layout.choose_shape(
            n_tokens=sum(s.n_tokens for s in samples),
            longest=max(s.n_tokens for s in samples),
            hidden_size=capture.hidden_size,
            chunk_rows=chunk_rows,
        )
        rows = shard_rows or rows
        layout.check_shard_rows(rows, chunk)
        header = sealed(
            StoreHeader(
                format=FORMAT,
                uuid=str(uuid.uuid4()),
                created=now(),
                capture=capture,
                shard_rows=rows,
                chunk_rows=chunk,
                arrays=layout.arrays_of(capture),
                split=split,
                derived_from=derived_from or OMITTED,
            )
        )
        record = _layout_record(header, samples, input_summary)
        _create_directory(root, header, record)
        return cls(root, header, [record])

    @classmethod
    def open(cls, root: str | Path) -> StoreWriter:
        """Open an existing store for writing; finish the publication of every committed shard, and growth.

        Raises `NotFoundError` when there is no store, `FormatError` or `DamagedError` when it cannot be trusted.
        """
        root = Path(root)
        header = manifest.load_header(root)
        layouts, tombstones = manifest.load_layouts(root, header), manifest.load_tombstones(root, header)
        writer = cls(root, header, layouts, tombstones)
        records = manifest.load_records(root, header)
        manifest.settle(root)
        roll_forward(root, header, records)
        writer._write_zarr_documents()
        return writer

    def todo(self) -> list[int]:
        """Shards of every layout that have no record and are not quarantined, ascending."""
        done = set(paths.numbers_in(self.root / paths.RECORDS)) | set(self.quarantined)
        return [n for lay in self.layouts for n in lay.numbers if n not in done]

    def check_layout(self, shards: Sequence[Sequence[SampleEntry]], number: int = 0) -> None:
        """Raise `ConflictError` unless these are the samples that layout `number` was made for."""
        expected = self.layouts[number]
        found = layout.layout_sha256(shards)
        if found != expected.layout_sha256:
            n = sum(map(len, shards))
            raise ConflictError(
                f"{self.root} was laid out for {expected.n_samples} samples of {expected.input.name!r}"
                f" (layout {expected.layout_sha256[:12]}); this input gives {n} samples (layout {found[:12]})",
                hint="extract into a new store, or give the original prompts file and options",
            )

    def next_source_index(self) -> int:
        """What the first line of a further input gets: one past every line of the inputs so far."""
        return max(lay.offset + max(lay.input.lines, 1) for lay in self.layouts)

    def add_layout(
        self, samples: Sequence[SampleEntry], input_summary: InputSummary, *, offset: int = 0, redo: bool = False
    ) -> LayoutRecord:
        """Place further samples behind the last shard: growth, or (`redo`) samples whose shard is quarantined.

        `source_index` of the samples counts over the whole store; `offset` is what was added to a line number.
        Atomic: one file that must not exist yet. Raises `ConflictError` when another process added a layout first
        (open the store again, then decide anew), `UsageError` for a sample that does not fit into a shard.
        """
        if not samples:
            raise UsageError("nothing to place: expected at least one sample")
        _refuse_duplicates(samples)
        if not redo and min(s.source_index for s in samples) < self.next_source_index():
            raise UsageError(f"source_index of further samples must begin at {self.next_source_index()}")
        record = _layout_record(
            self.header,
            samples,
            input_summary,
            first_shard=self.layouts[-1].numbers.stop,
            offset=offset,
            redo=redo,
        )
        number = len(self.layouts)
        path = paths.layout(self.root, number)
        if not durable.write_new(path, canonical(record)) and manifest.load_layout(self.root, self.header, number) != (
            record
        ):
            raise ConflictError(f"{path} was added by another process meanwhile", hint="run the same command again")
        self.layouts.append(record)
        self._write_zarr_documents()
        return record

    def stage(self, shard: int, entries: Sequence[SampleEntry], tokens: Tokens) -> StagedShard:
        """Make the files of a new attempt at a shard, full size and sparse, its token arrays filled in.

        `tokens[source_index]` = (input_ids int32 [T], loss_mask uint8 [T]) of each entry.
        """
        return StagedShard(self.root, self.header, shard, entries, tokens)

    def publish(self, record: ShardRecord) -> None:
        """Give the files of a committed shard their final names. Idempotent."""
        publish(self.root, self.header, record)

    def finish(self) -> str:
        """Rebuild what is derived (manifest, checksums, index) from the records. Returns the manifest_id."""
        return manifest.write(self.root)

    def abandoned(self) -> list[Path]:
        """Staging directories of attempts that never committed: garbage, or the work of a running writer."""
        directory = self.root / paths.STAGING
        return sorted(p for p in directory.iterdir() if p.is_dir()) if directory.is_dir() else []

    def _write_zarr_documents(self) -> None:
        """The shape in each zarr.json follows from the layouts: one that is older, or damaged, is replaced."""
        layouts: Sequence[LayoutRecord] = self.layouts
        while True:
            for relative, document in zarrmeta.documents(self.header, layouts[-1].numbers.stop).items():
                path = self.root / relative
                if not path.is_file() or path.read_bytes() != document:
                    durable.make_dirs(path.parent, self.root)
                    durable.replace(path, document)
            if len(paths.numbers_in(self.root / paths.LAYOUTS)) <= len(layouts):
                return
            # Another process has grown it meanwhile, and ours may have replaced newer ones: who is last has seen all.
            layouts = manifest.load_layouts(self.root, self.header)


def _layout_record(
    header: StoreHeader,
    samples: Sequence[SampleEntry],
    input_summary: InputSummary,
    *,
    first_shard: int = 0,
    offset: int = 0,
    redo: bool = False,
) -> LayoutRecord:
    shards = layout.assign(samples, header.shard_rows)
    return sealed(
        LayoutRecord(
            format=FORMAT,
            store_uuid=header.uuid,
            first_shard=first_shard,
            shards=layout.shard_plans(shards),
            n_samples=len(samples),
            n_tokens=sum(s.n_tokens for s in samples),
            layout_sha256=layout.layout_sha256(shards),
            input=input_summary,
            first_source_index=offset or OMITTED,
            samples=tuple(sorted(s.source_index for s in samples)) if redo else OMITTED,
        )
    )


def _refuse_duplicates(samples: Sequence[SampleEntry]) -> None:
    seen: set[int] = set()
    for s in samples:
        if s.source_index in seen:
            raise UsageError(f"two samples have source_index {s.source_index}; each input line may give one")
        seen.add(s.source_index)


def _create_directory(root: Path, header: StoreHeader, record: LayoutRecord) -> None:
    if root.exists() and (not root.is_dir() or any(root.iterdir())):
        raise ConflictError(f"{root} exists already", hint="give another --out, or --resume to continue a store")
    durable.make_dirs(root.absolute().parent)
    building = root.with_name(f".{root.name}.{secrets.token_hex(8)}.creating")
    try:
        for name in (paths.LAYOUTS, paths.RECORDS, paths.STAGING):
            (building / name).mkdir(parents=True)
        for relative, document in zarrmeta.documents(header, len(record.shards)).items():
            durable.make_dirs((building / relative).parent)
            durable.write_new(building / relative, document)
        durable.write_new(paths.layout(building, 0), canonical(record))
        durable.write_new(building / paths.HEADER, canonical(header))
        durable.fsync_dir(building)
        with contextlib.suppress(OSError):
            root.rmdir()  # an empty directory may be in the way; what is not empty another process has made
        if not durable.rename_new(building, root):
            hint = "run the same with --resume, or give another --out"
            raise ConflictError(f"{root} was created by another process meanwhile", hint=hint)
        durable.fsync_dir(root.absolute().parent)
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise
