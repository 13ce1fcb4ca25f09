"""Read every batch of a service again and again for a moment, and say how fast they came.

    python examples/demo/fetch.py http://127.0.0.1:8420 > fetch.json

Uses the trainer's own road (`hsstore.source`, one connection, one buffer that is filled anew), without a trainer.
"""

from __future__ import annotations

import argparse
import json
import sys
import time

from hsstore.errors import HsstoreError
from hsstore.plan import PlanParameters
from hsstore.source import BatchSource, open_source

BUFFER_BYTES = 256 << 20


def fetch(source: BatchSource, seconds: float) -> dict[str, float]:
    """Whole epochs over all samples, at least one, until `seconds` are over."""
    plan = source.make_plan(PlanParameters(split="all"))
    buffer = bytearray(BUFFER_BYTES)
    n_batches = n_bytes = epoch = 0
    start = time.perf_counter()
    while epoch == 0 or time.perf_counter() - start < seconds:
        for index in range(source.epoch_info(plan.plan_id, epoch).n_batches):
            batch = source.read_batch(plan.plan_id, epoch, index, buffer)
            n_bytes += sum(array.nbytes for array in batch.tensors.values())
            n_batches += 1
        epoch += 1
    taken = time.perf_counter() - start
    return {
        "epochs": epoch,
        "batches": n_batches,
        "bytes": n_bytes,
        "seconds": round(taken, 3),
        "gigabytes_per_second": round(n_bytes / taken / 1e9, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="How fast do batches come from a service?")
    parser.add_argument("source", help="URL of a service, or path of a store")
    parser.add_argument("--seconds", type=float, default=2.0, help="how long to read (default 2)")
    arguments = parser.parse_args()
    try:
        source = open_source(arguments.source)
        result = fetch(source, arguments.seconds)
        source.close()
    except HsstoreError as error:
        sys.exit(f"error: {error}")
    print(json.dumps(result))
    megabytes = result["bytes"] / result["batches"] / 1e6
    print(
        f"{result['gigabytes_per_second']} GB/s: {result['batches']} batches of {megabytes:.1f} MB"
        f" in {result['seconds']:.1f} s",
        file=sys.stderr,
    )


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
