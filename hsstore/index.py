"""The samples of a store as columns: one row per sample, ordered by source_index.

Responsible for: building the columns from a manifest, the train/validation split, and index/*.npy (derived, mmap-able).

Letters: N samples.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from hsstore.errors import DamagedError, NotFoundError
from hsstore.records import FLAG_FAILED, Manifest, SampleEntry, Split

U64 = npt.NDArray[np.uint64]
SplitName = Literal["train", "validation", "all"]
COLUMNS = ("uid", "source_index", "shard", "row", "n_tokens", "flags")


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """Columns of equal length N, uint64, in ascending source_index."""

    uid: U64
    """[N, 2]: the 16 bytes of the uid as two big-endian numbers."""
    source_index: U64
    """[N] 0-based line of the input."""
    shard: U64
    row: U64
    """[N] first row inside the shard."""
    n_tokens: U64
    flags: U64

    def __len__(self) -> int:
        return len(self.source_index)

    def uid_hex(self, i: int) -> str:
        high, low = (int(x) for x in self.uid[i])
        return f"{high:016x}{low:016x}"

    def find(self, sample: str) -> int:
        """Row of a sample given its source_index (decimal) or its uid (32 hex digits, or a prefix of 8 or more).

        Raises `NotFoundError`; of several equal samples the first is taken.
        """
        if len(sample) >= 8 and all(c in "0123456789abcdef" for c in sample):
            low, high = (int(sample.ljust(32, c), 16) for c in "0f")
            for i in np.flatnonzero((self.uid[:, 0] >= low >> 64) & (self.uid[:, 0] <= high >> 64)):
                if self.uid_hex(int(i)).startswith(sample):
                    return int(i)
        if sample.isascii() and sample.isdecimal() and len(sample) < 20:
            at = int(np.searchsorted(self.source_index, np.uint64(sample)))
            if at < len(self) and int(self.source_index[at]) == int(sample):
                return at
        raise NotFoundError(
            f"no sample {sample!r}: expected a source_index or a uid", hint="list them with `hsstore ls`"
        )


class _Shard(Protocol):
    """What a shard's record and its entry in a manifest have in common."""

    @property
    def shard(self) -> int: ...

    @property
    def samples(self) -> Sequence[SampleEntry]: ...


def build(manifest: Manifest) -> Index:
    """Columns of every sample of a manifest, failed ones included (see `flags`)."""
    return of_shards(manifest.shards)


def of_shards(shards: Iterable[_Shard]) -> Index:
    """The same of any shards, each looked at once: 56 bytes a sample, whatever their objects take.

    A sample that lies in several shards (redone after a failure, or beside a shard that came back) is taken from the
    one that has states, then from the lowest.
    """
    parts = [_columns(shard) for shard in shards]
    uid = np.concatenate([uid for uid, _ in parts] or [np.empty((0, 2), np.uint64)])
    table = np.concatenate([rows for _, rows in parts] or [np.empty((0, 5), np.uint64)])
    del parts
    order = _first_of_each(table)
    source_index, shard, row, n_tokens, flags = (table[order, column] for column in range(5))
    return Index(uid=uid[order], source_index=source_index, shard=shard, row=row, n_tokens=n_tokens, flags=flags)


def _columns(shard: _Shard) -> tuple[U64, U64]:
    """([n, 2] uids, [n, 5] source_index, shard, row, n_tokens, flags) of one shard."""
    samples, number = shard.samples, shard.shard
    uid = np.frombuffer(bytes.fromhex("".join([s.uid for s in samples])), ">u8").astype(np.uint64).reshape(-1, 2)
    rows = [(s.source_index, number, s.row, s.n_tokens, s.flags) for s in samples]
    return uid, np.array(rows, np.uint64).reshape(-1, 5)


def _first_of_each(table: U64) -> npt.NDArray[np.intp]:
    """Rows of the table in ascending source_index, of equal ones the best."""
    source_index, shard = table[:, 0], table[:, 1]
    failed = (table[:, 4] & np.uint64(FLAG_FAILED)) != 0
    order: npt.NDArray[np.intp] = np.lexsort((shard, failed, source_index))
    ascending = source_index[order]
    new = np.ones(len(order), np.bool_)
    new[1:] = ascending[1:] != ascending[:-1]
    return order[new]


def decode(files: Mapping[str, bytes]) -> Index:
    """Inverse of `encode`; the columns are views of the given bytes.

    Raises `DamagedError` for anything that `encode` would not have written.
    """
    columns = {name: _column(name, files[f"{name}.npy"]) for name in COLUMNS}
    n = len(columns["source_index"])
    shapes = {name: (n, 2) if name == "uid" else (n,) for name in COLUMNS}
    if any(column.shape != shapes[name] for name, column in columns.items()):
        raise DamagedError("the columns of the index do not fit together", hint="rebuild it: `hsstore manifest build`")
    return Index(**columns)


def _column(name: str, data: bytes) -> U64:
    stream = io.BytesIO(data)
    try:
        np.lib.format.read_magic(stream)  # type: ignore[no-untyped-call]
        shape, _, dtype = np.lib.format.read_array_header_1_0(stream)  # type: ignore[no-untyped-call]
        if dtype != np.dtype("<u8"):
            raise ValueError(f"it holds {dtype}")
        # Not `np.load`: from memory that copies piece by piece, half of the time that opening took.
        return np.frombuffer(data, "<u8", offset=stream.tell()).reshape(shape)
    except ValueError as error:
        hint = "rebuild it: `hsstore manifest build`"
        raise DamagedError(f"index/{name}.npy is no column of an index: {error}", hint=hint) from None


def encode(index: Index) -> dict[str, bytes]:
    """Contents of index/*.npy by file name."""
    out = {}
    for name in COLUMNS:
        buffer = io.BytesIO()
        np.save(buffer, getattr(index, name).astype("<u8"), allow_pickle=False)
        out[f"{name}.npy"] = buffer.getvalue()
    return out


def usable(index: Index) -> npt.NDArray[np.bool_]:
    """[N] true where the sample has states."""
    ok: npt.NDArray[np.bool_] = (index.flags & np.uint64(FLAG_FAILED)) == 0
    return ok


def in_validation(index: Index, split: Split) -> npt.NDArray[np.bool_]:
    """[N] true for the validation split: a salted hash of the uid below the fraction.

    splitmix64 finaliser (Steele, Lea, Flood 2014) over the uid's first half xor the salt's hash: a sample keeps its
    side when the store grows, moves or is reordered, and equal samples never fall on both sides.
    """
    salt = np.uint64(int.from_bytes(hashlib.sha256(split.salt.encode()).digest()[:8], "big"))
    z = index.uid[:, 0] ^ salt
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = z ^ (z >> np.uint64(31))
    below: npt.NDArray[np.bool_] = (z >> np.uint64(11)) < np.uint64(int(split.validation_fraction * 2**53))
    return below


def members(index: Index, split: Split, name: SplitName) -> npt.NDArray[np.intp]:
    """Index rows of the usable samples of a split, ascending."""
    keep = usable(index)
    if name != "all":
        validation = in_validation(index, split)
        keep = keep & (validation if name == "validation" else ~validation)
    return np.flatnonzero(keep)
