"""Rows as they are read against the statistics that their shard's record holds: rms, largest value, NaN and Inf.

Shards are read whole, each with all its states, as long as that takes little; of the others the checked rows must be
possible: no value above the largest, no more NaN than counted, no more energy than the whole. Leaves bytes and digests
to `hsstore verify manifest`.

Letters: T tokens, H hidden size, C rows of a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from extractor.states.finding import Finding, damage
from extractor.states.sample import Checked
from hsstore.errors import DamagedError
from hsstore.records import ArrayStatistics, ShardRecord
from hsstore.statistics import Accumulator, to_float32
from hsstore.store import Store

_TOLERANCE = 1e-4  # of an rms; a float32 sum of squares is good to 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """What was compared with records."""

    shards_whole: int
    shards_by_rows: int
    findings: tuple[Finding, ...]


def not_finite(samples: Sequence[Checked]) -> list[Finding]:
    """NaN and Inf in the checked rows: no training survives them."""
    out = []
    for sample in samples:
        for name, rows in sample.states.items():
            bad = int(np.count_nonzero((rows & np.uint16(0x7F80)) == np.uint16(0x7F80)))
            if bad:
                out.append(damage("finite", "holds NaN or Inf", name, samples=(sample.source_index,)))
    return out


def compare(store: Store, samples: Sequence[Checked], most_bytes: int) -> Recorded:
    """`most_bytes`: how much may be read of whole shards, all together."""
    by_shard: dict[int, list[Checked]] = {}
    for sample in samples:
        assert sample.shard is not None
        by_shard.setdefault(sample.shard, []).append(sample)
    whole, findings = 0, []
    for shard, inside in sorted(by_shard.items()):
        try:
            record = store.record(shard)
            size = record.n_rows * 2 * store.capture.hidden_size * len(store.layers)
            if size <= most_bytes:
                most_bytes -= size
                whole += 1
                findings += _whole(store, record)
            else:
                findings += _rows(store, record, inside)
        except DamagedError as error:
            findings.append(damage("read", error.message))
    return Recorded(shards_whole=whole, shards_by_rows=len(by_shard) - whole, findings=tuple(findings))


def _whole(store: Store, record: ShardRecord) -> list[Finding]:
    out = []
    for name in store.layers:
        said = record.statistics[f"hidden/{name}"]
        found = _of_shard(store, record, name)
        if (found.nan, found.inf, found.absmax) != (said.nan, said.inf, said.absmax) or not _near(found.rms, said.rms):
            out.append(damage("statistics", f"shard {record.shard} has {_show(found)}, recorded {_show(said)}", name))
    return out


def _of_shard(store: Store, record: ShardRecord, name: str) -> ArrayStatistics:
    spec = store.header.array(f"hidden/{name}")
    block_rows = store.header.chunk_rows
    seen = Accumulator(record.n_rows, block_rows, spec)
    buffer = np.empty(block_rows * spec.row_bytes, np.uint8)
    for block in range(-(-record.n_rows // block_rows)):
        rows = min(block_rows, record.n_rows - block * block_rows)
        view = buffer[: rows * spec.row_bytes].data
        store.read_into(spec.name, record.shard, block * block_rows, view)
        seen.add(block, view)
    return seen.result()


def _rows(store: Store, record: ShardRecord, samples: Sequence[Checked]) -> list[Finding]:
    out = []
    for name in store.layers:
        said = record.statistics[f"hidden/{name}"]
        values = to_float32(np.concatenate([s.states[name] for s in samples]))
        finite = values[np.isfinite(values)]
        largest = float(np.abs(finite).max(initial=0.0))
        energy = float(np.square(finite, dtype=np.float64).sum())
        whole = said.rms**2 * record.n_rows * store.capture.hidden_size
        lost = values.size - finite.size
        if largest > said.absmax or lost > said.nan + said.inf or energy > whole * (1 + _TOLERANCE) ** 2:
            found = f"its checked rows have absmax {largest:g} and {lost} NaN or Inf"
            out.append(damage("statistics", f"shard {record.shard}: {found}, recorded {_show(said)}", name))
    return out


def _near(found: float, said: float) -> bool:
    return abs(found - said) <= _TOLERANCE * max(abs(said), 1e-30)


def _show(s: ArrayStatistics) -> str:
    return f"rms {s.rms:.6g}, absmax {s.absmax:g}, {s.nan} NaN, {s.inf} Inf"
