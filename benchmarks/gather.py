"""Local road: a packed batch gathered into a buffer, as a share of one memcpy of as many bytes, interleaved in one run.

    python benchmarks/gather.py [--hidden 2048] [--batches 24]

A synthetic store of four states is written with the real writer, packed into 4,096-token batches and read warm: from
maps, from maps without the checks that keep a cut file from being SIGBUS, and with `pread`. The ceiling is `memoryview`
assignment from a buffer as large as the store (what it reads is no more in the cache than the store is). Each batch
counts with the best of its turns, so that other work on the machine counts less.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from hsstore import gather, shardfiles  # noqa: E402
from hsstore.plan import Plan, PlanParameters  # noqa: E402
from hsstore.store import Store  # noqa: E402
from tests.stores import make_samples, make_store  # noqa: E402


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def build(root: Path, hidden: int, n_batches: int) -> Path:
    lengths = np.clip(np.random.default_rng(0).lognormal(6.2, 0.7, n_batches * 6), 16, 4096).astype(int)
    samples = make_samples(lengths.tolist(), hidden_size=hidden, layers=("after_2", "after_8", "after_13", "final"))
    return make_store(root / "store", samples, chunk_rows=256).root


@contextmanager
def unchecked() -> Iterator[None]:
    """What the checks cost: without them."""
    kept = shardfiles._Map.check
    shardfiles._Map.check = lambda *_: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        shardfiles._Map.check = kept  # type: ignore[method-assign]


def measure(root: Path, turns: int) -> tuple[dict[str, list[float]], list[int]]:
    """GB/s by road, the best of the turns for each batch; the bytes of each batch."""
    stores = {"mmap": Store.open(root), "pread": Store.open(root, backend="pread")}
    mapped = stores["mmap"]
    plan = Plan(mapped.index, mapped.header.split, mapped.manifest_id, PlanParameters(split="all"))
    sizes = [gather.BatchView(mapped, plan, 0, b).n_bytes for b in range(plan.epoch(0).n_batches)]
    source = memoryview(bytearray(b"\1") * sum(sizes))  # not numpy's: that asks for huge pages, which no file has
    starts = np.cumsum([0, *sizes]).tolist()
    target = memoryview(bytearray(max(sizes)))
    rates: dict[str, list[float]] = {name: [0.0] * len(sizes) for name in ("memcpy", "mmap", "unchecked", "pread")}

    def copy(number: int) -> None:
        target[: sizes[number]] = source[starts[number] : starts[number] + sizes[number]]

    def read(backend: str, number: int) -> None:
        gather.gather(stores[backend], plan, 0, number, target)

    roads: dict[str, Callable[[int], None]] = {
        "memcpy": copy,
        "mmap": partial(read, "mmap"),
        "unchecked": partial(read, "mmap"),
        "pread": partial(read, "pread"),
    }
    order = random.Random(0)
    for turn in range(turns):
        for number, size in enumerate(sizes):
            # In another order each time: who comes second finds a part of the batch in the cache.
            for name in order.sample(list(roads), len(roads)):
                with unchecked() if name == "unchecked" else nullcontext():
                    taken = seconds(partial(roads[name], number))
                if turn:  # the first pass warms maps and buffers
                    rates[name][number] = max(rates[name][number], size / taken / 1e9)
    return rates, sizes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--batches", type=int, default=24)
    parser.add_argument("--turns", type=int, default=12)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        rates, sizes = measure(build(Path(directory), options.hidden, options.batches), options.turns)
    print(f"{len(sizes)} batches of up to {max(sizes) / 1e6:.0f} MB, H = {options.hidden}")
    for name, title in (
        ("memcpy", "memcpy"),
        ("mmap", "gather, maps"),
        ("unchecked", "  … unchecked"),
        ("pread", "gather, pread"),
    ):
        share = statistics.median(ours / ceiling for ours, ceiling in zip(rates[name], rates["memcpy"], strict=True))
        print(f"{title:<14} {statistics.median(rates[name]):6.2f} GB/s  {share:.2f} of memcpy")


if __name__ == "__main__":
    main()
