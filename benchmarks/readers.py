"""The same packed batches read by hsstore and by three readers of plain Zarr, in one run, equal to the bit.

    python benchmarks/readers.py [--hidden 2048] [--batches 12] [--turns 5]

Every reader fills one buffer with the rows of every sample of a batch, from all arrays of the store, warm. hsstore also
makes the batch's header and small tensors, on one thread; TensorStore and zarrs use every core. zarr-python and zarrs
are asked sample by sample, TensorStore for all samples of a batch at once. The best of the turns counts for each batch.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorstore
import zarr

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.gather import build  # noqa: E402
from hsstore import gather  # noqa: E402
from hsstore.plan import Plan, PlanParameters  # noqa: E402
from hsstore.store import Store  # noqa: E402

Rows = dict[str, npt.NDArray[Any]]
"""By array name, the rows of a batch."""
Spans = list[slice]
"""Of each sample, its rows in the arrays of the whole store."""


class Batches:
    """What is to be read, and where the answer of the last reader lies."""

    def __init__(self, root: Path) -> None:
        self.store = Store.open(root)
        split, manifest_id = self.store.header.split, self.store.manifest_id
        self.plan = Plan(self.store.index, split, manifest_id, PlanParameters(split="all"))
        self.n = self.plan.epoch(0).n_batches
        self.n_bytes = [gather.BatchView(self.store, self.plan, 0, b).n_bytes for b in range(self.n)]
        self.buffer = bytearray(max(self.n_bytes))
        self._rows = {
            spec.name: np.zeros((self.plan.parameters.max_seq_len, *spec.row_shape), spec.dtype)
            for spec in self.store.header.arrays
        }

    def spans(self, number: int) -> Spans:
        at, rows = self.store.index, self.store.header.shard_rows
        firsts = (
            (s, int(at.shard[s.sample]) * rows + int(at.row[s.sample])) for s in self.plan.epoch(0).segments(number)
        )
        return [slice(first, first + segment.stop) for segment, first in firsts]

    def targets(self, name: str, spans: Spans) -> Iterator[tuple[slice, npt.NDArray[Any]]]:
        """Each sample's rows in the store, and where they go."""
        at = 0
        for span in spans:
            n = span.stop - span.start
            yield span, self._rows[name][at : at + n]
            at += n

    def filled(self, spans: Spans) -> Rows:
        n = sum(span.stop - span.start for span in spans)
        return {name: rows[:n] for name, rows in self._rows.items()}


def ours(batches: Batches, **options: Any) -> Callable[[int], Rows]:
    store = Store.open(batches.store.root, **options)

    def read(number: int) -> Rows:
        tensors = gather.read(store, batches.plan, 0, number, batches.buffer).tensors
        names = {spec.name: spec.name.removeprefix("tokens/").replace("/", ".") for spec in store.header.arrays}
        return {name: tensors[tensor] for name, tensor in names.items()}

    return read


def by_zarr(batches: Batches, pipeline: str | None = None) -> Callable[[int], Rows]:
    with zarr.config.set({"codec_pipeline.path": pipeline} if pipeline else {}):
        group = zarr.open_group(batches.store.root / "arrays.zarr", mode="r")
        arrays: dict[str, Any] = {spec.name: group[spec.name] for spec in batches.store.header.arrays}
    found = {type(array.async_array.codec_pipeline).__name__ for array in arrays.values()}
    assert found == {pipeline.rpartition(".")[2] if pipeline else "BatchedCodecPipeline"}, found

    def read(number: int) -> Rows:
        spans = batches.spans(number)
        for name, array in arrays.items():
            for span, target in batches.targets(name, spans):
                target[...] = array[span]
        return batches.filled(spans)

    return read


def by_tensorstore(batches: Batches) -> Callable[[int], Rows]:
    def opened(name: str) -> Any:
        where = {"driver": "file", "path": str(batches.store.root / "arrays.zarr" / name)}
        return tensorstore.open({"driver": "zarr3", "kvstore": where}).result()

    arrays = {spec.name: opened(spec.name) for spec in batches.store.header.arrays}

    def read(number: int) -> Rows:
        spans, waiting = batches.spans(number), []
        for name, array in arrays.items():
            for span, target in batches.targets(name, spans):
                waiting.append(tensorstore.array(target).write(array[span]))
        for future in waiting:
            future.result()
        return batches.filled(spans)

    return read


def by_memmap(batches: Batches) -> Callable[[int], Rows]:
    """`np.memmap` of the files, as anybody may: no index, no check."""
    store, maps = batches.store, dict[tuple[str, int], Any]()

    def mapped(name: str, shard: int) -> Any:
        if (name, shard) not in maps:
            spec, n_rows = store.header.array(name), store.state.shards[shard].n_rows
            path = next(p for p in store.state.shards[shard].files if p.startswith(f"arrays.zarr/{name}/"))
            maps[name, shard] = np.memmap(store.root / path, spec.dtype, "r", shape=(n_rows, *spec.row_shape))
        return maps[name, shard]

    def read(number: int) -> Rows:
        spans = batches.spans(number)
        for spec in store.header.arrays:
            for span, target in batches.targets(spec.name, spans):
                shard, row = divmod(span.start, store.header.shard_rows)
                target[...] = mapped(spec.name, shard)[row : row + len(target)]
        return batches.filled(spans)

    return read


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--batches", type=int, default=12)
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        batches = Batches(build(Path(directory), options.hidden, options.batches))
        readers = {
            "hsstore, maps": ours(batches),
            "hsstore, pread": ours(batches, backend="pread"),
            "np.memmap by hand": by_memmap(batches),
            "TensorStore": by_tensorstore(batches),
            "zarrs (zarr-python's pipeline in Rust)": by_zarr(batches, "zarrs.ZarrsCodecPipeline"),
            "zarr-python": by_zarr(batches),
        }
        n_compared = compare(readers, batches)
        rates = measure(readers, batches, options.turns)
    print(f"{batches.n} batches of up to {max(batches.n_bytes) / 1e6:.0f} MB, H = {options.hidden}")
    print(f"{n_compared:,} arrays compared, equal to the bit\n")
    print("| reader | GB/s | hsstore is faster by |\n|---|---|---|")
    best = statistics.median(rates["hsstore, maps"])
    for name, found in rates.items():
        print(f"| {name} | {statistics.median(found):.2f} | {best / statistics.median(found):.1f} × |")


def compare(readers: dict[str, Callable[[int], Rows]], batches: Batches) -> int:
    """Every batch by every reader, against the states in the files. Returns how many arrays were equal."""
    n = 0
    for number in range(batches.n):
        expected = {name: rows.copy() for name, rows in readers["hsstore, maps"](number).items()}
        for name, read in readers.items():
            found = read(number)
            assert found.keys() == expected.keys()
            for array, rows in expected.items():
                assert np.array_equal(found[array], rows), (name, number, array)
                assert rows.any(), "zeros would be equal to anything that read nothing"
                n += 1
    return n


def measure(readers: dict[str, Callable[[int], Rows]], batches: Batches, turns: int) -> dict[str, list[float]]:
    """GB/s by reader, the best turn of each batch."""
    rates = {name: [0.0] * batches.n for name in readers}
    order = random.Random(0)
    for _ in range(turns):
        for number, n_bytes in enumerate(batches.n_bytes):
            for name in order.sample(list(readers), len(readers)):
                started = time.perf_counter()
                readers[name](number)
                rates[name][number] = max(rates[name][number], n_bytes / (time.perf_counter() - started) / 1e9)
    return rates


if __name__ == "__main__":
    main()
