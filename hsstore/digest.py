"""Digests: who a sample is, whether a file and each of its blocks are what was committed.

SHA-256 names whole files (`sha256sum -c` understands it); CRC32C (Castagnoli, RFC 3720) per block of C rows says which
rows are bad. Leaves to `writer` and `verify` when they are computed.

Letters: T tokens of a sample, C rows of a block.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import google_crc32c
import numpy as np
import numpy.typing as npt

from hsstore.plainfile import open_plain

_PIECE_BYTES = 1 << 20

Buffer = bytes | bytearray | memoryview


def crc32c(data: Buffer, value: int = 0) -> int:
    """CRC32C of the bytes, continued from `value`. Zero copy for any contiguous buffer."""
    # google_crc32c refuses writable and memoryview buffers but takes arrays over them.
    view = memoryview(data)
    if view.nbytes == 0:
        return value
    return int(google_crc32c.extend(value, np.frombuffer(view.cast("B"), np.uint8)))


def crc32c_at(path: str | Path, start: int, n_bytes: int) -> int | None:
    """CRC32C of a range of a file; None when the file ends in it. Raises `OSError`."""
    buffer, value, left = bytearray(min(_PIECE_BYTES, n_bytes)), 0, n_bytes
    view = memoryview(buffer)  # one small buffer stays in the CPU's cache: twice as fast as fresh memory for all of it
    with open(path, "rb", buffering=0) as file:
        file.seek(start)
        while left:
            n = file.readinto(view[: min(left, len(view))])
            if not n:
                return None
            value = crc32c(view[:n], value)
            left -= n
    return value


def sample_uid(input_ids: npt.NDArray[np.int32], loss_mask: npt.NDArray[np.uint8]) -> str:
    """First 16 bytes of SHA-256 over the ids (int32, little-endian) and the mask (uint8), as 32 hex digits."""
    digest = hashlib.sha256(np.ascontiguousarray(input_ids, "<i4").tobytes())
    digest.update(np.ascontiguousarray(loss_mask, np.uint8).tobytes())
    return digest.digest()[:16].hex()


def encode_blocks(crcs: npt.NDArray[np.uint32] | list[int]) -> str:
    """Base64 of little-endian u32."""
    return base64.b64encode(np.asarray(crcs, "<u4").tobytes()).decode()


def decode_blocks(text: str) -> npt.NDArray[np.uint32]:
    """Inverse of `encode_blocks`. Raises `ValueError` for anything else."""
    return np.frombuffer(base64.b64decode(text, validate=True), "<u4")


@dataclass(frozen=True, slots=True, kw_only=True)
class FileDigest:
    n_bytes: int
    sha256: str
    blocks: list[int]
    """CRC32C of each block of `block_bytes`, without the footer."""
    footer: bytes


def digest_file(
    path: Path, *, block_bytes: int, n_blocks: int, visit: Callable[[int, memoryview], None] | None = None
) -> FileDigest:
    """One pass over a shard file: SHA-256 of everything, CRC32C per block, the bytes behind the last block.

    `visit(block, bytes)` is called with each block as it passes, so statistics cost no second read.
    A file that is too short gives fewer or shorter blocks; the caller compares sizes first.
    """
    sha = hashlib.sha256()
    blocks: list[int] = []
    buffer = bytearray(block_bytes)
    total = 0
    with open(path, "rb", buffering=0) as file:
        for block in range(n_blocks):
            view = memoryview(buffer)[: _read_full(file, memoryview(buffer))]
            sha.update(view)
            blocks.append(crc32c(view))
            total += len(view)
            if visit is not None:
                visit(block, view)
        footer = file.read()
        sha.update(footer)
    return FileDigest(n_bytes=total + len(footer), sha256=sha.hexdigest(), blocks=blocks, footer=footer)


def _read_full(file: object, view: memoryview) -> int:
    filled = 0
    while filled < len(view):
        n = file.readinto(view[filled:])  # type: ignore[attr-defined]
        if not n:
            break
        filled += n
    return filled


def sha256_file(path: Path) -> str:
    """SHA-256 of a whole file. Raises `DamagedError` for what is no plain file."""
    with open(path, "rb", opener=lambda name, _: open_plain(name)) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
