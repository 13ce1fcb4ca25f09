"""Ending a process group with what its processes keep outside of themselves.

SGLang ends by killing its processes, and leaves their shared memory behind: 24 MB a run with two tensor-parallel ranks.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
# Only what SGLang and multiprocessing make: a model or a store may lie in /dev/shm too, and be mapped.
PREFIXES = ("sgl_shm_", "sglang_loads_", "multi_tokenizer_args_", "cuda.shm.", "nccl-", "sem.mp-", "psm_")


def kill_group(leader: int) -> None:
    """SIGKILL every process of the group, and remove the shared memory that they map. The caller may be one of them."""
    for path in shared_memory(leader):
        path.unlink(missing_ok=True)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def shared_memory(leader: int) -> set[Path]:
    """Files of SGLang in /dev/shm that a process of the group maps."""
    mapped: set[int] = set()
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # a process that has just ended, or another user's
            if entry.name.isdigit() and os.getpgid(int(entry.name)) == leader:
                mapped |= _mapped_inodes((entry / "maps").read_text())
    files = [entry for entry in os.scandir(SHARED_MEMORY) if entry.name.startswith(PREFIXES)]
    return {Path(entry.path) for entry in files if entry.inode() in mapped}


def _mapped_inodes(maps: str) -> set[int]:
    """Inodes of what is mapped from /dev/shm. Not the names: a semaphore is mapped under one that is gone already."""
    lines = (line.split(maxsplit=5) for line in maps.splitlines())
    return {int(fields[4]) for fields in lines if len(fields) == 6 and fields[5].startswith(f"{SHARED_MEMORY}/")}
