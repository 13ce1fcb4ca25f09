"""A small disk of its own that can be filled and freed: a mounted tmpfs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

_TRIED = "HSSTORE_CHAOS_UNSHARED"


def may_mount(directory: Path) -> str:
    """Why nothing can be mounted here, "" when it can."""
    point = directory / "try"
    point.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "none", str(point)], capture_output=True, text=True)
    if done.returncode == 0:
        subprocess.run(["umount", str(point)], check=True)
    point.rmdir()
    return done.stderr.strip() or f"mount ended with {done.returncode}" if done.returncode else ""


def enter_namespace(arguments: list[str]) -> None:
    """Run again as root of a user namespace, where mounting may be allowed; returns when it is not."""
    if _TRIED in os.environ or shutil.which("unshare") is None:
        return
    command = ["unshare", "--user", "--map-root-user", "--mount"]
    if subprocess.run([*command, "true"], capture_output=True).returncode == 0:
        os.environ[_TRIED] = "1"
        os.execvp(command[0], [*command, sys.executable, "-m", *arguments])


class SmallDisk:
    """Mounted while it is open."""

    def __init__(self, point: Path, n_bytes: int) -> None:
        self.point = point
        self._ballast = point / "ballast"
        self._n_bytes = n_bytes

    def __enter__(self) -> SmallDisk:
        self.point.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={self._n_bytes}", "none", str(self.point)]
        subprocess.run(command, check=True)
        return self

    def __exit__(self, *_: object) -> None:
        subprocess.run(["umount", "--lazy", str(self.point)], check=True)

    def fill(self, leave: int) -> None:
        """Take what is free, but for `leave` bytes. Others write meanwhile: repeated until it holds."""
        with open(self._ballast, "ab") as file:
            while (free := shutil.disk_usage(self.point).free) > leave + 4096:
                try:
                    os.posix_fallocate(file.fileno(), file.seek(0, os.SEEK_END), free - leave)
                except OSError:  # somebody was faster
                    continue

    def free(self) -> None:
        self._ballast.unlink()
