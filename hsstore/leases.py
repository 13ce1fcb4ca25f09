"""Advisory leases on shards: they save two writers the same work, correctness never rests on them.

staging/N.lease names its holder; its modification time is the heartbeat, compared with the file system's own clock, so
that machines need not agree on the time. A lease ends with its holder's process, or when it was not renewed for
`seconds`. Two holders at once are possible and harmless: the commit decides. Leaves commits to `writer`.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
from pathlib import Path
from types import TracebackType

from hsstore import durable, owner, paths, plainfile

DEFAULT_SECONDS = 120.0


class Leases:
    """The leases of one writer. A context manager: while it is open, a thread renews what is held."""

    def __init__(self, root: Path, seconds: float = DEFAULT_SECONDS) -> None:
        self.root, self.seconds = root, seconds
        self._me = f"{secrets.token_hex(8)}\n{owner.identity(os.getpid())}"
        self._held: set[int] = set()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Leases:
        self._thread = threading.Thread(target=self._renew_all, name="leases", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        for shard in list(self._held):
            with contextlib.suppress(OSError):  # one that cannot be given back ends with this process
                self.release(shard)

    def take(self, shard: int) -> bool:
        """Whether the shard is now ours: nobody had it, or its holder is dead or silent for too long."""
        path = paths.lease(self.root, shard)
        durable.make_dirs(path.parent)
        try:
            taken = self._take(path)
        except BaseException:
            with contextlib.suppress(OSError):
                self.release(shard)  # it may be there; nobody would renew it, and all would wait until it ends
            raise
        if taken:
            with self._lock:
                self._held.add(shard)
        return taken

    def _take(self, path: Path) -> bool:
        mine = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
        try:
            mine.write_text(self._me)
            while not _link(mine, path):
                found, text = _state(path), _read(path)
                if found is None:
                    continue  # given back meanwhile
                if text == self._me:
                    return True  # somebody took it for the one that had ended, and has put it back
                if text is not None and not self._has_ended(text, age=mine.stat().st_mtime - found.st_mtime):
                    return False
                if path.is_dir() and not path.is_symlink():
                    return True  # nobody can have a lease by that name: the commit decides
                if not _put_away(path, found):
                    return False
            return _read(path) == self._me
        finally:
            mine.unlink(missing_ok=True)

    def release(self, shard: int) -> None:
        """Give a shard back; nothing happens when it is not ours any more."""
        with self._lock:
            self._held.discard(shard)
        path = paths.lease(self.root, shard)
        if _read(path) == self._me:
            path.unlink(missing_ok=True)

    def _has_ended(self, text: str, age: float) -> bool:
        return owner.state(text.partition("\n")[2]) == "dead" or age > self.seconds

    def _renew_all(self) -> None:
        while not self._stop.wait(self.seconds / 4):
            with self._lock:
                held = sorted(self._held)
            for shard in held:
                path = paths.lease(self.root, shard)
                # A lease that cannot be renewed is lost, which costs work and nothing else.
                with contextlib.suppress(OSError):
                    if _read(path) == self._me:
                        os.utime(path)


def ended(path: Path, now: float, seconds: float = DEFAULT_SECONDS) -> bool:
    """Whether a lease file is garbage: its holder is dead, or it was not renewed for far too long."""
    text = _read(path)
    if text is None or owner.state(text.partition("\n")[2]) == "dead":
        return True
    try:
        return now - path.lstat().st_mtime > 10 * seconds
    except FileNotFoundError:
        return True  # released meanwhile


def _put_away(path: Path, judged: os.stat_result) -> bool:
    """Remove a lease that has ended. Of several that do so one is told that it did: what lies there by then, or was
    renewed since it was judged, is another one's and is put back."""
    gone = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        os.rename(path, gone)
    except FileNotFoundError:
        return False
    try:
        found = gone.lstat()
        was_it = (found.st_ino, found.st_mtime_ns) == (judged.st_ino, judged.st_mtime_ns)
        if not was_it:
            _link(gone, path)
    finally:
        gone.unlink(missing_ok=True)
    return was_it


def _state(path: Path) -> os.stat_result | None:
    """Of what lies there; None when nothing does."""
    try:
        return path.lstat()
    except FileNotFoundError:
        return None


def _link(source: Path, target: Path) -> bool:
    """`durable.link_new`, but the source name stays where it is also without hard links."""
    try:
        os.link(source, target)
    except FileExistsError:
        return False
    except OSError:
        with contextlib.suppress(FileExistsError), open(target, "x") as file:
            file.write(source.read_text())
            return True
        return False
    return True


def _read(path: Path) -> str | None:
    """What a lease says; "" for what is none (a directory, a FIFO), None without any."""
    try:
        return plainfile.read_text(path) or ""
    except FileNotFoundError:
        return None
