"""Which samples make which packed batch of which epoch: a pure function of the index and the parameters.

permutation seeded by (seed, epoch) → windowed best-fit-decreasing packing into bins of at most `max_seq_len` tokens →
bins shuffled, then ordered in windows by Σ length², so that neighbours, hence the ranks of one step, cost alike.
Independent of the number of ranks: rank r of W takes bin step·W + r, and the caller fills the last step with empty
bins. Leaves the bytes to `gather`.

Letters: N samples, B bins (batches), W ranks.
"""

from __future__ import annotations

import bisect
import threading
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hsstore.errors import NotFoundError, UsageError
from hsstore.index import Index, SplitName, members
from hsstore.records import Split, canonical, sha256_hex

ALGORITHM = "best-fit-1"
"""Version of everything below that decides a batch; part of `plan_id`."""
OPEN_BINS = 2048
WINDOW_BINS = 64
WINDOW_SAMPLES = 2048
KEPT_EPOCHS = 4
MAX_SEQ_LEN = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanParameters:
    """What a plan depends on besides the store."""

    max_seq_len: int = 4096
    """Budget of a batch in tokens."""
    seed: int = 0
    split: SplitName = "train"
    overflow: str = "truncate"
    """Samples longer than the budget: `truncate` keeps their first tokens, `drop` leaves them out."""

    def check(self) -> None:
        """Raise `UsageError` for values no plan can be made of."""
        if not 2 <= self.max_seq_len <= MAX_SEQ_LEN:
            raise UsageError(f"max_seq_len must be 2 to {MAX_SEQ_LEN}, found {self.max_seq_len}")
        if not 0 <= self.seed < 2**63:
            raise UsageError(f"seed must be 0 to 2^63 - 1, found {self.seed}")
        if self.split not in ("train", "validation", "all"):
            raise UsageError(f"split must be train, validation or all, found {self.split!r}")
        if self.overflow not in ("truncate", "drop"):
            raise UsageError(f"overflow must be truncate or drop, found {self.overflow!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A piece of a batch: tokens [start, stop) of one sample."""

    sample: int
    """Row of the index."""
    start: int
    stop: int

    @property
    def n_tokens(self) -> int:
        return self.stop - self.start


class EpochPlan:
    """The bins of one epoch."""

    def __init__(
        self, offsets: npt.NDArray[np.int64], samples: npt.NDArray[np.int64], stops: npt.NDArray[np.int64]
    ) -> None:
        self._offsets, self._samples, self._stops = offsets, samples, stops

    @property
    def n_batches(self) -> int:
        """B."""
        return len(self._offsets) - 1

    @property
    def n_samples(self) -> int:
        return len(self._samples)

    @property
    def n_tokens(self) -> int:
        return int(self._stops.sum())

    def segments(self, batch: int) -> list[Segment]:
        """The pieces of batch `batch`, in order. Raises `NotFoundError` outside 0 … B−1."""
        if not 0 <= batch < self.n_batches:
            raise NotFoundError(f"no batch {batch}: the epoch has batches 0 to {self.n_batches - 1}")
        span = slice(int(self._offsets[batch]), int(self._offsets[batch + 1]))
        pairs = zip(self._samples[span].tolist(), self._stops[span].tolist(), strict=True)
        return [Segment(sample=sample, start=0, stop=stop) for sample, stop in pairs]


class Plan:
    """Every epoch of one way to pack one state of one store."""

    def __init__(self, index: Index, split: Split, manifest_id: str, parameters: PlanParameters) -> None:
        parameters.check()
        self.manifest_id = manifest_id
        self.parameters = parameters
        self.plan_id = plan_id(manifest_id, parameters)
        chosen = members(index, split, parameters.split)
        lengths = index.n_tokens[chosen].astype(np.int64)
        long = lengths > parameters.max_seq_len
        short = lengths < 2  # gives no training row: x_{j+1} is needed
        keep = ~short if parameters.overflow == "truncate" else ~short & ~long
        self.n_cut = int(long.sum()) if parameters.overflow == "truncate" else 0
        """Samples cut to the budget."""
        self.n_dropped = int((~keep).sum())
        """Samples left out: too long under `drop`, or of a single token."""
        self._samples = chosen[keep].astype(np.int64)
        self._lengths = np.minimum(lengths[keep], parameters.max_seq_len)
        self._epochs: OrderedDict[int, EpochPlan] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def n_samples(self) -> int:
        return len(self._samples)

    @property
    def n_tokens(self) -> int:
        return int(self._lengths.sum())

    def epoch(self, epoch: int) -> EpochPlan:
        """The bins of an epoch, computed once and kept for the last few epochs asked for."""
        if not 0 <= epoch < 2**31:
            raise NotFoundError(f"no epoch {epoch}: expected 0 to 2^31 - 1")
        with self._lock:
            packed = self._epochs.get(epoch)
            if packed is None:
                packed = self._epochs[epoch] = self._pack(epoch)
                while len(self._epochs) > KEPT_EPOCHS:
                    self._epochs.popitem(last=False)
            return packed

    def _pack(self, epoch: int) -> EpochPlan:
        rng = np.random.Generator(np.random.PCG64([self.parameters.seed, epoch]))
        order = longest_first(rng.permutation(self.n_samples), self._lengths)
        packed = best_fit(self._lengths[order].tolist(), self.parameters.max_seq_len)
        # Packing puts the long samples of a window into its first bins: shuffle that order away before balancing.
        bins = [[int(order[i]) for i in packed[b]] for b in rng.permutation(len(packed))]
        bins = balance(bins, self._lengths)
        flat = np.array([i for b in bins for i in b], np.int64)
        offsets = np.cumsum([0, *map(len, bins)], dtype=np.int64)
        return EpochPlan(offsets, self._samples[flat], self._lengths[flat])


def plan_id(manifest_id: str, parameters: PlanParameters) -> str:
    """SHA-256 over (manifest_id, parameters, algorithm version), as hex."""
    return sha256_hex(canonical({"algorithm": ALGORITHM, "manifest_id": manifest_id, "parameters": parameters}))


def longest_first(order: npt.NDArray[np.intp], lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.intp]:
    """Sort each window of `WINDOW_SAMPLES` of a permutation by falling length, ties by their former order.

    Best fit then leaves 0.03 to 0.2 % of the bins empty on log-normal lengths of mean 250 to 2,300; 0.7 % without.
    """
    windows = [order[i : i + WINDOW_SAMPLES] for i in range(0, len(order), WINDOW_SAMPLES)]
    return np.concatenate([w[np.argsort(-lengths[w], kind="stable")] for w in windows] or [order])


def best_fit(lengths: list[int], capacity: int) -> list[list[int]]:
    """Pack items in order, each into the fullest of the last `OPEN_BINS` open bins that still takes it.

    Returns the item numbers of each bin, bins in the order they were opened.
    """
    bins: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (free tokens, bin), ascending
    for item, length in enumerate(lengths):
        at = bisect.bisect_left(free, (length, -1))
        if at == len(free):
            if len(free) == OPEN_BINS:
                free.pop(0)
            room, target = capacity, len(bins)
            bins.append([])
        else:
            room, target = free.pop(at)
        bins[target].append(item)
        if room > length:
            bisect.insort(free, (room - length, target))
    return bins


def balance(bins: list[list[int]], lengths: npt.NDArray[np.int64]) -> list[list[int]]:
    """Order bins inside windows of `WINDOW_BINS` by Σ length² (attention cost), ties by their former order."""
    out: list[list[int]] = []
    for start in range(0, len(bins), WINDOW_BINS):
        window = bins[start : start + WINDOW_BINS]
        out += sorted(window, key=lambda b: int(np.square(lengths[b]).sum()))
    return out
