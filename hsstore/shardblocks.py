"""A shard file as its record has it, and what is still good of the copies on this machine.

Responsible for reading blocks that may be anything: where the medium gives an error, where a file is too short or is
none, a block is not good. Leaves fetching good ones to `replicas` and writing the file anew to `rebuild`.

Letters: S rows of a shard, C rows of a block.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hsstore import paths, zarrmeta
from hsstore.digest import crc32c, decode_blocks
from hsstore.errors import DamagedError
from hsstore.plainfile import open_plain
from hsstore.reading import raise_if_ours
from hsstore.records import ArraySpec, ShardRecord, StoreHeader


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A shard file that should be there."""

    record: ShardRecord
    spec: ArraySpec
    relative: str
    """Path relative to the store."""
    n_bytes: int
    sha256: str
    block_bytes: int
    crcs: npt.NDArray[np.uint32]
    """CRC32C of each block in use."""
    footer: bytes
    chunk_rows: int

    @classmethod
    def of(cls, header: StoreHeader, record: ShardRecord, spec: ArraySpec) -> Wanted:
        """Raises `DamagedError` for a record whose checksums do not fit its rows."""
        relative = zarrmeta.chunk_path(spec, record.shard)
        entry = record.files[relative]
        try:
            crcs = decode_blocks(entry.crc32c_blocks)
        except ValueError:
            raise DamagedError(f"the record of shard {record.shard} has no checksums of {relative}") from None
        footer = zarrmeta.footer(spec, n_rows=record.n_rows, shard_rows=header.shard_rows, chunk_rows=header.chunk_rows)
        block_bytes = header.chunk_rows * spec.row_bytes
        if len(crcs) != zarrmeta.used_blocks(record.n_rows, header.chunk_rows) or entry.bytes != (
            len(crcs) * block_bytes + len(footer)
        ):
            raise DamagedError(f"the record of shard {record.shard} does not fit the rows of {relative}")
        return cls(
            record=record,
            spec=spec,
            relative=relative,
            n_bytes=entry.bytes,
            sha256=entry.sha256,
            block_bytes=block_bytes,
            crcs=crcs,
            footer=footer,
            chunk_rows=header.chunk_rows,
        )

    @property
    def n_blocks(self) -> int:
        return len(self.crcs)

    def rows(self, first: int, last: int) -> tuple[int, int]:
        """First and last row in use of a run of blocks."""
        return first * self.chunk_rows, min((last + 1) * self.chunk_rows, self.record.n_rows) - 1


class Copies:
    """What lies on this machine of a wanted file: under its final name and, not published yet, under its staged one."""

    def __init__(self, root: Path, wanted: Wanted) -> None:
        self._wanted = wanted
        self._fds: list[int] = []
        self._published = False
        staged = paths.staging(root, wanted.record.shard, wanted.record.attempt) / paths.staged_name(wanted.spec.name)
        self._names = (root / wanted.relative, staged)
        self.bytes_read = 0

    def __enter__(self) -> Copies:
        try:
            for name in self._names:
                fd = _open_plain(name)
                if fd is not None:
                    self._fds.append(fd)
                    self._published |= name == self._names[0]
            if not self._published and (fd := _open_plain(self._names[0])) is not None:
                self._fds.insert(0, fd)  # it was published between the first two looks
                self._published = True
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for fd in self._fds:
            os.close(fd)
        self._fds = []

    def bad(self) -> list[int] | None:
        """Blocks that no copy here has whole, ascending; None when the file under its final name is whole."""
        if not self._fds:
            return list(range(self._wanted.n_blocks))
        sha, bad = hashlib.sha256(), []
        with contextlib.suppress(OSError):  # advice only
            os.posix_fadvise(self._fds[0], 0, 0, os.POSIX_FADV_DONTNEED)
        for block in range(self._wanted.n_blocks):
            data = self._read(self._fds[0], block * self._wanted.block_bytes, self._wanted.block_bytes)
            sha.update(data)
            if not self._is(block, data) and self.block(block) is None:
                bad.append(block)
        data_bytes = self._wanted.n_blocks * self._wanted.block_bytes
        sha.update(self._read(self._fds[0], data_bytes, len(self._wanted.footer) + 1))
        return None if self._published and sha.hexdigest() == self._wanted.sha256 else bad

    def block(self, block: int) -> bytes | None:
        """Bytes of a block out of any copy that has it whole."""
        for fd in self._fds:
            data = self._read(fd, block * self._wanted.block_bytes, self._wanted.block_bytes)
            if self._is(block, data):
                return data
        return None

    def mostly_match(self) -> bool | None:
        """Whether most blocks here are the record's: the two belong together. None without a file."""
        if not self._fds:
            return None
        return 2 * sum(self.block(block) is not None for block in range(self._wanted.n_blocks)) > self._wanted.n_blocks

    def _is(self, block: int, data: bytes) -> bool:
        return len(data) == self._wanted.block_bytes and crc32c(data) == int(self._wanted.crcs[block])

    def _read(self, fd: int, start: int, n_bytes: int) -> bytes:
        """What can be read of a range."""
        out = bytearray()
        try:
            while len(out) < n_bytes and (piece := os.pread(fd, n_bytes - len(out), start + len(out))):
                out += piece
        except OSError as error:
            raise_if_ours(error)
        self.bytes_read += len(out)
        return bytes(out)


def _open_plain(path: Path) -> int | None:
    """A descriptor of a plain file; None for anything else under that name."""
    try:
        return open_plain(path)
    except DamagedError:
        return None
    except OSError as error:
        raise_if_ours(error)
        return None
