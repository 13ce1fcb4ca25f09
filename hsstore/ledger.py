"""When which file of a store was verified to its last byte, by this user on this machine.

Lies outside the store, which verification never changes: `$HSSTORE_STATE_DIR`, else `$XDG_STATE_HOME/hsstore`, else
`~/.local/state/hsstore`; one file of JSON lines for each store uuid. A line says of an inode as it was then (device,
inode, size, time of change) which SHA-256 it had: a renamed store keeps its lines, a copied or changed file has none.
Lines are only appended, whole ones in one write; what a kill leaves of a line is skipped. Lost lines cost a reading.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import msgspec

from hsstore import paths
from hsstore.records import StoreHeader

_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_COMPACT_BYTES = 1 << 20
_LOCK_SECONDS = 2.0
_FLUSH_SECONDS = 1.0

Identity = tuple[int, int, int, int]
"""Device, inode, size, modification time in ns."""


class FileLine(msgspec.Struct, frozen=True, tag="file", tag_field="type"):
    """A file was read to its last byte, or found damaged by whatever was read of it."""

    at: float
    """Seconds since 1970."""
    identity: Identity
    sha256: str
    """First 32 hex digits of what its record says."""
    ok: bool


class RunLine(msgspec.Struct, frozen=True, tag="run", tag_field="type"):
    """A verification began or ended."""

    at: float
    depth: str
    store: tuple[int, int]
    """Device and inode of its store.json: a copy of the store is another one."""
    since: float
    """When it began; of a resumed one, when the first of them began."""
    ended: bool = False
    damage: int = 0
    bytes_read: int = 0
    seconds: float = 0.0


Line = FileLine | RunLine
_DECODER = msgspec.json.Decoder(Line)


def state_dir() -> Path:
    """Where ledgers lie."""
    own, xdg = os.environ.get("HSSTORE_STATE_DIR"), os.environ.get("XDG_STATE_HOME")
    if own:
        return Path(own)
    return (Path(xdg) if xdg else Path.home() / ".local" / "state") / "hsstore"


def identity(status: os.stat_result) -> Identity:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def store_identity(root: Path) -> tuple[int, int]:
    """Device and inode of store.json."""
    status = os.stat(root / paths.HEADER)
    return status.st_dev, status.st_ino


@dataclass(slots=True)
class History:
    """What a ledger says; of several lines about one thing the last one counts."""

    files: dict[tuple[Identity, str], FileLine] = field(default_factory=dict)
    runs: dict[tuple[tuple[int, int], str, bool], RunLine] = field(default_factory=dict)
    """By store, depth, and whether it ended."""
    n_lines: int = 0
    n_broken: int = 0
    """Lines that a kill or a full disk cut."""

    def add(self, line: Line) -> None:
        self.n_lines += 1
        if isinstance(line, FileLine):
            self.files[line.identity, line.sha256] = line
        else:
            self.runs[line.store, line.depth, line.ended] = line

    def verified_at(self, status: os.stat_result, sha256: str) -> float | None:
        """When a file was last found whole; None when never, or when it was found damaged since."""
        line = self.files.get((identity(status), sha256[:32]))
        return line.at if line is not None and line.ok else None

    def unfinished(self, store: tuple[int, int], depth: str) -> float | None:
        """When the last verification of that depth began, if it did not end."""
        begun, ended = self.runs.get((store, depth, False)), self.runs.get((store, depth, True))
        if begun is None or (ended is not None and ended.at >= begun.at):
            return None
        return begun.since


class Ledger:
    """The ledger of one store. Not for several threads at once."""

    def __init__(self, uuid: str, directory: Path | None = None) -> None:
        name = uuid if _UUID.fullmatch(uuid) else hashlib.sha256(uuid.encode()).hexdigest()[:32]
        self.path = (directory or state_dir()) / f"{name}.jsonl"
        self._pending: list[Line] = []
        self._flushed = time.monotonic()

    def read(self) -> History:
        """What it says; nothing when there is none. Raises the `OSError` it met."""
        history = History()
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return history
        for text in data.splitlines():
            try:
                history.add(_DECODER.decode(text))
            except (msgspec.DecodeError, UnicodeDecodeError):
                history.n_broken += bool(text)
        return history

    def add(self, line: Line) -> None:
        """Append a line, soon: what a kill may lose is about a second's. Raises the `OSError` it met."""
        self._pending.append(line)
        if time.monotonic() - self._flushed >= _FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Append what waits, in one write."""
        pending, self._pending = self._pending, []
        self._flushed = time.monotonic()
        if not pending:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self._locked() as fd:
            _append(fd, pending)

    def compact(self) -> bool:
        """Keep the last line of each thing, when the file is large and most of it is overtaken."""
        try:
            if self.path.stat().st_size < _COMPACT_BYTES:
                return False
        except FileNotFoundError:
            return False
        with self._locked():
            history = self.read()
            lines: list[Line] = [*history.files.values(), *history.runs.values()]
            if history.n_lines < 2 * len(lines):
                return False
            temporary = self.path.with_name(f".{self.path.name}.{secrets.token_hex(8)}.tmp")
            try:
                temporary.write_bytes(_encode(lines))
                os.replace(temporary, self.path)
            finally:
                temporary.unlink(missing_ok=True)
        return True

    @contextlib.contextmanager
    def _locked(self) -> Iterator[int]:
        """The file, opened for appending, while no other process appends or compacts.

        A lock that cannot be had in time is done without: the worst is a lost line.
        """
        deadline = time.monotonic() + _LOCK_SECONDS
        while True:
            fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                locked = _lock(fd, deadline)
                if not locked or _is_at(fd, self.path):
                    yield fd
                    return
            finally:
                os.close(fd)  # and with it the lock


class Nowhere(Ledger):
    """A ledger that keeps nothing."""

    def __init__(self) -> None:
        super().__init__("", Path(os.devnull))

    def add(self, line: Line) -> None:
        pass

    def flush(self) -> None:
        pass

    def compact(self) -> bool:
        return False


def _lock(fd: int, deadline: float) -> bool:
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.01)
        except OSError:
            return False  # a file system without locks


def _is_at(fd: int, path: Path) -> bool:
    """Whether the open file still has that name: a compaction may have put another one there."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


def _append(fd: int, lines: Iterable[Line]) -> None:
    size = os.fstat(fd).st_size
    torn = size > 0 and os.pread(fd, 1, size - 1) != b"\n"
    data = memoryview(b"\n" * torn + _encode(lines))
    while data:
        data = data[os.write(fd, data) :]


def _encode(lines: Iterable[Line]) -> bytes:
    return b"".join(msgspec.json.encode(line) + b"\n" for line in lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """What a ledger says about a store as it lies there now."""

    shards: int
    """Committed ones."""
    whole: int
    """Of them, with every file verified to its last byte and unchanged since."""
    oldest: float | None
    """When the file of those that was verified longest ago was verified; seconds since 1970."""
    damaged: int
    """Shards with a file that was found damaged and is unchanged since."""
    last: dict[str, RunLine]
    """The last verification of each depth that was made of this very directory."""
    unknown: str = ""
    """Why the ledger cannot be read."""


class _Files(Protocol):
    @property
    def files(self) -> Mapping[str, tuple[int, str]]: ...


class _Listing(Protocol):
    """A manifest, or what is left of one without its samples."""

    @property
    def shards(self) -> Sequence[_Files]: ...


def summary(root: Path, header: StoreHeader, manifest: _Listing, directory: Path | None = None) -> Verified:
    """How much of a store was verified, and when. Costs a `stat` of each file that the ledger may know."""
    try:
        history, unknown = Ledger(header.uuid, directory).read(), ""
    except OSError as error:
        history, unknown = History(), f"{error.filename}: {error.strerror}"
    whole, damaged, times = 0, 0, []
    for shard in manifest.shards if history.files else ():
        lines = [_line(history, f"{root}/{path}", sha256) for path, (_, sha256) in shard.files.items()]
        damaged += any(line is not None and not line.ok for line in lines)
        sound = [line.at for line in lines if line is not None and line.ok]
        if len(sound) == len(lines):
            whole += 1
            times.append(min(sound))
    store = store_identity(root)
    return Verified(
        shards=len(manifest.shards),
        whole=whole,
        oldest=min(times, default=None),
        damaged=damaged,
        last={depth: run for (where, depth, ended), run in history.runs.items() if where == store and ended},
        unknown=unknown,
    )


def _line(history: History, path: str, sha256: str) -> FileLine | None:
    try:
        return history.files.get((identity(os.stat(path)), sha256[:32]))
    except OSError:
        return None  # not there, or not to be had: not verified


def describe(verified: Verified, now: float) -> str:
    """One line for people."""
    if verified.unknown:
        return f"unknown: {verified.unknown}"
    if not verified.whole and not verified.damaged and not verified.last:
        return "never on this machine"
    parts = [f"in full: {verified.whole:,} of {verified.shards:,} shards"]
    if verified.oldest is not None:
        parts[0] += f", oldest {ago(now - verified.oldest)}"
    if verified.damaged:
        parts.append(f"{verified.damaged:,} found DAMAGED")
    if verified.last:
        run = max(verified.last.values(), key=lambda r: r.at)
        parts.append(f"last: {run.depth} {ago(now - run.at)}, {'sound' if not run.damage else 'damaged'}")
    return "; ".join(parts)


def ago(seconds: float) -> str:
    """'3 days ago'."""
    for size, unit in ((86400, "day"), (3600, "hour"), (60, "minute")):
        n = int(seconds // size)
        if n > 0:
            return f"{n} {unit}{'s' * (n > 1)} ago"
    return "just now"
