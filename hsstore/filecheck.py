"""One shard file against its record: is it there, of its size, with its footer and its bytes, and which rows are bad.

Never raises on damage: what is wrong is a finding. Leaves to `depth` how much is read, to `verify` of which files.

Letters: S rows of a shard, C rows of a block.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hsstore import paths, zarrmeta
from hsstore.depth import Choice, Extent
from hsstore.digest import decode_blocks
from hsstore.errors import DamagedError
from hsstore.findings import Finding, at, runs
from hsstore.reading import PlainFile, Reading, raise_if_ours
from hsstore.records import ArraySpec, ShardRecord, StoreHeader

_NO_FILE = "something that is no plain file has its name"
_ABSENT = {errno.ENOENT, errno.ENOTDIR}


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A shard file that is there, of whatever size."""

    header: StoreHeader
    record: ShardRecord
    spec: ArraySpec
    relative: str
    """Its final path, relative to the store."""
    path: str
    """Where it lies: there, or still in staging."""
    final: str
    """Where it lies once it is published."""
    status: os.stat_result

    @property
    def published(self) -> bool:
        return self.path == self.final

    @property
    def block_bytes(self) -> int:
        return self.header.chunk_rows * self.spec.row_bytes

    @property
    def n_blocks(self) -> int:
        return zarrmeta.used_blocks(self.record.n_rows, self.header.chunk_rows)

    @property
    def data_bytes(self) -> int:
        """Bytes in front of the footer, as its record has them."""
        return self.n_blocks * self.block_bytes

    @property
    def n_bytes(self) -> int:
        return self.record.files[self.relative].bytes

    @property
    def sha256(self) -> str:
        return self.record.files[self.relative].sha256

    @property
    def extent(self) -> Extent:
        return Extent(name=self.relative, n_bytes=self.n_bytes, block_bytes=self.block_bytes, n_blocks=self.n_blocks)

    def rows(self, first: int, last: int) -> tuple[int, int]:
        """First and last row in use of a run of blocks."""
        rows = self.header.chunk_rows
        return first * rows, min((last + 1) * rows, self.record.n_rows) - 1

    def to_read(self, choice: Choice) -> int:
        """Bytes that a check reads when nothing is wrong."""
        if self.status.st_size != self.n_bytes:
            return 0
        footer = self.n_bytes - self.data_bytes
        return footer + (self.n_bytes if choice.whole else len(choice.blocks) * self.block_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a check of one file found."""

    target: Target
    choice: Choice
    findings: tuple[Finding, ...]


def find(root: str, header: StoreHeader, record: ShardRecord, spec: ArraySpec) -> Target | Finding:
    """Where a committed file lies, or why it cannot be looked at. A file that is only staged yet is a target too."""
    relative = zarrmeta.chunk_path(spec, record.shard)
    whole = (0, record.n_rows - 1)
    for path in _places(root, record, spec, relative):
        try:
            status = os.stat(path)
        except OSError as error:
            if error.errno in _ABSENT:
                continue
            raise_if_ours(error)
            return at(record, "read", relative, f"cannot be looked at: {error.strerror}", whole)
        if not stat.S_ISREG(status.st_mode):
            return at(record, "missing", relative, _NO_FILE, whole)
        final = f"{root}/{relative}"
        return Target(header=header, record=record, spec=spec, relative=relative, path=path, final=final, status=status)
    return at(record, "missing", relative, "the file is missing", whole)


def _places(root: str, record: ShardRecord, spec: ArraySpec, relative: str) -> Iterator[str]:
    """Final name, staged name, final name: between the first two looks a writer may publish it."""
    yield f"{root}/{relative}"
    yield str(paths.staging(Path(root), record.shard, record.attempt) / paths.staged_name(spec.name))
    yield f"{root}/{relative}"


def unpublished(target: Target) -> Finding:
    """The note for a committed file that has its staged name only."""
    detail = "committed but not published yet; the next `hsstore extract --resume` or `manifest build` does it"
    return Finding(severity="note", kind="unpublished", file=target.relative, detail=detail, shard=target.record.shard)


def check(target: Target, choice: Choice, reading: Reading) -> Outcome:
    """Read what was chosen and compare. Raises `IncompleteError` when the reading is stopped."""
    return Outcome(target=target, choice=choice, findings=tuple(_findings(target, choice, reading)))


def _findings(target: Target, choice: Choice, reading: Reading) -> Iterator[Finding]:
    record, relative = target.record, target.relative
    try:
        with _opened(target, reading) as file:
            if file.size != target.n_bytes:
                yield from _other_size(target, choice, file)
            elif choice.whole:
                yield from _whole(target, file)
            else:
                yield from _blocks(target, file, choice.blocks)
                yield from _footer(target, file)
    except DamagedError:
        yield at(record, "missing", relative, _NO_FILE, (0, record.n_rows - 1))
    except OSError as error:
        raise_if_ours(error)
        yield at(record, "read", relative, f"cannot be read: {error.strerror}", (0, record.n_rows - 1))


@contextlib.contextmanager
def _opened(target: Target, reading: Reading) -> Iterator[PlainFile]:
    """The file where it was found or, published since and gone from staging, under its final name."""
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(reading.open(target.path))
        except FileNotFoundError:
            if target.published:
                raise
            file = stack.enter_context(reading.open(target.final))
        yield file


def _other_size(target: Target, choice: Choice, file: PlainFile) -> Iterator[Finding]:
    whole_blocks = min(file.size // target.block_bytes, target.n_blocks)
    lost = target.rows(whole_blocks, target.n_blocks - 1) if whole_blocks < target.n_blocks else None
    detail = f"has {file.size} bytes, its record says {target.n_bytes}"
    yield at(target.record, "size", target.relative, detail, lost)
    if choice.whole:
        yield from _blocks(target, file, range(whole_blocks))


def _whole(target: Target, file: PlainFile) -> Iterator[Finding]:
    """SHA-256 alone decides; only a file that differs is read once more, to say where."""
    try:
        if file.sha256() == target.sha256:
            yield from _footer(target, file)
            return
    except OSError as error:
        raise_if_ours(error)
    digest = hashlib.sha256()
    found = [*_blocks(target, file, range(target.n_blocks), digest), *_footer(target, file, digest)]
    if not found and digest.hexdigest() == target.sha256:
        detail = "was read twice with different bytes, the second time those of its record: suspect memory or cables"
        found = [at(target.record, "read", target.relative, detail, (0, target.record.n_rows - 1))]
    elif not found:
        detail = "SHA-256 differs from the record, every block agrees"
        found = [at(target.record, "digest", target.relative, detail, (0, target.record.n_rows - 1))]
    yield from found


def _blocks(
    target: Target, file: PlainFile, blocks: range | tuple[int, ...], digest: hashlib._Hash | None = None
) -> Iterator[Finding]:
    """Blocks that differ from the record's CRC32C, and blocks that cannot be read: runs of neighbours as one."""
    expected = decode_blocks(target.record.files[target.relative].crc32c_blocks)
    bad: list[int] = []
    unreadable: dict[str, list[int]] = {}
    for block in blocks:
        try:
            if file.crc32c(block * target.block_bytes, target.block_bytes, digest) != expected[block]:
                bad.append(block)
        except OSError as error:
            raise_if_ours(error)
            unreadable.setdefault(error.strerror or str(error), []).append(block)
    for first, last in runs(bad):
        detail = f"CRC32C of block {first} to {last} differs from the record"
        yield at(target.record, "block", target.relative, detail, target.rows(first, last))
    for reason, numbers in unreadable.items():
        for first, last in runs(numbers):
            detail = f"block {first} to {last} cannot be read: {reason}"
            yield at(target.record, "read", target.relative, detail, target.rows(first, last))


def _footer(target: Target, file: PlainFile, digest: hashlib._Hash | None = None) -> Iterator[Finding]:
    try:
        found = file.read(target.data_bytes, target.n_bytes - target.data_bytes)
    except OSError as error:
        raise_if_ours(error)
        yield at(target.record, "read", target.relative, f"its footer cannot be read: {error.strerror}", None)
        return
    if digest is not None:
        digest.update(found)
    header = target.header
    if found != expected_footer(target.spec, target.n_blocks, header.shard_rows, header.chunk_rows):
        yield at(
            target.record, "footer", target.relative, "the Zarr shard index at its end is not the one expected", None
        )


@functools.lru_cache(maxsize=4096)
def expected_footer(spec: ArraySpec, n_blocks: int, shard_rows: int, chunk_rows: int) -> bytes:
    """The footer of a file of so many blocks in use: nearly all shards of a store share a few."""
    return zarrmeta.footer(spec, n_rows=n_blocks * chunk_rows, shard_rows=shard_rows, chunk_rows=chunk_rows)
