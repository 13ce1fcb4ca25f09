"""Starts the W ranks of a run on this machine and ends them together.

Responsible for: the processes, passing signals on, telling which rank's error came first. Leaves training to `rank`.
`torchrun -m trainer …` does the same across machines; here one sentence comes out instead of W tracebacks.

Letters: W ranks.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import click
import msgspec

from hsstore.console import note
from hsstore.errors import HsstoreError, IncompleteError
from trainer.interrupt import Stop
from trainer.options import TrainOptions
from trainer.outcome import Outcome, RankReport, rebuild
from trainer.rank import OPTIONS_FILE, report_file

POLL_SECONDS = 0.1
GRACE_SECONDS = 5.0  # for the other ranks to notice that one is gone, and to say so


def launch(options: TrainOptions, stop: Stop) -> Outcome:
    """Run all ranks. Raises the error of the rank that failed first; no rank is left behind.

    A stop is passed on once: the ranks agree on a step, save and end. They ignore the terminal's own Ctrl-C, being in
    sessions of their own.
    """
    with tempfile.TemporaryDirectory(prefix="hsstore-train-") as name:
        directory = Path(name)
        (directory / OPTIONS_FILE).write_bytes(msgspec.json.encode(replace(options, token=None)))
        processes = [_start(options, directory, rank) for rank in range(options.nproc)]
        try:
            told = _wait(processes, stop)
        finally:
            _kill(processes)
        if told and any(p.returncode == -signal.SIGTERM for p in processes):
            raise KeyboardInterrupt  # told before it could listen: it had nothing to save
        return _result(processes, [_report(directory, rank) for rank in range(options.nproc)], options)


def _start(options: TrainOptions, directory: Path, rank: int) -> subprocess.Popen[bytes]:
    world = options.nproc
    environment = {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        # A file needs no port, so nobody can take it between choosing and binding it.
        "HSSTORE_RENDEZVOUS": f"file://{directory / 'rendezvous'}",
        "HSSTORE_LAUNCHER": str(os.getpid()),
        "OMP_NUM_THREADS": str(options.threads or max(1, len(os.sched_getaffinity(0)) // world)),
    }
    if Path("/sys/class/net/lo").exists():
        environment["GLOO_SOCKET_IFNAME"] = (
            "lo"  # all ranks are here; a host name that resolves elsewhere must not matter
        )
    if options.token is not None:
        environment["HSSTORE_TOKEN"] = options.token
    command = [sys.executable, "-m", "trainer.rank", str(directory)]
    return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True)


def _wait(processes: list[subprocess.Popen[bytes]], stop: Stop) -> bool:
    """Until all have ended, or one has failed and the grace period is over. Returns whether they were told to stop."""
    told, failed_at = False, None
    while any(p.poll() is None for p in processes):
        if stop.requested and not told:
            told = True
            note("stopping after the step in progress; once more to stop at once")
            for process in processes:
                process.send_signal(signal.SIGTERM)
        if failed_at is None and any(p.poll() not in (None, 0, 130) for p in processes):
            failed_at = time.monotonic()
        if failed_at is not None and time.monotonic() - failed_at > GRACE_SECONDS:
            return told
        time.sleep(POLL_SECONDS)
    return told


def _kill(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        if process.poll() is None:
            process.kill()
            process.wait()
            process.returncode = 0  # ours, not what went wrong


def _report(directory: Path, rank: int) -> RankReport | None:
    try:
        return msgspec.json.decode(report_file(directory, rank).read_bytes(), type=RankReport)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


def _result(
    processes: list[subprocess.Popen[bytes]], reports: list[RankReport | None], options: TrainOptions
) -> Outcome:
    for rank, (process, report) in enumerate(zip(processes, reports, strict=True)):
        if report is None and process.returncode:
            raise _died(rank, process.returncode, options)
    errors = [(r.kind == "error", r.time, rank, r) for rank, r in enumerate(reports) if r is not None and r.kind]
    if errors:
        # An error with a name is the cause; "connection closed by peer" of the others is its effect.
        _, _, rank, first = min(errors)
        if first.traceback:
            click.echo(first.traceback, err=True, nl=False)
        alike = sum(r is not None and r.message == first.message for r in reports)
        who = "" if alike == options.nproc else f"rank {rank} of {options.nproc}: "
        raise rebuild(replace(first, message=who + first.message))
    assert reports[0] is not None
    assert reports[0].outcome is not None
    return reports[0].outcome


def _died(rank: int, code: int, options: TrainOptions) -> HsstoreError:
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    memory = "SIGKILL is often the kernel's out-of-memory killer; " if code == -signal.SIGKILL else ""
    return IncompleteError(
        f"rank {rank} of {options.nproc} {how}, so all were ended",
        hint=f"{memory}--resume goes on from the last checkpoint in {options.out}",
    )
