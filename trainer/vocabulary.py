"""The draft vocabulary: which verifier tokens a drafter can say, and the two maps between the two numberings.

Responsible for: choosing the tokens from counts, the maps in the spelling every serving engine reads (`d2t` holds
offsets, `t2d` a mask), their laws and their digest. Leaves the counting to the store.

Letters: V verifier vocabulary, V_d draft vocabulary, S the selected verifier ids in ascending order.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hsstore.errors import ConflictError, UsageError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Vocabulary:
    """Maps between verifier ids and draft ids. Draft id i means verifier id i + d2t[i]."""

    t2d: npt.NDArray[np.bool_]
    """[V], true for the selected ids."""
    d2t: npt.NDArray[np.int64]
    """[V_d], S − arange(V_d)."""
    cover: float
    """Share of the counted tokens that the draft vocabulary can say, in [0, 1]; 0 when nothing was counted."""
    digest: str
    """SHA-256 over V, V_d and d2t: equal maps have equal digests."""

    @property
    def verifier_size(self) -> int:
        """V."""
        return len(self.t2d)

    @property
    def draft_size(self) -> int:
        """V_d."""
        return len(self.d2t)

    @property
    def selected(self) -> npt.NDArray[np.int64]:
        """S, [V_d]: the verifier id of each draft id."""
        return self.d2t + np.arange(self.draft_size)

    @property
    def full(self) -> bool:
        return self.draft_size == self.verifier_size

    def check(self) -> None:
        """Raise `ConflictError` naming the first law the maps break.

        A stale or foreign map trains without an error and serves nonsense, so the maps are checked wherever they
        come from a file.
        """
        chosen = int(self.t2d.sum())
        if chosen != self.draft_size:
            raise ConflictError(f"vocabulary maps disagree: t2d selects {chosen} ids, d2t has {self.draft_size}")
        if (np.diff(self.d2t) < 0).any():
            at = int(np.argmax(np.diff(self.d2t) < 0)) + 1
            raise ConflictError(f"d2t falls at draft id {at}: offsets of ascending ids never do")
        if self.draft_size and not 0 <= self.d2t[0] <= self.d2t[-1] <= self.verifier_size - self.draft_size:
            raise ConflictError(f"d2t leads outside the verifier's vocabulary of {self.verifier_size}")
        if not self.t2d[self.selected].all():
            at = int(np.argmin(self.t2d[self.selected]))
            raise ConflictError(f"draft id {at} means verifier id {int(self.selected[at])}, which t2d leaves out")
        if self.digest != digest(self.verifier_size, self.d2t):
            raise ConflictError("the vocabulary's digest is not that of its maps: it was made for other data")


def build_vocabulary(counts: npt.NDArray[np.int64], draft_vocab_size: int | None = None) -> Vocabulary:
    """Select the most frequent ids: ties by the lower id, filled up with the lowest ids never seen.

    Arguments: `counts` [V], occurrences among trained tokens of the training split; `draft_vocab_size` V_d, None for
    the whole verifier vocabulary.
    """
    if counts.ndim != 1 or not len(counts) or counts.min() < 0:
        raise UsageError("token counts must be one non-negative number per verifier id")
    size = len(counts) if draft_vocab_size is None else draft_vocab_size
    if not 1 <= size <= len(counts):
        raise UsageError(
            f"a draft vocabulary of {size} does not fit the verifier's {len(counts)} tokens",
            hint=f"--draft-vocab takes 1 to {len(counts)}",
        )
    # A stable sort keeps ids ascending inside equal counts, and the never seen ids are the last such group.
    selected = np.sort(np.argsort(-counts.astype(np.int64), kind="stable")[:size])
    total = int(counts.sum())
    cover = int(counts[selected].sum()) / total if total else 0.0
    return from_selected(selected, len(counts), cover=cover)


def from_selected(selected: npt.NDArray[np.int64], verifier_size: int, *, cover: float) -> Vocabulary:
    """The maps of ascending verifier ids S."""
    t2d = np.zeros(verifier_size, dtype=np.bool_)
    t2d[selected] = True
    d2t = selected.astype(np.int64) - np.arange(len(selected), dtype=np.int64)
    vocabulary = Vocabulary(t2d=t2d, d2t=d2t, cover=cover, digest=digest(verifier_size, d2t))
    vocabulary.check()
    return vocabulary


def digest(verifier_size: int, d2t: npt.NDArray[np.int64]) -> str:
    """SHA-256 over "V V_d\\n" and the offsets as little-endian int64."""
    head = f"{verifier_size} {len(d2t)}\n".encode()
    return hashlib.sha256(head + d2t.astype("<i8").tobytes()).hexdigest()
