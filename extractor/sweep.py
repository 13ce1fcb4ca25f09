"""Garbage of killed runs: staging directories whose owner is gone, files that never got their final name.

A killed run leaves its open shards in staging/, at full size. They are invisible and harmless, but they fill the disk,
and a resume needs the room. Each staging directory gets a mark of the process that made it; a directory is removed when
that process is certainly no more, or when its shard is committed. In doubt (another host, no mark) it stays. A file
that was about to be renamed lives for milliseconds, so one that is older than this run belongs to nobody.
"""

from __future__ import annotations

import errno
import os
import platform
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

from hsstore import paths
from hsstore.durable import is_temporary
from hsstore.writer import StoreWriter

_MARK = "owner"


def mark_owner(directory: Path) -> None:
    """Say which process works in a staging directory."""
    (directory / _MARK).write_text(_identity(os.getpid()))


def sweep(writer: StoreWriter, started: float) -> int:
    """Remove what dead runs left in the store; `started` is when this run did. Returns the bytes that this freed."""
    root = writer.root
    written = (p for d in (root, root / paths.RECORDS, root / paths.INDEX) if d.is_dir() for p in d.iterdir())
    created = re.compile(re.escape(f".{root.name}.") + "[0-9a-f]{16}.creating")
    siblings = (p for p in root.absolute().parent.iterdir() if created.fullmatch(p.name))
    _remove_old((p for p in written if is_temporary(p.name)), started)
    _remove_old(siblings, started)
    return _sweep_staging(writer)


def _remove_old(places: Iterable[Path], started: float) -> None:
    for place in list(places):
        try:
            if place.stat().st_mtime >= started:
                continue
            shutil.rmtree(place) if place.is_dir() else place.unlink()
        except FileNotFoundError:
            continue  # its writer lives, and was quicker
        except OSError as error:
            if error.errno != errno.EROFS:  # a complete store on a read-only disk keeps its garbage
                raise


def _sweep_staging(writer: StoreWriter) -> int:
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
