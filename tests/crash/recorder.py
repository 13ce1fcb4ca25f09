"""The file-system operations of a real run, in order: what a crash model needs to know of them.

Namespace operations and fsyncs are intercepted in `os`; what was written, created, truncated or chmod-ed is found by
looking at the tree before each of them, so it does not matter by which call it was done. `close` proves that nothing
was missed: the operations, applied in order, give the directory that is really there.
"""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hsstore import durable


@dataclass(frozen=True, slots=True)
class Op:
    """One step. Nodes are numbers given by the recorder, an inode each; node 0 is the directory that is watched."""

    kind: str
    """create, mkdir, link, rename, unlink, rmdir (of entries); data, mode, fsync (of nodes); ack (of the caller)."""
    node: int = 0
    """What is created, linked, written, synced."""
    parent: int = 0
    """Directory of the entry."""
    name: str = ""
    to_parent: int = 0
    """Of a rename: where to."""
    to_name: str = ""
    data: bytes = b""
    mode: int = 0
    item: object = None
    """Of an ack: what the caller was promised."""
    where: str = ""
    """The path, for people."""


@dataclass(slots=True)
class Node:
    """What the recorder knows of an inode."""

    is_dir: bool
    mode: int
    data: bytes = b""
    entries: dict[str, int] | None = None
    seen: tuple[int, int] = (-1, -1)
    """(size, mtime in ns) when its bytes were last read."""


class Died(BaseException):
    """Stands for the end of a process: nothing catches it, and nothing that runs on its way out does anything."""


class Recorder:
    """Watches one directory tree. `initial` is what lay there at the start, `ops` what was done to it."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.nodes: dict[int, Node] = {}
        self.ops: list[Op] = []
        self._by_inode: dict[int, int] = {}
        self._next = 0
        self._lock = threading.RLock()
        self._left: int | None = None
        self._adopt(base, os.lstat(base))
        self._look()
        self.ops.clear()
        self.initial = {n: Node(x.is_dir, x.mode, x.data, x.entries and dict(x.entries)) for n, x in self.nodes.items()}
        for n, node in self.nodes.items():
            if node.is_dir:
                self.initial[n].entries = dict(node.entries or {})

    def ack(self, item: object) -> None:
        """Note that the caller was told: this is safe now."""
        with self._lock:
            self._look()
            self.ops.append(Op("ack", item=item))

    def close(self) -> None:
        """Look a last time."""
        with self._lock:
            self._look()

    @contextmanager
    def killed_after(self, n: int) -> Iterator[None]:
        """What runs inside dies behind its n-th intercepted call; its files stay as the kernel has them."""
        self._left = n
        try:
            yield
        except Died:
            pass
        else:
            raise AssertionError(f"it came to its end with {self._left} of {n} calls left")
        finally:
            self._left = None

    @contextmanager
    def watching(self) -> Iterator[Recorder]:
        """Intercept while inside."""
        with pytest.MonkeyPatch.context() as patch:
            for name in ("fsync", "fdatasync", "link", "rename", "replace", "unlink", "remove", "mkdir", "rmdir"):
                patch.setattr(os, name, self._around(getattr(os, name), getattr(self, f"_after_{_KIND[name]}")))
            patch.setattr(durable, "rename_new", self._around(durable.rename_new, self._after_rename))
            patch.setattr(os, "symlink", _refuse)
            yield self
        self.close()

    def _around(self, real: Callable[..., Any], after: Callable[..., None]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            with self._lock:
                if self._left == 0:
                    raise Died
                self._look()
                paths = _absolute(arguments, options)
                result = real(*arguments, **options)
                if result is not False:  # rename_new says so when the name was taken
                    after(*paths)
                if self._left is not None:
                    self._left -= 1
                    if self._left == 0:
                        raise Died
                return result

        return call

    # What is done to entries and to nodes, after it was done.

    def _after_fsync(self, fd: int) -> None:
        node = self._by_inode.get(os.fstat(fd).st_ino)
        if node is not None:
            self.ops.append(Op("fsync", node=node, where=self._path_of(node)))

    def _after_link(self, source: str, target: str) -> None:
        if self._inside(target):
            (parent, name), node = self._place(target), self._node(source)
            self._entries(parent)[name] = node
            self.ops.append(Op("link", node=node, parent=parent, name=name, where=self._short(target)))

    def _after_rename(self, source: str, target: str) -> None:
        assert self._inside(source) == self._inside(target), "a rename across the border of what is watched"
        if self._inside(source):
            (parent, name), (to_parent, to_name) = self._place(source), self._place(target)
            node = self._entries(parent).pop(name)
            self._entries(to_parent)[to_name] = node
            where = f"{self._short(source)} -> {self._short(target)}"
            self.ops.append(Op("rename", node, parent, name, to_parent, to_name, where=where))
            self._forget()

    def _after_unlink(self, path: str) -> None:
        if self._inside(path):
            parent, name = self._place(path)
            node = self._entries(parent).pop(name)
            kind = "rmdir" if self.nodes[node].is_dir else "unlink"
            self.ops.append(Op(kind, node=node, parent=parent, name=name, where=self._short(path)))
            self._forget()

    def _after_mkdir(self, path: str) -> None:
        if self._inside(path):
            self._look()

    # The tree.

    def _inside(self, path: str) -> bool:
        return path.startswith(f"{self.base}/")

    def _short(self, path: str) -> str:
        return path.removeprefix(f"{self.base}/")

    def _place(self, path: str) -> tuple[int, str]:
        node = 0
        *directories, name = self._short(path).split("/")
        for part in directories:
            node = self._entries(node)[part]
        return node, name

    def _node(self, path: str) -> int:
        parent, name = self._place(path)
        return self._entries(parent)[name]

    def _entries(self, node: int) -> dict[str, int]:
        entries = self.nodes[node].entries
        assert entries is not None
        return entries

    def _path_of(self, node: int) -> str:
        names = dict(_walk(self.nodes))
        return next((path for path, n in names.items() if n == node), "?")

    def _adopt(self, path: Path | str, found: os.stat_result) -> int:
        node, self._next = self._next, self._next + 1
        is_dir = stat.S_ISDIR(found.st_mode)
        self.nodes[node] = Node(is_dir, stat.S_IMODE(found.st_mode), entries={} if is_dir else None)
        self._by_inode[found.st_ino] = node
        return node

    def _forget(self) -> None:
        """Numbers of inodes are used again: those without a name are gone."""
        named = {0, *(n for _, n in _walk(self.nodes))}
        self._by_inode = {inode: n for inode, n in self._by_inode.items() if n in named}
        self.nodes = {n: node for n, node in self.nodes.items() if n in named}

    def _look(self) -> None:
        pending = [(str(self.base), 0)]
        while pending:
            path, node = pending.pop()
            known = self._entries(node)
            with os.scandir(path) as found:
                entries = {e.name: e for e in found}
            missed = set(known) - set(entries)
            assert not missed, f"{path}: {missed} went away by a call that is not intercepted"
            for name, entry in sorted(entries.items()):
                child = self._child(node, name, entry)
                if self.nodes[child].is_dir:
                    pending.append((entry.path, child))
                else:
                    self._look_at(entry.path, child)

    def _child(self, parent: int, name: str, entry: os.DirEntry[str]) -> int:
        found, known = entry.stat(follow_symlinks=False), self._entries(parent)
        if name in known:
            assert self._by_inode.get(found.st_ino) == known[name], f"{entry.path} was exchanged by an unknown call"
            return known[name]
        assert found.st_ino not in self._by_inode, f"{entry.path} was linked by a call that is not intercepted"
        node = known[name] = self._adopt(entry.path, found)
        kind = "mkdir" if self.nodes[node].is_dir else "create"
        self.ops.append(Op(kind, node=node, parent=parent, name=name, where=self._short(entry.path)))
        return node

    def _look_at(self, path: str, number: int) -> None:
        found, node = os.lstat(path), self.nodes[number]
        where = self._short(path)
        assert stat.S_ISREG(found.st_mode), f"{path} is no plain file"
        if stat.S_IMODE(found.st_mode) != node.mode:
            node.mode = stat.S_IMODE(found.st_mode)
            self.ops.append(Op("mode", node=number, mode=node.mode, where=where))
        # The clock of mtime ticks every few ms: what is young is always read.
        if (found.st_size, found.st_mtime_ns) != node.seen or _now_ns(found) < 100_000_000:
            node.seen = (found.st_size, found.st_mtime_ns)
            data = Path(path).read_bytes()
            if data != node.data:
                node.data = data
                self.ops.append(Op("data", node=number, data=data, where=where))


def _walk(nodes: dict[int, Node], node: int = 0, prefix: str = "") -> Iterator[tuple[str, int]]:
    for name, child in sorted((nodes[node].entries or {}).items()):
        yield prefix + name, child
        if nodes[child].is_dir:
            yield from _walk(nodes, child, f"{prefix}{name}/")


def _now_ns(found: os.stat_result) -> int:
    import time

    return time.time_ns() - found.st_mtime_ns


def _absolute(arguments: tuple[Any, ...], options: dict[str, Any]) -> list[Any]:
    """The paths of a call, absolute, read before the call ends them; a descriptor stays one."""
    if arguments and isinstance(arguments[0], int):
        return list(arguments)
    out = []
    for argument in arguments[:2]:
        if isinstance(argument, int):
            continue  # the mode of mkdir
        path, directory = os.fsdecode(argument), options.get("dir_fd")
        if directory is not None and not os.path.isabs(path):
            path = os.path.join(os.readlink(f"/proc/self/fd/{directory}"), path)
        out.append(os.path.abspath(path))
    return out


def _refuse(*_: Any, **__: Any) -> None:
    raise AssertionError("a store has no symbolic links")


_KIND = {
    "fsync": "fsync",
    "fdatasync": "fsync",
    "link": "link",
    "rename": "rename",
    "replace": "rename",
    "unlink": "unlink",
    "remove": "unlink",
    "mkdir": "mkdir",
    "rmdir": "unlink",
}
