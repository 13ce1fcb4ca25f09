"""A smaller store made from a larger one: some of its samples, some of its states, every byte checked on the way.

Responsible for which bytes go where and for taking up a run that was killed. The new store says what it was taken
from (`StoreHeader.derived_from`); what a sample is, its uid, its source index, its side of the split, stays. Leaves
commits to `writer`, reading to `store`, what was meant to `selection`.

Letters: T tokens of a sample, S rows of a shard, C rows of a block.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hsstore import durable, layout, manifest, paths, plausible, zarrmeta
from hsstore.digest import crc32c, sample_uid
from hsstore.errors import ConflictError, DamagedError, NoSpaceError, NotFoundError, UsageError
from hsstore.index import SplitName
from hsstore.records import ArraySpec, Derivation, InputSummary, SampleEntry, StoreHeader, sha256_hex
from hsstore.selection import choose, layers_of, words_of
from hsstore.staged import StagedShard
from hsstore.store import Store
from hsstore.writer import StoreWriter

_PIECE_BYTES = 8 << 20
_MAX_RECORDED = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """What of a store is taken, as it was typed; `None` takes all."""

    layers: str | None = None
    samples: str | None = None
    split: SplitName = "all"
    limit: int | None = None

    def recorded(self, words: list[str] | None) -> dict[str, str]:
        """As `Derivation.selection`: what was asked for, a long list by its digest."""
        samples = ",".join(words) if words is not None else None
        if samples is not None and len(samples) > _MAX_RECORDED:
            samples = f"{len(words or ()):,} ids (sha256 {sha256_hex(samples.encode())})"
        options = {"layers": self.layers, "samples": samples, "split": self.split, "limit": self.limit}
        return {name: str(value) for name, value in options.items() if value not in (None, "all")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A subset as it lies there."""

    store: str
    source: str
    manifest_id: str
    derived_from: Derivation
    layers: tuple[str, ...]
    n_samples: int
    """Without failed ones."""
    n_failed: int
    """Samples whose bytes were damaged in the source: flagged, without states."""
    failures: dict[str, str]
    """What was wrong with each of them, by source_index."""
    n_tokens: int
    n_bytes: int


class Subset:
    """One subset in the making. A context manager: it holds the source open."""

    def __init__(self, source: str | Path, target: str | Path, selection: Selection) -> None:
        """Open the source, create the target, or take up one that the same selection of the same source began.

        Raises `UsageError` for samples or states that the source does not have, `ConflictError` when something else
        lies at the target, `NoSpaceError` when it will not fit.
        """
        self.root = Path(target)
        _refuse_inside(Path(source), self.root)
        begun = manifest.load_header(self.root) if (self.root / paths.HEADER).is_file() else None
        self.source = _open_source(source, begun)
        try:
            self._prepare(selection, begun)
        except BaseException:
            self.source.close()
            raise

    def __enter__(self) -> Subset:
        return self

    def __exit__(self, *_: object) -> None:
        self.source.close()

    def _prepare(self, selection: Selection, begun: StoreHeader | None) -> None:
        source, index = self.source, self.source.index
        stored = source.layers
        self.layers = layers_of(stored, selection.layers) if selection.layers is not None else stored
        words = words_of(selection.samples) if selection.samples is not None else None
        chosen = choose(index, source.header.split, words=words, side=selection.split, limit=selection.limit)
        if self.layers == stored and len(chosen.rows) == len(index):
            raise UsageError("this selection leaves nothing out", hint="copy a whole store with `hsstore copy`")
        self.n_left_out = chosen.n_failed
        self._judged: dict[int, str] = {}
        self._refuse_implausible(chosen.rows)
        self._rows = {int(index.source_index[i]): int(i) for i in chosen.rows}
        entries = [SampleEntry(index.uid_hex(i), s, 0, int(index.n_tokens[i])) for s, i in self._rows.items()]
        self.derived_from = Derivation(
            uuid=source.header.uuid, manifest_id=source.manifest_id, selection=selection.recorded(words)
        )
        self._writer = self._begin(entries) if begun is None else self._resume(begun)
        self._shards = layout.assign(entries, self._writer.header.shard_rows)
        self._writer.check_layout(self._shards)
        self.todo = [n for n in self._writer.todo() if n < len(self._shards)]
        header = self._writer.header
        _refuse_full_disk(self.root, header.arrays, header.chunk_rows, [self._shards[n] for n in self.todo])

    def _begin(self, entries: list[SampleEntry]) -> StoreWriter:
        """Create the target; one that another process begins at this moment is continued."""
        try:
            return self._create(entries)
        except ConflictError:
            if not (self.root / paths.HEADER).is_file():
                hint = "give another directory, or one that is empty"
                raise ConflictError(f"{self.root} exists already and is no store", hint=hint) from None
            return self._resume(manifest.load_header(self.root))

    def _create(self, entries: list[SampleEntry]) -> StoreWriter:
        header = self.source.header
        capture = header.capture.with_layers(self.layers)
        shard_rows, chunk = layout.choose_shape(
            n_tokens=sum(e.n_tokens for e in entries),
            longest=max(e.n_tokens for e in entries),
            hidden_size=capture.hidden_size,
            chunk_rows=header.chunk_rows,
        )
        # Before anything is begun: what will not fit shall not leave an empty store behind.
        _refuse_full_disk(self.root, layout.arrays_of(capture), chunk, layout.assign(entries, shard_rows))
        return StoreWriter.create(
            self.root,
            capture=capture,
            shard_rows=shard_rows,
            split=header.split,
            samples=entries,
            input_summary=_input(self.source),
            chunk_rows=header.chunk_rows,
            derived_from=self.derived_from,
        )

    def _resume(self, begun: StoreHeader) -> StoreWriter:
        found = begun.derived_from
        if not isinstance(found, Derivation) or found != self.derived_from:
            was = _said(found) if isinstance(found, Derivation) else "it is no subset"
            raise ConflictError(
                f"{self.root} was not begun as this subset: {was}; asked for: {_said(self.derived_from)}",
                hint="give the same source and options to continue it, or another directory",
            )
        return StoreWriter.open(self.root)

    def _refuse_implausible(self, rows: npt.NDArray[np.intp]) -> None:
        """Raise `DamagedError` for a sample of a size or a place that no shard has: everything computes with them."""
        at, most = self.source.index, np.uint64(self.source.header.shard_rows)
        n_tokens, row = at.n_tokens[rows], at.row[rows]
        wrong = (n_tokens < 1) | (n_tokens > most) | (row > most) | (row + n_tokens > most)
        for i in rows[wrong][:1]:
            shard = int(at.shard[i])
            raise DamagedError(
                f"{paths.record(self.source.root, shard)} puts sample {int(at.source_index[i])} into"
                f" {int(at.n_tokens[i])} rows from {int(at.row[i])}; a shard has {int(most)}",
                hint=f"run `hsstore verify manifest {self.source.root}`",
            )

    def _refuse_record(self, shard: int) -> None:
        """Raise `DamagedError` when the record of a shard of the source is gone or makes no sense."""
        if shard not in self._judged:
            path = paths.record(self.source.root, shard)
            try:
                wrong = plausible.record(self.source.record(shard), self.source.header)
                self._judged[shard] = wrong and f"{path} {wrong}"
            except (DamagedError, NotFoundError) as error:
                self._judged[shard] = error.message
        if self._judged[shard]:
            raise DamagedError(self._judged[shard])

    @property
    def n_samples(self) -> int:
        return len(self._rows)

    @property
    def n_done(self) -> int:
        """Samples in shards that are committed already."""
        return self.n_samples - sum(len(self._shards[n]) for n in self.todo)

    def copy(self, on_samples: Callable[[int, int], None] = lambda n_samples, n_bytes: None) -> Result:
        """Copy shard by shard; `on_samples` hears of each sample. What is killed is taken up by a new `Subset`."""
        for shard in self.todo:
            self._copy_shard(shard, on_samples)
        manifest_id = self._writer.finish()
        with Store.open(self.root, backend="pread") as made:
            totals = made.manifest
        failures = [r.failures for r in manifest.load_records(self.root, self._writer.header)]
        return Result(
            store=str(self.root),
            source=str(self.source.root),
            manifest_id=manifest_id,
            derived_from=self.derived_from,
            layers=self.layers,
            n_samples=totals.n_samples,
            n_failed=totals.n_failed,
            failures={i: why for some in failures for i, why in some.items()},
            n_tokens=totals.n_tokens,
            n_bytes=totals.n_bytes,
        )

    def _copy_shard(self, shard: int, on_samples: Callable[[int, int], None]) -> None:
        entries = self._shards[shard]
        failures: dict[int, str] = {}
        tokens = {e.source_index: self._tokens(e, failures) for e in entries}
        staged = self._writer.stage(shard, entries, tokens)
        try:
            for e in entries:
                if e.source_index not in failures:
                    self._copy_states(e, staged, failures)
                on_samples(1, e.n_tokens * sum(a.row_bytes for a in self._writer.header.arrays))
            for source_index, why in failures.items():
                staged.fail(source_index, why)
        except BaseException:
            staged.abandon()
            raise
        staged.commit()

    def _tokens(self, e: SampleEntry, failures: dict[int, str]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]:
        """Ids and mask of a sample; zeros, and a failure, when they are not what the source committed."""
        try:
            ids = np.frombuffer(self._whole(e, "tokens/input_ids"), "<i4")
            mask = np.frombuffer(self._whole(e, "tokens/loss_mask"), np.uint8)
            if sample_uid(ids, mask) != e.uid:
                raise DamagedError("ids and mask are not those of the uid")
        except DamagedError as error:
            failures[e.source_index] = f"damaged in the source: {error.message}"
            return np.zeros(e.n_tokens, np.int32), np.zeros(e.n_tokens, np.uint8)
        return ids, mask

    def _whole(self, e: SampleEntry, array: str) -> bytes:
        return b"".join(piece for _, piece in self._checked(e, array))

    def _copy_states(self, e: SampleEntry, staged: StagedShard, failures: dict[int, str]) -> None:
        for state, path in staged.files.items():
            width = self._writer.header.array(f"hidden/{state}").row_bytes
            with open(path, "r+b", buffering=0) as file:
                try:
                    for row, piece in self._checked(e, f"hidden/{state}"):
                        durable.pwrite_all(file.fileno(), piece, (e.row + row) * width)
                except DamagedError as error:
                    failures[e.source_index] = f"damaged in the source: {error.message}"
                    return

    def _checked(self, e: SampleEntry, array: str) -> Iterator[tuple[int, memoryview]]:
        """(first row inside the sample, its bytes) in pieces, each block's CRC32C compared with the source's record.

        Raises `DamagedError` naming file and rows.
        """
        source, at, i = self.source, self.source.index, self._rows[e.source_index]
        shard, row = int(at.shard[i]), int(at.row[i])
        chunk, width = source.header.chunk_rows, source.header.array(array).row_bytes
        self._refuse_record(shard)
        crcs = source.block_crcs(array, shard)
        n_blocks = max(1, _PIECE_BYTES // (chunk * width))
        first, stop = row // chunk, -(-(row + e.n_tokens) // chunk)
        for block in range(first, stop, n_blocks):
            last = min(stop, block + n_blocks)
            data = source.rows(array, shard, block * chunk, (last - block) * chunk)
            for b in range(block, last):
                if crc32c(data[(b - block) * chunk * width : (b - block + 1) * chunk * width]) != int(crcs[b]):
                    name = zarrmeta.chunk_path(source.header.array(array), shard)
                    raise DamagedError(f"{name}: CRC32C of block {b} differs from the record")
            begin, end = max(row, block * chunk), min(row + e.n_tokens, last * chunk)
            yield begin - row, data[(begin - block * chunk) * width : (end - block * chunk) * width]


def _open_source(source: str | Path, begun: StoreHeader | None) -> Store:
    """By `pread`, where a bad disk is an error and not SIGBUS; in the state that a subset was begun from."""
    begun_from = begun.derived_from if begun is not None else None
    header = manifest.load_header(Path(source))
    of_begun = isinstance(begun_from, Derivation) and header.uuid == begun_from.uuid
    manifest_id = begun_from.manifest_id if isinstance(begun_from, Derivation) and of_begun else None
    return Store.open(source, backend="pread", manifest_id=manifest_id)


def _said(derived_from: Derivation) -> str:
    options = " ".join(f"--{name} {value}" for name, value in derived_from.selection.items())
    return f"{options or 'everything'} of store {derived_from.uuid} in state {derived_from.manifest_id[:12]}"


def _refuse_inside(source: Path, target: Path) -> None:
    if target.resolve().is_relative_to(source.resolve()):
        raise UsageError(f"{target} lies inside {source}; a store holds nothing but its own files")


def _refuse_full_disk(
    target: Path, arrays: tuple[ArraySpec, ...], chunk: int, shards: list[tuple[SampleEntry, ...]]
) -> None:
    rows = [layout.rows_in_use(shard) for shard in shards]
    needed = sum(zarrmeta.data_bytes(spec, n, chunk) for spec in arrays for n in rows)
    root = target.absolute()
    free = shutil.disk_usage(next(p for p in (root, *root.parents) if p.exists())).free
    if needed > free:
        raise NoSpaceError(
            f"no space left for {target}: {needed:,} bytes are needed, {free:,} are free",
            hint="free some space, then run the command again",
        )


def _input(source: Store) -> InputSummary:
    """Lines are those of the source, so that a source index stays the line it was and growth begins behind them."""
    layouts = manifest.load_layouts(source.root, source.header)
    return InputSummary(
        name=source.name,
        bytes=0,
        sha256=source.manifest_id,
        lines=max(x.offset + x.input.lines for x in layouts),
        rejected={},
        options={},
    )
