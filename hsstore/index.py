"""The samples of a store as columns: one row per sample, ordered by source_index.

Responsible for: building the columns from a manifest, the train/validation split, and index/*.npy (derived, mmap-able).

Letters: N samples.
"""

from __future__ import annotations

import hashlib
import io
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from hsstore.errors import NotFoundError
from hsstore.records import FLAG_FAILED, Manifest, Split

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


def build(manifest: Manifest) -> Index:
    """Columns of every sample of a manifest, failed ones included (see `flags`)."""
    rows = sorted(
        (s.source_index, s.uid, shard.shard, s.row, s.n_tokens, s.flags)
        for shard in manifest.shards
        for s in shard.samples
    )
    uids = np.frombuffer(b"".join(bytes.fromhex(r[1]) for r in rows), ">u8").astype(np.uint64).reshape(-1, 2)
    table = np.array([(r[0], *r[2:]) for r in rows], np.uint64).reshape(-1, 5)
    source_index, shard, row, n_tokens, flags = (np.ascontiguousarray(column) for column in table.T)
    return Index(uid=uids, source_index=source_index, shard=shard, row=row, n_tokens=n_tokens, flags=flags)


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
