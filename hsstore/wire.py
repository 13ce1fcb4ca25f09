"""A batch on the wire: a valid `.safetensors` file, written by our own header writer, parsed without a copy.

Responsible for: the header (https://github.com/huggingface/safetensors#format), the order and alignment of the
tensors, the end-to-end check against the block CRCs that the header names. Leaves the bytes of the tensors to `gather`.

Letters: T tokens of a batch, n samples of a batch, H hidden size, C rows of a block.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from hsstore.digest import crc32c, decode_blocks
from hsstore.errors import DamagedError, ServiceError

DTYPES: dict[str, str] = {"BF16": "<u2", "I32": "<i4", "U8": "u1", "I64": "<i8"}
MAX_HEADER_BYTES = 100_000_000  # the format's own limit


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One tensor of a file, in file order."""

    name: str
    dtype: str
    """safetensors dtype: BF16, I64, I32 or U8."""
    shape: tuple[int, ...]

    @property
    def n_bytes(self) -> int:
        size = np.dtype(DTYPES[self.dtype]).itemsize
        for n in self.shape:
            size *= n
        return size


@dataclass(frozen=True, slots=True)
class Batch:
    """A parsed batch: views into the buffer it was read into, valid until that buffer is reused."""

    tensors: dict[str, npt.NDArray[Any]]
    """By name; BF16 as uint16 bit patterns (`torch.from_numpy(a).view(torch.bfloat16)` keeps the pointer)."""
    dtypes: dict[str, str]
    """safetensors dtype by name."""
    metadata: dict[str, str]

    @property
    def n_tokens(self) -> int:
        """T."""
        return len(self.tensors["input_ids"])

    @property
    def n_samples(self) -> int:
        """n."""
        return len(self.tensors["source_index"])


def header(tensors: Sequence[TensorSpec], metadata: Mapping[str, str]) -> bytes:
    """Length prefix and JSON header of a safetensors file, padded with spaces to a multiple of 8 bytes."""
    document: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))}
    offset = 0
    for t in tensors:
        document[t.name] = {"dtype": t.dtype, "shape": list(t.shape), "data_offsets": [offset, offset + t.n_bytes]}
        offset += t.n_bytes
    text = json.dumps(document, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


class _Tensor(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def parse(buffer: bytes | bytearray | memoryview) -> Batch:
    """Parse a whole safetensors file without a copy.

    Raises `ServiceError` when the header, the offsets or the size do not fit together.
    """
    view = memoryview(buffer).cast("B")
    try:
        (length,) = struct.unpack_from("<Q", view)
        if length > min(MAX_HEADER_BYTES, len(view) - 8):
            raise ValueError(f"header of {length} bytes in a file of {len(view)}")
        document = msgspec.json.decode(view[8 : 8 + length])
        metadata = msgspec.convert(document.pop("__metadata__", {}), dict[str, str])
        specs = msgspec.convert(document, dict[str, _Tensor])
        data = view[8 + length :]
        tensors = {name: _tensor(data, spec) for name, spec in specs.items()}
        if sum(t.nbytes for t in tensors.values()) != len(data):
            raise ValueError(f"tensors do not cover the {len(data)} bytes of data")
    except (struct.error, ValueError, KeyError, AttributeError, msgspec.MsgspecError) as error:
        raise ServiceError(
            f"not a batch in safetensors format: {error}", hint="is this URL an hsstore service?"
        ) from None
    return Batch(tensors=tensors, dtypes={n: s.dtype for n, s in specs.items()}, metadata=metadata)


def _tensor(data: memoryview, spec: _Tensor) -> npt.NDArray[Any]:
    start, stop = spec.data_offsets
    if not 0 <= start <= stop <= len(data):
        raise ValueError(f"offsets {start}:{stop} outside {len(data)} bytes")
    return np.frombuffer(data[start:stop], DTYPES[spec.dtype]).reshape(spec.shape)


class SourceRows(msgspec.Struct, frozen=True, array_like=True):
    """Where a piece of a batch was cut from: rows [row, row + n_rows) of a shard, in batch order."""

    shard: int
    row: int
    n_rows: int


class Origin(msgspec.Struct, frozen=True):
    """`__metadata__["origin"]` as JSON: what a reader needs to check a batch against the records."""

    chunk_rows: int
    """C."""
    pieces: list[SourceRows]
    crc32c: dict[str, str]
    """By tensor name: base64 of little-endian u32, for every block each piece touches, piece after piece."""


def origin(metadata: Mapping[str, str]) -> Origin:
    """The batch's origin. Raises `ServiceError` when the header does not name it."""
    try:
        return msgspec.json.decode(metadata["origin"], type=Origin)
    except (KeyError, msgspec.MsgspecError) as error:
        raise ServiceError(f"the batch does not say which blocks it was cut from: {error}") from None


def blocks_touched(piece: SourceRows, chunk_rows: int) -> range:
    """Block numbers that hold rows of the piece."""
    return range(piece.row // chunk_rows, -(-(piece.row + piece.n_rows) // chunk_rows))


def check_blocks(batch: Batch) -> int:
    """Compare every block that lies whole in the batch with the CRC32C of the record. Returns how many were compared.

    Raises `DamagedError` naming tensor, shard and rows. Blocks cut by a sample's edge cannot be checked from here; the
    service checks those at the source.
    """
    source = origin(batch.metadata)
    return sum(_check_tensor(batch, source, name, _crcs(name, text)) for name, text in source.crc32c.items())


def _crcs(name: str, text: str) -> npt.NDArray[np.uint32]:
    try:
        return decode_blocks(text)
    except ValueError as error:
        raise DamagedError(f"the batch has no CRC32C of the blocks of {name}: {error}") from None


def _check_tensor(batch: Batch, source: Origin, name: str, crcs: npt.NDArray[np.uint32]) -> int:
    rows, known = batch.tensors[name], iter(crcs.tolist())
    compared = 0
    for start, block, piece in _blocks(source):
        expected = next(known)
        first = block * source.chunk_rows
        if not piece.row <= first <= first + source.chunk_rows <= piece.row + piece.n_rows:
            continue
        at = start + first - piece.row
        if crc32c(rows[at : at + source.chunk_rows].data) != expected:
            span = f"rows {first} to {first + source.chunk_rows - 1} of shard {piece.shard}"
            raise DamagedError(f"{name}, {span} arrived with another CRC32C than their record has")
        compared += 1
    return compared


def _blocks(source: Origin) -> Iterator[tuple[int, int, SourceRows]]:
    start = 0
    for piece in source.pieces:
        for block in blocks_touched(piece, source.chunk_rows):
            yield start, block, piece
        start += piece.n_rows
