"""Every call of every scenario, others before it: the long form of tests/races/test_races.py.

    python -m tests.races [--scenario NAME …] [--drawn N] [--jobs 2]

Prints how many interleavings were tried and which did not hold; exit code 1 when any did not.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

from tests.faults.harness import in_memory
from tests.races.harness import Broken, Harness, Tally, run_all
from tests.races.scenarios import SCENARIOS


def run_scenario(number: int, drawn: int, seed: int, every: int) -> tuple[str, int, Tally]:
    with tempfile.TemporaryDirectory(prefix="hsstore-races-", dir=in_memory()) as directory:
        harness = Harness(SCENARIOS[number], Path(directory))
        ways = harness.single()[::every] + harness.double(drawn, seed) + harness.drawn(drawn, seed)
        return SCENARIOS[number].name, len(harness.steps), run_all(harness, ways)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenario", action="append", help="only those whose name holds that (default: all)")
    parser.add_argument("--drawn", type=int, default=300, help="of the drawn interleavings of each kind")
    parser.add_argument("--every", type=int, default=1, help="only every so many call of the systematic ones")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--show", type=int, default=10, help="how many kinds of what did not hold")
    options = parser.parse_args()
    wanted = options.scenario or [""]
    chosen = [n for n, s in enumerate(SCENARIOS) if any(w in s.name for w in wanted)]
    started, broken, tried, calls = time.monotonic(), list[Broken](), 0, 0
    with ProcessPoolExecutor(options.jobs) as pool:
        work = partial(run_scenario, drawn=options.drawn, seed=options.seed, every=options.every)
        for name, n_calls, tally in pool.map(work, chosen):
            print(f"{name:<44} {n_calls:>6,} calls {tally.tried:>7,} interleavings {len(tally.broken):>5,} broken")
            sys.stdout.flush()
            broken, tried, calls = broken + tally.broken, tried + tally.tried, calls + n_calls
    groups: dict[tuple[str, str], list[Broken]] = {}
    for one in broken:
        places = [line.strip() for line in one.why.splitlines() if "hsstore/" in line and "File" in line]
        groups.setdefault((one.scenario, " ".join(places[-2:])), []).append(one)
    for group in list(groups.values())[: options.show]:
        print(f"--- {len(group)} × such as {group[0]}")
    print(f"{tried:,} interleavings of {calls:,} calls in {time.monotonic() - started:.0f} s: {len(broken)} broken")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
