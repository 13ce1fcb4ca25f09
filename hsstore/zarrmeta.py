"""The Zarr v3 side of a store: its metadata documents, chunk paths and the footer of a shard file.

A shard file is a raw C-order array followed by the index of the `sharding_indexed` codec, so np.memmap maps it and any
Zarr v3 reader reads it. Sources: Zarr v3 core specification, `sharding_indexed` codec 1.0.

Letters: S rows of a shard, C rows of a block, H hidden size.
"""

from __future__ import annotations

import json
import struct

import numpy as np

from hsstore.digest import crc32c
from hsstore.records import ArraySpec, StoreHeader

ROOT = "arrays.zarr"
GROUPS = ("", "hidden", "tokens")
_ABSENT = 2**64 - 1


def chunk_path(spec: ArraySpec, shard: int) -> str:
    """Path of the array's file of that shard, relative to the store."""
    return f"{ROOT}/{spec.name}/c/{shard}" + "/0" * len(spec.row_shape)


def used_blocks(n_rows: int, chunk_rows: int) -> int:
    """Blocks that hold rows in use; later ones are marked absent and cost no disk."""
    return -(-n_rows // chunk_rows)


def data_bytes(spec: ArraySpec, n_rows: int, chunk_rows: int) -> int:
    """Bytes in front of the footer: whole blocks, the last one filled up with zeros."""
    return used_blocks(n_rows, chunk_rows) * chunk_rows * spec.row_bytes


def footer_bytes(n_blocks: int) -> int:
    """Size of the footer of a shard that has room for so many blocks."""
    return 16 * n_blocks + 4


def footer(spec: ArraySpec, *, n_rows: int, shard_rows: int, chunk_rows: int) -> bytes:
    """Shard index at the end of the file: (offset, nbytes) little-endian u64 per block, then its CRC32C."""
    n_blocks, used, block_bytes = shard_rows // chunk_rows, used_blocks(n_rows, chunk_rows), chunk_rows * spec.row_bytes
    index = np.full((n_blocks, 2), _ABSENT, "<u8")
    index[:used, 0] = np.arange(used, dtype="<u8") * np.uint64(block_bytes)
    index[:used, 1] = block_bytes
    raw = index.tobytes()
    return raw + struct.pack("<I", crc32c(raw))


def _pretty(document: object) -> bytes:
    return json.dumps(document, indent=2, sort_keys=True).encode() + b"\n"


def group_document() -> bytes:
    return _pretty({"zarr_format": 3, "node_type": "group", "attributes": {}})


def array_document(spec: ArraySpec, header: StoreHeader, n_shards: int) -> bytes:
    """zarr.json of one array, byte-exact for a given header and number of shards."""
    little = {"name": "bytes", "configuration": {"endian": "little"}} if spec.dtype != "uint8" else {"name": "bytes"}
    index_codecs = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
    sharding = {
        "chunk_shape": [header.chunk_rows, *spec.row_shape],
        "codecs": [little],
        "index_codecs": index_codecs,
        "index_location": "end",
    }
    shape = {"chunk_shape": [header.shard_rows, *spec.row_shape]}
    return _pretty(
        {
            "zarr_format": 3,
            "node_type": "array",
            "shape": [n_shards * header.shard_rows, *spec.row_shape],
            "data_type": spec.dtype,
            "chunk_grid": {"name": "regular", "configuration": shape},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
            "fill_value": 0,
            "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
            "dimension_names": ["row", "hidden"][: 1 + len(spec.row_shape)],
            "attributes": {"hsstore": {"logical_dtype": spec.logical_dtype}},
        }
    )


def documents(header: StoreHeader, n_shards: int) -> dict[str, bytes]:
    """Every zarr.json of a store by path relative to it."""
    out = {"/".join(filter(None, (ROOT, group, "zarr.json"))): group_document() for group in GROUPS}
    for spec in header.arrays:
        out[f"{ROOT}/{spec.name}/zarr.json"] = array_document(spec, header, n_shards)
    return out
