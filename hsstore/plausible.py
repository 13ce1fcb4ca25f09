"""Documents whose hash is right and whose contents make no sense: written by a faulty program, or made up.

Everything that computes with a header or a record relies on what is checked here. Leaves hashes, owners and names to
`manifest`. Each function returns what is wrong, "" when nothing is.

Letters: S rows of a shard, C rows of a block.
"""

from __future__ import annotations

import re

from hsstore import layout, zarrmeta
from hsstore.digest import decode_blocks
from hsstore.records import OMITTED, ArraySpec, FileEntry, LayoutRecord, SampleEntry, ShardRecord, StoreHeader, spelled

_LAYER = re.compile(r"after_\d{1,6}|final")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_UID = re.compile(r"[0-9a-f]{32}")
_MOST = 1 << 40  # rows, samples, widths: far more than any store has, far less than what overflows


def header(document: StoreHeader) -> str:
    """Why no store can have this header."""
    capture, rows, chunk = document.capture, document.shard_rows, document.chunk_rows
    if not all(_LAYER.fullmatch(k) for k in capture.layers) or len(set(capture.layers)) != len(capture.layers):
        return f"captures the states {', '.join(map(repr, capture.layers))}"
    if capture.layer_ids is not OMITTED and capture.layer_ids != spelled(capture.layers):
        return f"has the states {', '.join(capture.layers)} and the layer ids {capture.layer_ids}"
    if not 0 < chunk <= rows <= 1 << 31 or rows % chunk:
        return f"has shards of {rows} rows in blocks of {chunk}"
    if not 0 < capture.hidden_size < 1 << 20 or not 0 < capture.vocab_size < 1 << 31:
        return f"has a hidden size of {capture.hidden_size} and a vocabulary of {capture.vocab_size}"
    if document.arrays != layout.arrays_of(capture):
        return "has other arrays than its capture implies"
    if not 0 <= document.split.validation_fraction < 1:
        return f"has a validation fraction of {document.split.validation_fraction}"
    return ""


def layout_record(document: LayoutRecord) -> str:
    """Why no layout can be like this."""
    numbers = [document.first_shard, document.offset, document.n_samples, document.n_tokens]
    numbers += [n for plan in document.shards for n in (plan.n_samples, plan.n_rows)]
    return "" if all(0 <= n < _MOST for n in numbers) else "has numbers that no layout has"


def record(document: ShardRecord, store: StoreHeader) -> str:
    """Why no shard of the store can have this record."""
    if not 0 < document.n_rows <= store.shard_rows:
        return f"has {document.n_rows} rows, a shard of this store holds 1 to {store.shard_rows}"
    if "/" in document.attempt or document.attempt in ("", ".", ".."):
        return f"names its attempt {document.attempt!r}"
    for spec in store.arrays:
        wrong = _file(document.files[zarrmeta.chunk_path(spec, document.shard)], spec, document.n_rows, store)
        if wrong:
            return f"says of {spec.name} that it {wrong}"
    return _samples(document.samples, document.n_rows)


def _file(entry: FileEntry, spec: ArraySpec, n_rows: int, store: StoreHeader) -> str:
    data = zarrmeta.data_bytes(spec, n_rows, store.chunk_rows)
    expected = data + zarrmeta.footer_bytes(store.shard_rows // store.chunk_rows)
    if entry.bytes != expected:
        return f"has {entry.bytes} bytes, {n_rows} rows make {expected}"
    if not _SHA256.fullmatch(entry.sha256):
        return "has no SHA-256"
    try:
        n_blocks = len(decode_blocks(entry.crc32c_blocks))
    except ValueError as error:
        return f"has no CRC32C of its blocks: {error}"
    used = zarrmeta.used_blocks(n_rows, store.chunk_rows)
    return "" if n_blocks == used else f"has {n_blocks} CRC32C values for {used} blocks"


def _samples(samples: tuple[SampleEntry, ...], n_rows: int) -> str:
    end = 0
    for s in sorted(samples, key=lambda s: s.row):
        if s.row < end or s.n_tokens < 1 or s.row + s.n_tokens > n_rows:
            return f"puts a sample into rows {s.row} to {s.row + s.n_tokens - 1} of {n_rows}, or two into one row"
        if not _UID.fullmatch(s.uid) or not 0 <= s.source_index < _MOST or not 0 <= s.flags < 1 << 32:
            return f"has a sample {s.uid!r} with source index {s.source_index} and flags {s.flags}"
        end = s.row + s.n_tokens
    return ""
