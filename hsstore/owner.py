"""Which process works in a place, and whether it still lives.

A mark names machine, boot, process-id namespace, process id and start time: neither another host, nor a restart, nor a
recycled id is taken for a life sign. What cannot be known is `unknown`: others decide by age.
"""

from __future__ import annotations

import os
import platform
import shutil
from pathlib import Path
from typing import Literal

from hsstore import plainfile

MARK = "owner"
State = Literal["alive", "dead", "unknown"]


def mark(directory: Path) -> None:
    """Say that this process works in a directory."""
    (directory / MARK).write_text(identity(os.getpid()))


def remove(directory: Path) -> None:
    """Remove a marked directory, the mark last: what cannot be removed still says whose it was.

    What can go goes; then the first error is raised.
    """
    failed: OSError | None = None
    for path in sorted(directory.iterdir(), key=lambda p: p.name == MARK):
        if path.name == MARK and failed is not None:
            raise failed
        try:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        except OSError as error:
            failed = failed or error
    if failed is not None:
        raise failed
    directory.rmdir()


def state_of(directory: Path) -> State:
    """Of the process that marked a directory."""
    try:
        text = plainfile.read_text(directory / MARK)
    except OSError:
        return "unknown"
    return "unknown" if text is None else state(text)


def state(text: str) -> State:
    """Of the process with that identity."""
    try:
        machine, pid, _ = text.rsplit(" ", 2)
        number = int(pid)
    except ValueError:
        return "unknown"
    if machine != _machine():
        return "unknown"
    try:
        return "alive" if text == f"{machine} {number} {_started(number)}" else "dead"
    except (FileNotFoundError, ProcessLookupError):
        return "dead" if _is_gone(number) else "unknown"
    except OSError:
        return "unknown"  # no descriptor left, say: that is no news of the other process


def identity(pid: int) -> str:
    """Machine, process id and its start time."""
    try:
        started = _started(pid)
    except OSError:
        started = "gone"
    return f"{_machine()} {pid} {started}"


def _started(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]


def _is_gone(pid: int) -> bool:
    """Also where /proc shows only one's own processes (`hidepid`)."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return True
    except PermissionError:
        return False
    return False


def _machine() -> str:
    """Names this boot of this host and this process-id namespace: only there does a process id mean anything."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{platform.node()}/{boot}/{os.readlink('/proc/self/ns/pid')}"
