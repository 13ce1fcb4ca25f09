"""One packed batch of a plan, as pieces of the maps: the same code for the local and the HTTP road.

A batch is a safetensors file: `BatchView.pieces` yields its header, its few small tensors and slices of the maps, in
file order. The service sends the pieces as they are; `gather` has the rows read into one buffer. No padding in either.

Letters: T tokens of a batch, n samples of a batch, H hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from hsstore import wire
from hsstore.digest import encode_blocks
from hsstore.errors import UsageError
from hsstore.index import Index
from hsstore.plan import Plan, Segment
from hsstore.store import Store

WIRE_VERSION = "1"


class BatchView:
    """Batch `number` of an epoch: its size is known and its header built, its bytes still lie in the maps."""

    def __init__(self, store: Store, plan: Plan, epoch: int, number: int) -> None:
        """Raises `NotFoundError` for a batch or epoch that does not exist."""
        self._store = store
        self._segments = plan.epoch(epoch).segments(number)
        lengths = np.array([s.n_tokens for s in self._segments], np.int32)
        self.n_tokens = int(lengths.sum())
        self._small = _small_tensors(plan.index, self._segments, lengths)
        self._origin = [_source_rows(plan.index, s) for s in self._segments]
        metadata = {
            "format": "pt",
            "hsstore": WIRE_VERSION,
            "plan_id": plan.plan_id,
            "manifest_id": plan.manifest_id,
            "epoch": str(epoch),
            "batch": str(number),
            "origin": msgspec.json.encode(self._describe_origin()).decode(),
        }
        self.tensors = self._specs()
        self.header = wire.header(self.tensors, metadata)
        self.n_bytes = len(self.header) + sum(t.n_bytes for t in self.tensors)

    def _specs(self) -> list[wire.TensorSpec]:
        # Wide types first and the one-byte mask last, so every tensor is aligned to its own width.
        small = [_spec(name, array) for name, array in self._small.items()]
        ids = wire.TensorSpec(name="input_ids", dtype="I32", shape=(self.n_tokens,))
        hidden = [
            wire.TensorSpec(name=f"hidden.{k}", dtype="BF16", shape=(self.n_tokens, self._store.capture.hidden_size))
            for k in self._store.layers
        ]
        mask = wire.TensorSpec(name="loss_mask", dtype="U8", shape=(self.n_tokens,))
        return [*small, ids, *hidden, mask]

    def _describe_origin(self) -> wire.Origin:
        chunk_rows = self._store.header.chunk_rows
        crcs = {}
        for tensor, array in _arrays(self._store.layers):
            parts = []
            for piece in self._origin:
                blocks = wire.blocks_touched(piece, chunk_rows)
                parts.append(self._store.block_crcs(array, piece.shard)[blocks.start : blocks.stop])
            crcs[tensor] = encode_blocks(np.concatenate(parts))
        return wire.Origin(chunk_rows=chunk_rows, pieces=self._origin, crc32c=crcs)

    def pieces(self) -> Iterator[memoryview]:
        """The file's bytes, in order. Raises `DamagedError` when a shard file cannot be mapped."""
        yield memoryview(self.header)
        for small in self._small.values():
            yield small.data.cast("B")
        for _, array in _arrays(self._store.layers):
            for piece in self._origin:
                yield self._store.rows(array, piece.shard, piece.row, piece.n_rows)

    def write_into(self, target: memoryview) -> int:
        """Copy the file's bytes to the front of a flat buffer that is large enough. Returns how many.

        Raises `DamagedError` naming rows that cannot be read, whatever happens to a file meanwhile.
        """
        at = 0
        for part in (memoryview(self.header), *(small.data.cast("B") for small in self._small.values())):
            target[at : at + len(part)] = part
            at += len(part)
        for _, array in _arrays(self._store.layers):
            width = self._store.header.array(array).row_bytes
            for piece in self._origin:
                n_bytes = piece.n_rows * width
                self._store.read_into(array, piece.shard, piece.row, target[at : at + n_bytes])
                at += n_bytes
        return at


def _arrays(layers: Sequence[str]) -> list[tuple[str, str]]:
    """(tensor name, array name) of the mapped tensors, in file order."""
    hidden = [(f"hidden.{k}", f"hidden/{k}") for k in layers]
    return [("input_ids", "tokens/input_ids"), *hidden, ("loss_mask", "tokens/loss_mask")]


def _source_rows(index: Index, segment: Segment) -> wire.SourceRows:
    row = int(index.row[segment.sample]) + segment.start
    return wire.SourceRows(int(index.shard[segment.sample]), row, segment.n_tokens)


def _spec(name: str, array: npt.NDArray[np.int32] | npt.NDArray[np.int64]) -> wire.TensorSpec:
    return wire.TensorSpec(name=name, dtype="I64" if array.dtype == np.int64 else "I32", shape=array.shape)


def _small_tensors(
    index: Index, segments: Sequence[Segment], lengths: npt.NDArray[np.int32]
) -> dict[str, npt.NDArray[np.int32] | npt.NDArray[np.int64]]:
    source_index = index.source_index[[s.sample for s in segments]].astype("<i8")
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths)]).astype("<i4")
    position_ids = np.concatenate([np.arange(s.start, s.stop, dtype="<i4") for s in segments])
    return {"source_index": source_index, "cu_seqlens": cu_seqlens, "position_ids": position_ids}


def gather(store: Store, plan: Plan, epoch: int, number: int, out: bytearray | memoryview) -> int:
    """Copy a batch into a buffer. Returns its bytes.

    Raises `UsageError` when the buffer is too small (nothing is written then), `DamagedError` for rows that cannot be
    read.
    """
    view = BatchView(store, plan, epoch, number)
    target = memoryview(out).cast("B")
    if len(target) < view.n_bytes:
        raise UsageError(f"batch {number} has {view.n_bytes} bytes, the buffer has {len(target)}")
    return view.write_into(target)


def read(store: Store, plan: Plan, epoch: int, number: int, out: bytearray | memoryview | None = None) -> wire.Batch:
    """A batch as tensors, in `out` when it is large enough, else in a buffer of its own."""
    view = BatchView(store, plan, epoch, number)
    fits = out is not None and memoryview(out).nbytes >= view.n_bytes
    buffer = memoryview(out).cast("B") if out is not None and fits else np.empty(view.n_bytes, np.uint8).data
    return wire.parse(buffer[: view.write_into(buffer)])
