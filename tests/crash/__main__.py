"""By hand: `python -m tests.crash [--budget N] [--seed S] [--only NAME] [--fsyncs]`. Prints the counts."""

from __future__ import annotations

import argparse
import sys
import time

from tests.crash.engine import judge, record, without
from tests.crash.scenarios import LONG


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.crash", description=__doc__)
    parser.add_argument("--budget", type=int, default=10**9, help="states per scenario")
    parser.add_argument("--per-point", type=int, default=40, help="states per point of a crash")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="only scenarios with this in their name")
    parser.add_argument(
        "--fsyncs", action="store_true", help="leave out each fsync in turn: which of them carry weight?"
    )
    parser.add_argument("--steps", action="store_true", help="list the recorded operations")
    options = parser.parse_args()
    bad = 0
    print(f"{'operation':20s} {'steps':>6s} {'states':>7s} {'violations':>10s} {'seconds':>8s}")
    for scenario in LONG:
        if options.only not in scenario.name:
            continue
        start, trace = time.perf_counter(), record(scenario)
        if options.steps:
            for i, op in enumerate(trace.ops, start=1):
                print(f"{i:5d} {op.kind:7s} {op.where or op.item}")
        bounds = {"seed": options.seed, "per_point": options.per_point, "budget": options.budget}
        verdict = judge(scenario, trace, **bounds)
        counts = f"{len(trace.ops):6d} {verdict.states:7d} {len(verdict.violations):10d}"
        print(f"{scenario.name:20s} {counts} {time.perf_counter() - start:8.1f}", flush=True)
        for violation in verdict.violations[:10]:
            print(f"    {violation}")
        bad += len(verdict.violations)
        if options.fsyncs:
            for n, op in enumerate(o for o in trace.ops if o.kind == "fsync"):
                found = judge(scenario, without(trace, n), first=True, **bounds).violations
                print(
                    f"    without fsync of {op.where or 'the parent'}: {'needed' if found else 'not needed'}",
                    flush=True,
                )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
