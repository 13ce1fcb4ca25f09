"""What a crash may leave of recorded operations: a pessimistic reading of POSIX, bounded and seeded.

An entry of a directory (created, linked, renamed, removed) is safe once that directory was fsynced; until then any
subset of them may have reached the disk, in any order. A rename inside one directory happens or not; across two
directories its halves are independent. The bytes of a file are safe once it was fsynced; until then it may hold what
was synced last, what was written since, zeros of that size, a part that ends at a sector, or the new bytes with a
sector missing.
"""

from __future__ import annotations

import itertools
import os
import random
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.crash.recorder import Node, Op

SECTOR = 512
EXHAUSTIVE = 4
"""Up to that many pending entries, every subset of them is tried."""

Effect = tuple[tuple[int, str, int | None], ...]
"""(directory, name, node or None for gone) of an entry operation; all of one tuple happen together."""


@dataclass(slots=True)
class File:
    synced: bytes = b""
    current: bytes = b""
    versions: list[bytes] = field(default_factory=list)
    """Written since it was synced."""
    synced_mode: int = 0o644
    mode: int = 0o644

    def sync(self) -> None:
        self.synced, self.synced_mode = self.current, self.mode
        self.versions.clear()


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """One thing that a crash may leave."""

    point: int
    """The crash came after that many operations."""
    acked: frozenset[object]
    tree: dict[str, tuple[int, bytes | None, int]]
    """By path: node, bytes (None: a directory), mode; parents before children."""
    story: str
    """What survived, for people."""

    @property
    def key(self) -> int:
        return hash(tuple((path, node, data) for path, (node, data, _) in self.tree.items()))

    def make(self, base: Path) -> None:
        """Put it on disk, as an hour after the crash: what a lease says then is not worth waiting for."""
        then = time.time() - 3600
        made: dict[int, Path] = {}
        base.mkdir()
        for path, (node, data, mode) in self.tree.items():
            where = base / path
            if data is None:
                where.mkdir()
            elif node in made:
                os.link(made[node], where)
            else:
                where.write_bytes(data)
                where.chmod(mode)
                os.utime(where, (then, then))
                made[node] = where


class Disk:
    """What is safe and what is pending after some operations."""

    def __init__(self, initial: dict[int, Node]) -> None:
        self.entries: dict[int, dict[str, int]] = {}
        self.files: dict[int, File] = {}
        self.pending: list[Effect] = []
        self.acked: set[object] = set()
        for number, node in initial.items():
            if node.is_dir:
                self.entries[number] = dict(node.entries or {})
            else:
                self.files[number] = File(node.data, node.data, [], node.mode, node.mode)

    def apply(self, op: Op) -> None:
        if op.kind == "mkdir":
            self.entries[op.node] = {}
        elif op.kind == "create":
            self.files[op.node] = File()
        if op.kind in ("mkdir", "create", "link"):
            self.pending.append(((op.parent, op.name, op.node),))
        elif op.kind in ("unlink", "rmdir"):
            self.pending.append(((op.parent, op.name, None),))
        elif op.kind == "rename":
            halves = (op.parent, op.name, None), (op.to_parent, op.to_name, op.node)
            self.pending += [halves] if op.parent == op.to_parent else [halves[:1], halves[1:]]
        elif op.kind == "data":
            file = self.files[op.node]
            file.current = op.data
            file.versions.append(op.data)
        elif op.kind == "mode":
            self.files[op.node].mode = op.mode
        elif op.kind == "ack":
            self.acked.add(op.item)
        else:
            self._sync(op.node)

    def _sync(self, node: int) -> None:
        if node in self.files:
            self.files[node].sync()
            return
        for effect in self.pending:
            if effect[0][0] == node:
                _put(self.entries, effect)
        self.pending = [e for e in self.pending if e[0][0] != node]

    def tree(self, survivors: Iterable[int], contents: dict[int, bytes]) -> dict[str, tuple[int, bytes | None, int]]:
        """The whole of it when these pending entries survive and these files hold that."""
        entries = {n: dict(e) for n, e in self.entries.items()}
        for i in survivors:
            _put(entries, self.pending[i])
        out: dict[str, tuple[int, bytes | None, int]] = {}
        stack = [("", 0)]
        while stack:
            prefix, node = stack.pop()
            for name, child in sorted(entries[node].items()):
                if child in entries:
                    out[prefix + name] = (child, None, 0o755)
                    stack.append((f"{prefix}{name}/", child))
                else:
                    file = self.files[child]
                    out[prefix + name] = (child, contents.get(child, file.synced), file.synced_mode)
        return out

    def dirty(self) -> list[int]:
        return [n for n, f in self.files.items() if f.versions]


def _put(entries: dict[int, dict[str, int]], effect: Effect) -> None:
    for directory, name, node in effect:
        if node is None:
            entries[directory].pop(name, None)
        else:
            entries[directory][name] = node


def crash_states(initial: dict[int, Node], ops: list[Op], rng: random.Random, *, per_point: int) -> list[State]:
    """Different states after every prefix of the operations, at most `per_point` new ones each, worst ones first."""
    disk, seen, out = Disk(initial), set(), []
    for point in range(len(ops) + 1):
        if point:
            disk.apply(ops[point - 1])
        new = 0
        for state in itertools.islice(_at(disk, point, rng), 6 * per_point):
            identity = (state.key, state.acked)
            if identity not in seen:
                seen.add(identity)
                out.append(state)
                new += 1
            if new == per_point:
                break
    return out


def _at(disk: Disk, point: int, rng: random.Random) -> Iterator[State]:
    dirty, acked = disk.dirty(), frozenset(disk.acked)
    for survivors, what in _subsets(disk, rng):
        for contents, how in _contents(disk, dirty, rng):
            tree = disk.tree(survivors, contents)
            yield State(point=point, acked=acked, tree=tree, story=f"entries: {what}; bytes: {how}")


def _subsets(disk: Disk, rng: random.Random) -> list[tuple[tuple[int, ...], str]]:
    """Which pending entries survive: none, all, then everything between (all of it when that is little)."""
    n = len(disk.pending)
    everything = tuple(range(n))
    chosen: dict[tuple[int, ...], str] = {(): "none", everything: "all"}
    rest: list[tuple[tuple[int, ...], str]] = []
    if n <= EXHAUSTIVE:
        rest += [(s, f"{s} of {n}") for size in range(1, n) for s in itertools.combinations(everything, size)]
    else:
        rest += [(tuple(i for i in everything if i != left), f"all but {left} of {n}") for left in everything]
        rest += [((kept,), f"only {kept} of {n}") for kept in everything]
        rest += [(everything[:cut], f"the first {cut} of {n}") for cut in range(2, n)]
        for directory in {e[0][0] for e in disk.pending}:
            inside = tuple(i for i in everything if disk.pending[i][0][0] == directory)
            rest += [(inside, f"those of one directory, {inside} of {n}")]
            rest += [(tuple(i for i in everything if i not in inside), f"those of other directories, not {inside}")]
        for _ in range(8):
            some = tuple(i for i in everything if rng.random() < 0.5)
            rest.append((some, f"{some} of {n}"))
    rng.shuffle(rest)
    for subset, what in rest:
        chosen.setdefault(subset, what)
    return list(chosen.items())


def _contents(disk: Disk, dirty: list[int], rng: random.Random) -> list[tuple[dict[int, bytes], str]]:
    if not dirty:
        return [({}, "synced")]
    out = [({n: disk.files[n].current for n in dirty}, "new"), ({}, "old")]
    out.append(({n: bytes(len(disk.files[n].current)) for n in dirty}, "zeros"))
    out += [({n: _variant(disk.files[n], rng) for n in dirty}, f"mixed {i}") for i in range(3)]
    return out


def _variant(file: File, rng: random.Random) -> bytes:
    new = file.current
    cut = rng.randrange(0, max(1, len(new)), SECTOR if len(new) > SECTOR else 16)
    hole = new[:cut] + bytes(len(new[cut : cut + SECTOR])) + new[cut + SECTOR :]
    return rng.choice([new, file.synced, bytes(len(new)), new[:cut], hole, rng.choice([*file.versions, new])])
