"""Garbage of killed runs: staging directories whose owner is gone.

A killed run leaves its open shards in staging/, at full size. They are invisible and harmless, but they fill the disk,
and a resume needs the room. Each staging directory gets a mark of the process that made it; a directory is removed when
that process is certainly no more, or when its shard is committed. In doubt (another host, no mark) it stays.
"""

from __future__ import annotations

import os
import platform
import shutil
from pathlib import Path

from hsstore.writer import StoreWriter

_MARK = "owner"


def mark_owner(directory: Path) -> None:
    """Say which process works in a staging directory."""
    (directory / _MARK).write_text(_identity(os.getpid()))


def sweep(writer: StoreWriter) -> int:
    """Remove what dead runs left in staging/. Returns the bytes that this freed."""
    todo = set(writer.todo())
    freed = 0
    for directory in writer.abandoned():
        number = directory.name.partition(".")[0]
        committed = number.isdigit() and int(number) not in todo
        if committed or _is_dead(directory):
            freed += sum(512 * p.stat().st_blocks for p in directory.iterdir())
            shutil.rmtree(directory, ignore_errors=True)
    return freed


def _is_dead(directory: Path) -> bool:
    try:
        owner = (directory / _MARK).read_text()
        machine, pid, _ = owner.rsplit(" ", 2)
    except (OSError, ValueError):
        return False
    return machine == _machine() and owner != _identity(int(pid))


def _identity(pid: int) -> str:
    """Machine, process id and its start time, so that a recycled id is no life sign."""
    try:
        started = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        started = "gone"
    return f"{_machine()} {pid} {started}"


def _machine() -> str:
    """Names this boot of this host and this process-id namespace: only there does a process id mean anything."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{platform.node()}/{boot}/{os.readlink('/proc/self/ns/pid')}"
