"""Writing a store: create it, stage a shard, seal it, commit it, publish it.

The commit protocol (docs/design/002-commit.md): stage under a name unique to the attempt; digest and fsync the files;
commit by linking a record that must not exist yet; publish by linking the staged files to their final names. A crash
before the record leaves garbage in staging/, a crash after it leaves work that anyone opening for writing finishes.
Correct for any number of writers. Leaves to the extractor what the rows hold.

Letters: T tokens of a sample, S rows of a shard, C rows of a block, H hidden size.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import platform
import secrets
import shutil
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hsstore import __version__, durable, layout, manifest, paths, zarrmeta
from hsstore.digest import digest_file, encode_blocks, sha256_file
from hsstore.errors import ConflictError, DamagedError, UsageError
from hsstore.records import (
    FLAG_FAILED,
    FORMAT,
    ArraySpec,
    ArrayStatistics,
    Capture,
    FileEntry,
    InputSummary,
    LayoutRecord,
    SampleEntry,
    ShardRecord,
    Split,
    StoreHeader,
    canonical,
    sealed,
)
from hsstore.statistics import Accumulator

Tokens = Mapping[int, tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]]


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


class StoreWriter:
    """A store opened for writing. Opening rolls committed shards forward; nothing else is changed."""

    def __init__(self, root: Path, header: StoreHeader, layout_record: LayoutRecord) -> None:
        self.root = root
        self.header = header
        self.layout = layout_record

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
        if rows % chunk or rows & (rows - 1):
            raise UsageError(f"shard rows must be a power of two and a multiple of {chunk}, found {rows}")
        header = sealed(
            StoreHeader(
                format=FORMAT,
                uuid=str(uuid.uuid4()),
                created=_now(),
                capture=capture,
                shard_rows=rows,
                chunk_rows=chunk,
                arrays=layout.arrays_of(capture),
                split=split,
            )
        )
        shards = layout.assign(samples, rows)
        record = sealed(
            LayoutRecord(
                format=FORMAT,
                store_uuid=header.uuid,
                first_shard=0,
                shards=layout.shard_plans(shards),
                n_samples=len(samples),
                n_tokens=sum(s.n_tokens for s in samples),
                layout_sha256=layout.layout_sha256(shards),
                input=input_summary,
            )
        )
        _create_directory(root, header, record)
        return cls(root, header, record)

    @classmethod
    def open(cls, root: str | Path) -> StoreWriter:
        """Open an existing store for writing and finish the publication of every committed shard.

        Raises `NotFoundError` when there is no store, `FormatError` or `DamagedError` when it cannot be trusted.
        """
        root = Path(root)
        header = manifest.load_header(root)
        layouts = manifest.load_layouts(root, header)
        if len(layouts) != 1:
            raise DamagedError(f"{root / paths.LAYOUTS} holds {len(layouts)} layouts, expected 1")
        writer = cls(root, header, layouts[0])
        for record in manifest.load_records(root, header):
            writer.publish(record)
        return writer

    def todo(self) -> list[int]:
        """Shards of the layout without a record, ascending."""
        done = set(paths.numbers_in(self.root / paths.RECORDS))
        first = self.layout.first_shard
        return [n for n in range(first, first + len(self.layout.shards)) if n not in done]

    def check_layout(self, shards: Sequence[Sequence[SampleEntry]]) -> None:
        """Raise `ConflictError` unless these are the samples that the store was laid out for."""
        found = layout.layout_sha256(shards)
        if found != self.layout.layout_sha256:
            n = sum(map(len, shards))
            raise ConflictError(
                f"{self.root} was laid out for {self.layout.n_samples} samples of {self.layout.input.name!r}"
                f" (layout {self.layout.layout_sha256[:12]}); this input gives {n} samples (layout {found[:12]})",
                hint="extract into a new store, or give the original prompts file and options",
            )

    def stage(self, shard: int, entries: Sequence[SampleEntry], tokens: Tokens) -> StagedShard:
        """Make the files of a new attempt at a shard, full size and sparse, its token arrays filled in.

        `tokens[source_index]` = (input_ids int32 [T], loss_mask uint8 [T]) of each entry.
        """
        return StagedShard(self, shard, entries, tokens)

    def publish(self, record: ShardRecord) -> None:
        """Step 3 of the protocol, idempotent: every staged file gets its final name, then staging goes."""
        directory = paths.staging(self.root, record.shard, record.attempt)
        for spec in self.header.arrays:
            relative = zarrmeta.chunk_path(spec, record.shard)
            self._publish_file(directory / paths.staged_name(spec.name), relative, record.files[relative])
        shutil.rmtree(directory, ignore_errors=True)

    def _publish_file(self, staged: Path, relative: str, entry: FileEntry) -> None:
        final = self.root / relative
        durable.make_dirs(final.parent)
        try:
            done = durable.link_new(staged, final) or durable.same_file(staged, final)
        except FileNotFoundError:
            done = final.exists()  # another one has published it and removed the staged name
        if not done and not (final.stat().st_size == entry.bytes and sha256_file(final) == entry.sha256):
            raise DamagedError(
                f"{relative} is not the file that its record commits", hint=f"run `hsstore verify manifest {self.root}`"
            )
        durable.fsync_dir(final.parent)

    def finish(self) -> str:
        """Rebuild what is derived (manifest, checksums, index) from the records. Returns the manifest_id."""
        return manifest.write(self.root)

    def abandoned(self) -> list[Path]:
        """Staging directories of attempts that never committed: garbage, or the work of a running writer."""
        directory = self.root / paths.STAGING
        return sorted(p for p in directory.iterdir() if p.is_dir()) if directory.is_dir() else []


class StagedShard:
    """One attempt at one shard: its files are invisible to readers until `commit`."""

    def __init__(self, writer: StoreWriter, shard: int, entries: Sequence[SampleEntry], tokens: Tokens) -> None:
        self.writer = writer
        self.shard = shard
        self.entries = tuple(entries)
        self.attempt = secrets.token_hex(8)
        self.n_rows = layout.rows_in_use(entries)
        self.failures: dict[int, str] = {}
        self.directory = paths.staging(writer.root, shard, self.attempt)
        durable.make_dirs(self.directory)  # staging/ too: a copy of a store may come without empty directories
        try:
            self._make_files(tokens)
        except BaseException:
            self.abandon()
            raise

    @property
    def files(self) -> dict[str, str]:
        """Absolute path of each staged hidden file by state name (`after_2` …, `final`)."""
        return {
            spec.name.removeprefix("hidden/"): str(self._path(spec).absolute())
            for spec in self.writer.header.arrays
            if spec.name.startswith("hidden/")
        }

    def _path(self, spec: ArraySpec) -> Path:
        return self.directory / paths.staged_name(spec.name)

    def _make_files(self, tokens: Tokens) -> None:
        header = self.writer.header
        for spec in header.arrays:
            with open(self._path(spec), "xb") as file:
                file.truncate(zarrmeta.data_bytes(spec, self.n_rows, header.chunk_rows))
        columns = {"tokens/input_ids": np.zeros(self.n_rows, "<i4"), "tokens/loss_mask": np.zeros(self.n_rows, "u1")}
        for e in self.entries:
            ids, mask = tokens[e.source_index]
            if len(ids) != e.n_tokens or len(mask) != e.n_tokens:
                raise ValueError(f"sample {e.source_index} has {len(ids)} ids, its place has {e.n_tokens} rows")
            columns["tokens/input_ids"][e.row : e.row + e.n_tokens] = ids
            columns["tokens/loss_mask"][e.row : e.row + e.n_tokens] = mask
        for name, column in columns.items():
            with open(self._path(header.array(name)), "r+b") as file:
                file.write(column.tobytes())

    def fail(self, source_index: int, reason: str) -> None:
        """Note that a sample has no states: its rows become zeros, it is flagged, no plan takes it."""
        self.failures[source_index] = reason

    def commit(self) -> ShardRecord | None:
        """Seal and commit. Returns the record, or None when another attempt at this shard was first.

        An error of the file system abandons the attempt and is raised: a failed fsync is never tried again.
        """
        header = self.writer.header
        try:
            self._clear_failed()
            files, statistics = {}, {}
            for spec in header.arrays:
                entry, stats = self._seal(spec)
                files[zarrmeta.chunk_path(spec, self.shard)] = entry
                if stats is not None:
                    statistics[spec.name] = stats
            durable.fsync_dir(self.directory)
            record = sealed(self._record(files, statistics))
            won = durable.write_new(paths.record(self.writer.root, self.shard), canonical(record))
        except BaseException:
            # Once a record may have its name, staging is what publishing needs: only roll-forward may end it.
            if not paths.record(self.writer.root, self.shard).exists():
                self.abandon()
            raise
        if not won:
            self.abandon()
            return None
        self.writer.publish(record)
        return record

    def abandon(self) -> None:
        """Drop the attempt. Committed shards are never touched by this."""
        shutil.rmtree(self.directory, ignore_errors=True)

    def _clear_failed(self) -> None:
        for e in self.entries:
            if e.source_index not in self.failures:
                continue
            for spec in self.writer.header.arrays:
                if spec.name.startswith("hidden/"):
                    with open(self._path(spec), "r+b") as file:
                        zeros = memoryview(bytes(e.n_tokens * spec.row_bytes))
                        durable.pwrite_all(file.fileno(), zeros, e.row * spec.row_bytes)

    def _seal(self, spec: ArraySpec) -> tuple[FileEntry, ArrayStatistics | None]:
        header, path = self.writer.header, self._path(spec)
        size = zarrmeta.data_bytes(spec, self.n_rows, header.chunk_rows)
        if path.stat().st_size != size:
            raise DamagedError(f"{path.name} of shard {self.shard} has {path.stat().st_size} bytes, expected {size}")
        footer = zarrmeta.footer(spec, n_rows=self.n_rows, shard_rows=header.shard_rows, chunk_rows=header.chunk_rows)
        with open(path, "ab") as file:
            file.write(footer)
        accumulator = Accumulator(self.n_rows, header.chunk_rows, spec) if spec.row_shape else None
        digest = digest_file(
            path,
            block_bytes=header.chunk_rows * spec.row_bytes,
            n_blocks=zarrmeta.used_blocks(self.n_rows, header.chunk_rows),
            visit=accumulator.add if accumulator else None,
        )
        durable.fsync_file(path)
        os.chmod(path, 0o444)
        entry = FileEntry(bytes=digest.n_bytes, sha256=digest.sha256, crc32c_blocks=encode_blocks(digest.blocks))
        return entry, accumulator.result() if accumulator else None

    def _record(self, files: dict[str, FileEntry], statistics: dict[str, ArrayStatistics]) -> ShardRecord:
        samples = tuple(
            SampleEntry(e.uid, e.source_index, e.row, e.n_tokens, FLAG_FAILED if e.source_index in self.failures else 0)
            for e in self.entries
        )
        return ShardRecord(
            format=FORMAT,
            store_uuid=self.writer.header.uuid,
            shard=self.shard,
            attempt=self.attempt,
            n_rows=self.n_rows,
            samples=samples,
            files=files,
            statistics=statistics,
            failures={str(k): v for k, v in sorted(self.failures.items())},
            writer={"hsstore": __version__, "host": platform.node(), "pid": str(os.getpid())},
            committed=_now(),
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
