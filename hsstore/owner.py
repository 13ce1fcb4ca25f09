"""Which process works in a place, and whether it still lives.

A mark names machine, boot, process-id namespace, process id and start time, so that neither another host, nor a restart,
nor a recycled id is taken for a life sign. What cannot be known is `unknown`: others decide by age.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Literal

MARK = "owner"
State = Literal["alive", "dead", "unknown"]


def mark(directory: Path) -> None:
    """Say that this process works in a directory."""
    (directory / MARK).write_text(identity(os.getpid()))


def state_of(directory: Path) -> State:
    """Of the process that marked a directory."""
    try:
        text = (directory / MARK).read_text()
    except (OSError, UnicodeDecodeError):
        return "unknown"
    return state(text)


def state(text: str) -> State:
    """Of the process with that identity."""
    try:
        machine, pid, _ = text.rsplit(" ", 2)
        number = int(pid)
    except ValueError:
        return "unknown"
    if machine != _machine():
        return "unknown"
    return "alive" if text == identity(number) else "dead"


def identity(pid: int) -> str:
    """Machine, process id and its start time."""
    try:
        started = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        started = "gone"
    return f"{_machine()} {pid} {started}"


def _machine() -> str:
    """Names this boot of this host and this process-id namespace: only there does a process id mean anything."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{platform.node()}/{boot}/{os.readlink('/proc/self/ns/pid')}"
