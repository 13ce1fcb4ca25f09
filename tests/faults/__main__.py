"""Every call of every scenario fails with every error it may answer: the long form of tests/faults/test_faults.py.

    python -m tests.faults [--scenario NAME …] [--sample N] [--jobs 2] [--verbose]

Prints how many faults were injected by scenario, kind of call and error, how the acts ended and which failures were
tolerated; exit code 1 when anything did not hold.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

from tests.faults.harness import Broken, Harness, Tally, in_memory, run_all
from tests.faults.scenarios import SCENARIOS


def run_scenario(number: int, sample: int | None, seed: int) -> Tally:
    with tempfile.TemporaryDirectory(prefix="hsstore-faults-", dir=in_memory()) as directory:
        harness = Harness(SCENARIOS[number], Path(directory))
        return run_all(harness, harness.faults() if sample is None else harness.sample(sample, seed))


def report(tally: Tally, seconds: float, verbose: bool) -> None:
    by_scenario, by_fault, by_kind = Counter[str](), Counter[str](), Counter[str]()
    for (scenario, kind, fault), n in tally.injected.items():
        by_scenario[scenario] += n
        by_fault[fault.rstrip("+")] += n
        by_kind[kind] += n
    print(f"{'scenario':<20} {'calls':>6} {'faults':>7}")
    for name, n in by_scenario.items():
        print(f"{name:<20} {tally.calls[name]:>6,} {n:>7,}")
    for title, counts in (("by error", by_fault), ("by kind of call", by_kind), ("ended", tally.outcomes)):
        print(f"{title}: " + ", ".join(f"{k} {n:,}" for k, n in sorted(counts.items())))
    if verbose:
        for place, n in sorted(tally.tolerated.items()):
            print(f"  tolerated {n:>4} × {place}")
    total = sum(by_scenario.values())
    print(
        f"{total:,} faults at {len(tally.places)} places of the code, {sum(tally.calls.values()):,} calls,"
        f" {len(by_scenario)} scenarios, in {seconds:.0f} s: {len(tally.broken)} broken"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenario", action="append", help="only these (default: all)")
    parser.add_argument("--sample", type=int, help="only so many faults of each scenario, drawn by --seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--verbose", action="store_true", help="list every tolerated failure")
    parser.add_argument("--show", type=int, default=20, help="of how many broken places to print one fault")
    options = parser.parse_args()
    names = [s.name for s in SCENARIOS]
    for name in options.scenario or ():
        if name not in names:
            parser.error(f"no scenario {name!r}; there are {', '.join(names)}")
    chosen = [n for n, name in enumerate(names) if name in (options.scenario or names)]
    started, tally = time.monotonic(), Tally()
    with ProcessPoolExecutor(options.jobs) as pool:
        for part in pool.map(partial(run_scenario, sample=options.sample, seed=options.seed), chosen):
            tally.add(part)
            print(f"{', '.join(part.calls)}: {len(part.broken)} broken", file=sys.stderr)
    groups: dict[tuple[str, str, str], list[Broken]] = {}
    for broken in tally.broken:
        groups.setdefault((broken.scenario, broken.call.name, broken.call.place), []).append(broken)
    for group in list(groups.values())[: options.show]:
        codes = sorted({b.fault.name for b in group})
        print(f"--- {len(group)} × {', '.join(codes)}, such as {group[0]}")
    report(tally, time.monotonic() - started, options.verbose)
    return 1 if tally.broken else 0


if __name__ == "__main__":
    sys.exit(main())
