"""Second pass of an import: the states, shard by shard, from maps of the files into the staged rows.

Every file is read whole once here, so its own checksums are compared, and every state is looked at: NaN and infinity
fail a sample. Memory holds pieces of one sample, and for files that must be unpacked (.gz) one shard.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Protocol

import numpy as np

from extractor.foreign.assume import Assumed
from extractor.foreign.reasons import Rejected
from extractor.foreign.sample import ForeignSample, Reader, Rows, all_finite
from extractor.foreign.scan import Scan, check, tokens_of
from extractor.foreign.settings import ImportSettings
from hsstore import durable
from hsstore.digest import sample_uid
from hsstore.records import SampleEntry, ShardRecord
from hsstore.writer import StagedShard, StoreWriter, Tokens

_PIECE_BYTES = 4 << 20


class Listener(Protocol):
    """Who hears how it goes."""

    def sample_done(self, n_tokens: int) -> None: ...


class ShardCopier:
    """Fills and commits the shards of an import."""

    def __init__(
        self, writer: StoreWriter, reader: Reader, scan: Scan, settings: ImportSettings, assumed: Assumed
    ) -> None:
        self._writer, self._reader, self._scan = writer, reader, scan
        self._settings, self._assumed = settings, assumed
        self.n_unchecked = 0
        """Files that carry no checksum for their states."""

    def copy(self, shard: int, entries: Sequence[SampleEntry], listener: Listener) -> ShardRecord | None:
        """Stage, fill and commit one shard. None: another process was first."""
        tokens, faults, kept = self._tokens(entries)
        staged = self._writer.stage(shard, entries, tokens)
        try:
            with _opened(staged) as files:
                for entry in entries:
                    fault = faults.get(entry.source_index) or self._states(entry, kept, files)
                    if fault is not None:
                        staged.fail(entry.source_index, f"{fault.reason}: {fault.detail}".removesuffix(": "))
                    listener.sample_done(entry.n_tokens)
        except BaseException:
            staged.abandon()
            raise
        return staged.commit()

    def _tokens(self, entries: Sequence[SampleEntry]) -> tuple[Tokens, dict[int, Rejected], dict[int, ForeignSample]]:
        """Ids and masks of a shard; zeros for a sample whose file no longer gives them."""
        tokens, faults, kept = {}, {}, {}
        for entry in entries:
            try:
                sample = self._reader.read(self._scan.items[entry.source_index], whole=False)
                ids, mask = tokens_of(sample, self._settings)
                if sample_uid(ids, mask) != entry.uid:
                    raise Rejected("changed", "its ids are others than a moment ago")
                if not sample.mapped:
                    kept[entry.source_index] = sample
            except Rejected as rejected:
                faults[entry.source_index] = rejected
                ids, mask = np.zeros(entry.n_tokens, np.int32), np.zeros(entry.n_tokens, np.uint8)
            tokens[entry.source_index] = (ids, mask)
        return tokens, faults, kept

    def _states(self, entry: SampleEntry, kept: dict[int, ForeignSample], files: dict[str, int]) -> Rejected | None:
        """Write one sample's states. Returns why it cannot be used."""
        try:
            sample = kept.pop(entry.source_index, None)
            if sample is None:
                sample = self._reader.read(self._scan.items[entry.source_index], whole=True)
            self.n_unchecked += sample.unchecked
            ids, mask = tokens_of(sample, self._settings)
            check(sample, self._assumed)
            if sample_uid(ids, mask) != entry.uid or sample.hidden_size != self._scan.hidden_size:
                raise Rejected("changed", "it is another sample than a moment ago")
            for state, rows in zip(self._assumed.layers, sample.states, strict=True):
                _write(files[state], rows, entry.row, state)
        except Rejected as rejected:
            return rejected
        return None


def _write(fd: int, rows: Rows, first_row: int, state: str) -> None:
    """All rows of one state, in pieces. Raises `Rejected` at the first one that is not finite."""
    width = rows.shape[1]
    step = max(1, _PIECE_BYTES // (2 * width))
    for start in range(0, len(rows), step):
        piece = np.ascontiguousarray(rows[start : start + step], "<u2")
        if not all_finite(piece):
            raise Rejected("not_finite", state)
        durable.pwrite_all(fd, piece.data, (first_row + start) * 2 * width)


@contextmanager
def _opened(staged: StagedShard) -> Iterator[dict[str, int]]:
    """A descriptor for each staged state."""
    with ExitStack() as stack:
        yield {state: _open(path, stack) for state, path in staged.files.items()}


def _open(path: str, stack: ExitStack) -> int:
    fd = os.open(path, os.O_WRONLY)
    stack.callback(os.close, fd)
    return fd
