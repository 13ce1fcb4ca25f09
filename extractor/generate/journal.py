"""Files of whole lines that grow: answers as they come, and the list of lines without one. Killed at any instant, each
holds whole lines and at most one torn one, which the next opening cuts off.

Responsible for appending durably, for leaving nothing half-written when the disk is full, for one writer at a time, and
for putting the answers into the order of the input at the end. Leaves what a line says to `record` and `run`.
"""

from __future__ import annotations

import array
import contextlib
import errno
import fcntl
import glob
import os
import secrets
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import msgspec
import numpy as np

from extractor.words import counted
from hsstore import durable
from hsstore.console import warn
from hsstore.errors import IncompleteError, LockedError, NoSpaceError, UsageError, from_os_error

SYNC_SECONDS = 1.0
"""Answers of that long may be lost in a power cut, and are then made again; a kill loses none."""
RESUME = "every answer so far is kept; run the same with --resume"
_UNLOCKABLE = {errno.ENOLCK, errno.ENOTSUP, errno.EINVAL}
_PIECE = 1 << 20


class _Turn(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    exact: bool | None = None


class _Generated(msgspec.Struct):
    line: int
    turns: list[_Turn]


class _Written(msgspec.Struct):
    generate: _Generated
    finish_reason: str
    messages: list[msgspec.Raw]


ANSWERED = msgspec.json.Decoder(_Written)


class AppendFile:
    """A file that whole lines are appended to by one process at a time."""

    def __init__(self, path: Path, option: str = "--out") -> None:
        """Open or make it, as what `option` names. Raises `LockedError` while another process has it open."""
        self.path, self._option = path, option
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        try:
            self._lock()
            self._size = os.fstat(self._fd).st_size
            durable.fsync_dir(path.absolute().parent)
        except BaseException:
            os.close(self._fd)
            raise
        self._synced = time.monotonic()
        self._dirty = False

    def _lock(self) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LockedError(
                f"another process is writing {self.path}", hint=f"wait for it, or give another {self._option}"
            ) from None
        except OSError as error:
            if error.errno not in _UNLOCKABLE:  # some network file systems have no locks
                raise
        if not self._is_there():
            raise LockedError(f"another process has just finished {self.path}", hint="run the same again")

    def _is_there(self) -> bool:
        """Whether the file still has its name."""
        return os.path.exists(self.path) and os.path.samestat(os.fstat(self._fd), os.stat(self.path))

    def replace(self, lines: Iterable[bytes]) -> None:
        """Hold these lines instead, in one step; nobody else can lock the file in between."""
        data = b"".join(line + b"\n" for line in lines)
        target = self.path.resolve()  # a link stays one
        temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}.tmp")
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        try:
            with contextlib.ExitStack() as undo:
                fd = os.open(temporary, flags, 0o666)
                undo.callback(temporary.unlink, missing_ok=True)
                undo.callback(os.close, fd)
                _write(fd, data)
                os.fsync(fd)
                with contextlib.suppress(OSError):  # where there are no locks the first one could not be had either
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                durable.take_place(temporary, target)
                undo.pop_all()
        except OSError as error:
            raise _full(error, self.path) from None
        os.close(self._fd)
        self._fd, self._size, self._dirty = fd, len(data), False

    def append(self, line: bytes) -> None:
        """Add one line, without its newline. Nothing of it stays when it cannot be written whole."""
        data = line + b"\n"
        try:
            _write(self._fd, data)
        except OSError as error:
            os.ftruncate(self._fd, self._size)
            raise _full(error, self.path) from None
        except BaseException:  # a signal between two writes
            os.ftruncate(self._fd, self._size)
            raise
        self._size += len(data)
        self._dirty = True

    def sync(self, *, now: bool = False) -> None:
        """Make what was appended durable, about once a second."""
        if self._dirty and (now or time.monotonic() - self._synced >= SYNC_SECONDS):
            try:
                os.fsync(self._fd)
            except OSError as error:
                raise _full(error, self.path) from None
            self._synced, self._dirty = time.monotonic(), False

    def remove_if_empty(self) -> None:
        """Leave nothing behind of a run that was refused."""
        if not self._size and self._is_there():
            self.path.unlink(missing_ok=True)

    def close(self) -> None:
        os.close(self._fd)

    def __enter__(self) -> AppendFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, _v: BaseException | None, _t: TracebackType | None) -> None:
        try:
            if kind is None:
                self.sync(now=True)
            else:
                with contextlib.suppress(NoSpaceError, IncompleteError):  # there is an error on its way already
                    self.sync(now=True)
        finally:
            self.close()


def _write(fd: int, data: bytes) -> None:
    view, written = memoryview(data), 0
    while written < len(view):
        written += os.write(fd, view[written:])


def _full(error: OSError, path: Path) -> NoSpaceError | IncompleteError:
    error.filename = str(path)
    ours = from_os_error(error)
    if isinstance(ours, NoSpaceError):
        return NoSpaceError(ours.message, hint=f"free some; {RESUME}")
    return IncompleteError(f"writing {path} failed: {error.strerror}", hint=RESUME)


@dataclass(slots=True)
class Answers:
    """Where in a file each line's answer lies."""

    path: Path
    lines: array.array[int]
    offsets: array.array[int]
    sizes: array.array[int]


def recover(path: Path) -> Answers:
    """The whole, first answers of a part; everything else is cut out of it, and said."""
    found, bad, size = _read(path)
    return _cut(found, bad, size) if bad else found


def read_finished(path: Path) -> Answers:
    """The answers of a finished file. Raises `UsageError` when somebody has written something else into it."""
    found, bad, _ = _read(path)
    if bad:
        raise UsageError(
            f"{path} holds {counted(bad, 'line')} that no run of this command wrote",
            hint="move it away, or give another --out",
        )
    return found


def lines_in(path: Path) -> set[int]:
    """Lines that a file has answers for; changes nothing."""
    return set(_read(path)[0].lines)


def _read(path: Path) -> tuple[Answers, int, int]:
    """(answers, bad lines, bytes)."""
    found = Answers(path, array.array("q"), array.array("q"), array.array("q"))
    seen: set[int] = set()
    end = bad = 0
    if not path.exists():
        return found, bad, end
    with open(path, "rb") as file:
        for raw in file:
            line = _line_of(raw)
            if line is None or line in seen:
                bad += 1
            else:
                seen.add(line)
                found.lines.append(line)
                found.offsets.append(end)
                found.sizes.append(len(raw))
            end += len(raw)
    return found, bad, end


def _line_of(raw: bytes) -> int | None:
    if not raw.endswith(b"\n"):
        return None
    try:
        return ANSWERED.decode(raw).generate.line
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def _cut(found: Answers, bad: int, size: int) -> Answers:
    path = found.path
    kept = sum(found.sizes)
    in_place = not found.lines or found.offsets[-1] + found.sizes[-1] == kept
    if in_place:  # the usual case: only the end is torn
        os.truncate(path, kept)
        durable.fsync_file(path)
    else:
        ordered(path, [found], in_order=False)
    warn(f"{path}: {counted(bad, 'torn or doubled line')} cut out ({size - kept} bytes); they are done again")
    return found if in_place else recover(path)


def ordered(target: Path, sources: Iterable[Answers], *, in_order: bool = True) -> None:
    """Write the answers of all sources into one file, by line number, and give it its name in one step."""
    parts = list(sources)
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}.tmp")
    try:
        with contextlib.ExitStack() as stack:
            out = stack.enter_context(open(temporary, "xb", buffering=_PIECE))
            files = [stack.enter_context(open(part.path, "rb")) for part in parts if part.lines]
            parts = [part for part in parts if part.lines]
            for which, offset, size in _places(parts, in_order):
                files[which].seek(offset)
                out.write(files[which].read(size))
            out.flush()
            os.fsync(out.fileno())
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise _full(error, target) from None
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    durable.take_place(temporary, target)


def _places(parts: list[Answers], in_order: bool) -> Iterator[tuple[int, int, int]]:
    """(file, offset, size) of each answer; of two for one line the first."""
    if not parts:
        return
    lines = np.concatenate([np.frombuffer(part.lines, np.int64) for part in parts])
    which = np.concatenate([np.full(len(part.lines), i) for i, part in enumerate(parts)])
    offsets = np.concatenate([np.frombuffer(part.offsets, np.int64) for part in parts])
    sizes = np.concatenate([np.frombuffer(part.sizes, np.int64) for part in parts])
    order = np.unique(lines, return_index=True)[1] if in_order else np.arange(len(lines))
    for i in order:
        yield int(which[i]), int(offsets[i]), int(sizes[i])


def remove_leftovers(target: Path) -> None:
    """Temporary files of a run that was killed while it put the answers in order."""
    for entry in target.absolute().parent.glob(f".{glob.escape(target.name)}.*.tmp"):
        if durable.is_temporary(entry.name):
            entry.unlink(missing_ok=True)
