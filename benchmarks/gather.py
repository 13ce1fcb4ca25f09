"""Local road: a packed batch gathered into a buffer, as a share of one memcpy of as many bytes, interleaved in one run.

    python benchmarks/gather.py [--hidden 2048] [--batches 24]

A synthetic store of four states is written with the real writer, packed into 4,096-token batches and read warm. The
ceiling is `memoryview` assignment between two buffers of the batch's size.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from hsstore import gather  # noqa: E402
from hsstore.plan import Plan, PlanParameters  # noqa: E402
from hsstore.store import Store  # noqa: E402
from tests.stores import make_samples, make_store  # noqa: E402


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def build(root: Path, hidden: int, n_batches: int) -> tuple[Store, Plan]:
    lengths = np.clip(np.random.default_rng(0).lognormal(6.2, 0.7, n_batches * 6), 16, 4096).astype(int)
    samples = make_samples(lengths.tolist(), hidden_size=hidden, layers=("after_2", "after_8", "after_13", "final"))
    store = make_store(root / "store", samples, chunk_rows=256)
    plan = Plan(store.index, store.header.split, store.manifest_id, PlanParameters(split="all"))
    return store, plan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--batches", type=int, default=24)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        store, plan = build(Path(directory), options.hidden, options.batches)
        sizes = [gather.BatchView(store, plan, 0, b).n_bytes for b in range(plan.epoch(0).n_batches)]
        source, target = (memoryview(bytearray(max(sizes))) for _ in range(2))
        rates: dict[str, list[float]] = {"memcpy": [], "gather": []}
        for turn in range(6):
            for number, size in enumerate(sizes):
                copied = seconds(lambda n=size: target.__setitem__(slice(0, n), source[:n]))  # type: ignore[misc]
                gathered = seconds(lambda b=number: gather.gather(store, plan, 0, b, target))  # type: ignore[misc]
                if turn:  # the first pass warms maps and buffers
                    rates["memcpy"].append(size / copied / 1e9)
                    rates["gather"].append(size / gathered / 1e9)
        ceiling, ours = (statistics.median(rates[name]) for name in ("memcpy", "gather"))
        print(f"{len(sizes)} batches of up to {max(sizes) / 1e6:.0f} MB, H = {options.hidden}")
        print(f"memcpy  {ceiling:6.2f} GB/s\ngather  {ours:6.2f} GB/s  {ours / ceiling:.2f} of memcpy")


if __name__ == "__main__":
    main()
