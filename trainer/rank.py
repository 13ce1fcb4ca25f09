"""One rank of a run, from joining the others to its outcome.

Also the program that `launch` starts W times (`python -m trainer.rank DIRECTORY`): options come from a file there,
the report goes to one. Leaves what happens between to `prepare` and `loop`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
import traceback
from pathlib import Path

import msgspec

from hsstore.errors import EXIT_INTERRUPTED, HsstoreError, from_os_error
from trainer.interrupt import Stop
from trainer.options import TrainOptions
from trainer.outcome import Outcome, RankReport

OPTIONS_FILE = "options.json"
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def report_file(directory: Path, rank: int) -> Path:
    return directory / f"rank-{rank}.json"


def run_rank(options: TrainOptions, stop: Stop) -> Outcome:
    """Train as the rank that the environment says, or alone. Raises what goes wrong."""
    from trainer import distributed
    from trainer.loop import Run
    from trainer.prepare import prepare
    from trainer.state import alone

    ranks = distributed.join(os.environ, options.device)
    with alone(options) if ranks.first else contextlib.nullcontext():
        setup = prepare(options, ranks)
        try:
            outcome = Run(setup, stop).train()
        finally:
            setup.source.close()
    # Only after success: with a peer gone, leaving in an orderly way waits for it.
    distributed.leave()
    return outcome


def main(directory: Path) -> int:
    """Run as a child of the launcher. Returns the exit code."""
    rank = int(os.environ["RANK"])
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # stdout is the launcher's, for data
    with Stop() as stop:
        _stop_with_parent(stop)
        try:
            options = msgspec.json.decode((directory / OPTIONS_FILE).read_bytes(), type=TrainOptions)
            report = RankReport(outcome=run_rank(options, stop), time=time.time())
            code = EXIT_INTERRUPTED if report.outcome and report.outcome.status == "interrupted" else 0
        except (HsstoreError, OSError) as error:
            named = error if isinstance(error, HsstoreError) else from_os_error(error)
            report = RankReport(kind=named.kind, message=named.message, hint=named.hint, time=time.time())
            code = named.exit_code
        except Exception as error:  # noqa: BLE001 (it leaves through the report, and this process ends)
            text = traceback.format_exc()
            report = RankReport(
                kind="error", message=f"{type(error).__name__}: {error}", traceback=text, time=time.time()
            )
            code = 1
        report_file(directory, rank).write_bytes(msgspec.json.encode(report))
    return code


def _stop_with_parent(stop: Stop) -> None:
    """When the launcher is killed, its ranks save and end, instead of training on unseen."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(os.environ["HSSTORE_LAUNCHER"]):  # it died before that line
        stop.requested = True


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
