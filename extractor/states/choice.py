"""Which samples of a store are checked: the same ones for the same seed and state, spread over its shards.

Letters: T tokens of a sample.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from hsstore.errors import DamagedError
from hsstore.index import usable
from hsstore.store import Store

_LOOKS = 8  # samples of a shard that are looked at for one with assistant tokens
_ENOUGH = 8  # assistant tokens


def choose(store: Store, n: int, seed: int) -> list[int]:
    """Rows of the index, ascending: of as many shards as possible, then a second of each, and so on.

    Of a few samples drawn in a shard one with assistant tokens is preferred: others tell the head nothing.
    """
    random = np.random.default_rng(seed)
    rows = np.flatnonzero(usable(store.index))
    shards = store.index.shard[rows]
    waiting = {int(shard): random.permutation(rows[shards == shard]).tolist() for shard in np.unique(shards)}
    order = _spread(list(waiting), n, random)
    chosen: list[int] = []
    while len(chosen) < n and waiting:
        for shard in order:
            if len(chosen) < n and shard in waiting:
                left = waiting[shard]
                chosen.append(left.pop(_best(store, left[:_LOOKS])))
                if not left:
                    del waiting[shard]
        order = list(waiting)
    return sorted(chosen)


def _spread(shards: list[int], n: int, random: np.random.Generator) -> list[int]:
    """Evenly spaced ones from a random start; all of them when there are no more than n."""
    if len(shards) <= n:
        return shards
    step = len(shards) / n
    start = random.uniform(0, step)
    return [shards[int(start + i * step)] for i in range(n)]


def _best(store: Store, rows: list[int]) -> int:
    """Which of these samples has assistant tokens; the first when none has, or they cannot be read."""
    for at, row in enumerate(rows):
        try:
            if np.count_nonzero(store.loss_mask(row)[1:]) >= _ENOUGH:
                return at
        except DamagedError:
            return at  # it is reported when the sample is read
    return 0


def neighbours(store: Store, source_index: int, most: int = 4096) -> Iterator[tuple[int, npt.NDArray[np.int32]]]:
    """(source_index, ids) of the samples in the same shard, the nearest `most` of them that can be read."""
    own = store.index.find(str(source_index))
    near = np.flatnonzero(usable(store.index) & (store.index.shard == store.index.shard[own]))
    near = near[np.argsort(np.abs(near - own), kind="stable")][:most]
    for row in near:
        try:
            yield int(store.index.source_index[row]), store.input_ids(int(row))
        except DamagedError:
            return  # the whole array is unreadable: reported where the checked samples are read
