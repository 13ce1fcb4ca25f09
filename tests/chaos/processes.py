"""The processes below a process, told apart from later ones that get the same number. Linux: reads /proc."""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Process:
    pid: int
    parent: int
    session: int
    started: int
    """Ticks since boot: with the number, who it is."""
    command: str

    @property
    def part(self) -> str:
        """Which part of an SGLang engine it is, "" for none that matters."""
        for part, sign in (("host", "sglang_plugin.host"), ("scheduler", "sglang::scheduler")):
            if sign in self.command:
                return part
        return ""

    def kill(self) -> None:
        """SIGKILL, unless it has ended."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


def processes() -> dict[int, Process]:
    """All that live, by number; what has ended and was not waited for does not."""
    out = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):  # ended while we looked
            fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            if fields[0] in "ZX":
                continue
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            pid = int(entry.name)
            out[pid] = Process(pid, int(fields[1]), int(fields[3]), int(fields[19]), command)
    return out


def below(pid: int) -> list[Process]:
    """Children, their children and so on."""
    all_of_them, found, parents = processes(), [], {pid}
    while parents:
        children = [p for p in all_of_them.values() if p.parent in parents]
        found += children
        parents = {p.pid for p in children}
    return found


def left_of(family: list[Process]) -> list[Process]:
    """Those that still live, and whatever lives in the sessions that they had made (never in our own)."""
    ours = os.getsid(0)
    sessions = {p.session for p in family} - {ours}
    known = {(p.pid, p.started) for p in family}
    return [p for p in processes().values() if p.session in sessions or (p.pid, p.started) in known]
