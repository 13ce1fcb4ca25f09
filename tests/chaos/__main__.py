"""By hand: `python -m tests.chaos --kills 1000 --stops 100 --writers 8`. Prints the counts; 1 when a promise broke."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # processes are forked: there must be one thread only

from tests.chaos.driver import Settings, chaos


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.chaos", description=__doc__)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--stops", type=int, default=100)
    parser.add_argument("--writers", type=int, default=8, help="at most so many at once")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--broken", choices=["rename-overwrite"], default="", help="a protocol that must fail")
    parser.add_argument("--json", action="store_true", help="the report as JSON on stdout")
    options = parser.parse_args()
    settings = Settings(
        kills=options.kills, stops=options.stops, writers=options.writers, seed=options.seed, broken=options.broken
    )
    memory = Path("/dev/shm")
    where = memory if os.access(memory, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="hsstore-chaos-", dir=where) as directory:
        report = chaos(settings, Path(directory).resolve(), lambda line: print(line, file=sys.stderr, flush=True))
    for violation in report.violations[:20]:
        print(f"VIOLATION {violation}", file=sys.stderr)
    if options.json:
        fields = {name: getattr(report, name) for name in report.__slots__}
        print(json.dumps(fields))
    else:
        print("\n".join(report.lines()))
    return 1 if report.violations else 0


if __name__ == "__main__":
    sys.exit(main())
