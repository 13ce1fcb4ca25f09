"""One attempt at one shard: its files staged, sealed, committed.

Responsible for steps 1 to 3 of the commit protocol (docs/design/002-commit.md): files under a name unique to the
attempt, digests and fsync, the record by a link that must not exist yet. Leaves publication to `publishing`, and to
the extractor what the rows hold.

Letters: T tokens of a sample, S rows of a shard, C rows of a block, H hidden size.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import platform
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hsstore import __version__, durable, layout, owner, paths, zarrmeta
from hsstore.errors import DamagedError
from hsstore.publishing import publish
from hsstore.records import (
    FLAG_FAILED,
    FORMAT,
    ArraySpec,
    ArrayStatistics,
    FileEntry,
    SampleEntry,
    ShardRecord,
    StoreHeader,
    canonical,
    sealed,
)
from hsstore.sealing import seal

Tokens = Mapping[int, tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]]


def now() -> str:
    """UTC, ISO 8601."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def this_writer() -> dict[str, str]:
    """Who writes, for people."""
    return {"hsstore": __version__, "host": platform.node(), "pid": str(os.getpid())}


class StagedShard:
    """One attempt at one shard: its files are invisible to readers until `commit`."""

    def __init__(
        self, root: Path, header: StoreHeader, shard: int, entries: Sequence[SampleEntry], tokens: Tokens
    ) -> None:
        """Raises `DamagedError` when files of the shard lie at their final places without a record."""
        self.root = root
        self.header = header
        self.shard = shard
        self.entries = tuple(entries)
        self.attempt = secrets.token_hex(8)
        self.n_rows = layout.rows_in_use(entries)
        self.failures: dict[int, str] = {}
        self.directory = paths.staging(root, shard, self.attempt)
        self._refuse_ownerless()
        durable.make_dirs(self.directory, root)  # staging/ too: a copy of a store may come without empty directories
        try:
            owner.mark(self.directory)
            self._make_files(tokens)
        except BaseException:
            self.abandon()
            raise

    @property
    def files(self) -> dict[str, str]:
        """Absolute path of each staged hidden file by state name (`after_2` …, `final`)."""
        return {
            spec.name.removeprefix("hidden/"): str(self._path(spec).absolute())
            for spec in self.header.arrays
            if spec.name.startswith("hidden/")
        }

    def _path(self, spec: ArraySpec) -> Path:
        return self.directory / paths.staged_name(spec.name)

    def _refuse_ownerless(self) -> None:
        # Files first, then the record: files that were published meanwhile have a record by then.
        there = [p for p in (zarrmeta.chunk_path(spec, self.shard) for spec in self.header.arrays) if self._has(p)]
        if there and not paths.record(self.root, self.shard).exists():
            raise DamagedError(
                f"shard {self.shard} has files ({there[0]}) but no record: its record was lost",
                hint=f"run `hsstore repair {self.root} --from REPLICA`, or give it up with"
                f" `hsstore quarantine {self.root} --shard {self.shard} --reason …` and extract again",
            )

    def _has(self, relative: str) -> bool:
        return (self.root / relative).exists()

    def _make_files(self, tokens: Tokens) -> None:
        header = self.header
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
        header = self.header
        try:
            self._clear_failed()
            done = seal({spec.name: self._path(spec) for spec in header.arrays}, header, self.n_rows)
            files = {zarrmeta.chunk_path(spec, self.shard): done[spec.name][0] for spec in header.arrays}
            statistics = {name: found for name, (_, found) in done.items() if found is not None}
            durable.fsync_dir(self.directory)
            record = sealed(self._record(files, statistics))
            won = durable.write_new(paths.record(self.root, self.shard), canonical(record))
        except BaseException:
            # Once a record may have its name, staging is what publishing needs: only roll-forward may end it.
            if not self._may_be_committed():
                self.abandon()
            raise
        if not won:
            self.abandon()
            return None
        publish(self.root, self.header, record)
        return record

    def _may_be_committed(self) -> bool:
        try:
            paths.record(self.root, self.shard).stat()
        except FileNotFoundError:
            return False
        except OSError:
            return True  # not known: then nothing is dropped that a record may rest on
        return True

    def abandon(self) -> None:
        """Drop the attempt. Committed shards are never touched by this."""
        with contextlib.suppress(OSError):  # `hsstore gc` takes what is left, once this process is gone
            owner.remove(self.directory)

    def _clear_failed(self) -> None:
        for e in self.entries:
            if e.source_index not in self.failures:
                continue
            for spec in self.header.arrays:
                if spec.name.startswith("hidden/"):
                    with open(self._path(spec), "r+b") as file:
                        zeros = memoryview(bytes(e.n_tokens * spec.row_bytes))
                        durable.pwrite_all(file.fileno(), zeros, e.row * spec.row_bytes)

    def _record(self, files: dict[str, FileEntry], statistics: dict[str, ArrayStatistics]) -> ShardRecord:
        samples = tuple(
            SampleEntry(e.uid, e.source_index, e.row, e.n_tokens, FLAG_FAILED if e.source_index in self.failures else 0)
            for e in self.entries
        )
        return ShardRecord(
            format=FORMAT,
            store_uuid=self.header.uuid,
            shard=self.shard,
            attempt=self.attempt,
            n_rows=self.n_rows,
            samples=samples,
            files=files,
            statistics=statistics,
            failures={str(k): v for k, v in sorted(self.failures.items())},
            writer=this_writer(),
            committed=now(),
        )
