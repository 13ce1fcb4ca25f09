"""The few file-system steps everything durable is made of.

Responsible for: order of write, fsync, link and directory fsync; never overwriting what is immutable. Leaves to
`writer` what the files mean. Every function raises the `OSError` it met; `errors.from_os_error` words it for people.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

RENAME_NOREPLACE = 1  # linux/fs.h
_AT_FDCWD = -100
_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{16}\.tmp")
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK}


def fsync_dir(path: str | Path) -> None:
    """Make the directory's entries durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def fsync_file(path: str | Path) -> None:
    """Make a file's bytes durable, whoever wrote them (fsync flushes the inode, not the descriptor's own writes)."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a FIFO under that name is an error, it must not wait
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_dirs(path: Path, root: Path | None = None) -> None:
    """`mkdir -p` whose new entries are durable: each new directory's parent is fsynced.

    Below `root` that holds for the deepest directory that was there, too: another process may have made it a moment
    ago and be dead. It made nothing in it before it was durable, so one is enough.
    """
    missing = []
    while not path.exists():
        missing.append(path)
        path = path.parent
    if root is not None and root in path.parents:
        fsync_dir(path.parent)
    for directory in reversed(missing):
        with contextlib.suppress(FileExistsError):
            directory.mkdir()
        fsync_dir(directory.parent)


def settle_tree(root: Path) -> None:
    """Make the names of a whole tree durable, whoever gave them: of what a killed process left, none may vanish once
    another one has taken it for good. Directories that are clean cost next to nothing."""
    for directory, _, _ in os.walk(root, topdown=False, onerror=_raise_unless_gone):
        with contextlib.suppress(FileNotFoundError):  # another writer's attempt may end meanwhile
            fsync_dir(directory)


def _raise_unless_gone(error: OSError) -> None:
    """For `os.walk`, which passes over a directory that it cannot list in silence."""
    if not isinstance(error, FileNotFoundError):
        raise error


def bytes_in(directory: Path) -> int:
    """Bytes of what lies directly in a directory where others work: what is gone by then counts nothing."""
    total = 0
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for name in os.listdir(directory):
            with contextlib.suppress(FileNotFoundError):
                total += os.stat(directory / name).st_size
    return total


def files_below(directory: Path) -> Iterator[Path]:
    """Everything in a tree that is no directory, where others work: what they take away meanwhile may be missing."""
    for here, _, names in os.walk(directory, onerror=_raise_unless_gone):
        yield from (Path(here, name) for name in names)


def is_temporary(name: str) -> bool:
    """Whether a file of that name is one of ours that never got its final name: its writer was killed, or is at it."""
    return _TEMPORARY.fullmatch(name) is not None


def prepare(path: Path, data: bytes) -> Path:
    """First half of `replace`: the bytes, durable, under a temporary name beside `path`."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return temporary


def write_new(path: Path, data: bytes) -> bool:
    """Write a file that must not exist yet, whole or not at all. Returns False when another one won the name."""
    won = _named(path, data, _link_and_drop)
    fsync_dir(path.parent)
    return won


def replace(path: Path, data: bytes) -> None:
    """Atomically replace a derived file: readers see the old bytes or the new ones."""
    _named(path, data, take_place)


def _named(path: Path, data: bytes, take: Callable[[Path, Path], T]) -> T:
    """Prepare a file and give it its name. A temporary one that is gone was garbage to somebody, while this process
    was stopped for long: then once more."""
    for _ in range(2):
        with contextlib.suppress(FileNotFoundError):
            return take(prepare(path, data), path)
    return take(prepare(path, data), path)


def _link_and_drop(temporary: Path, path: Path) -> bool:
    try:
        return link_new(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def take_place(temporary: Path, path: Path) -> None:
    """Second half of `replace`: a prepared file gets the name that it was prepared for."""
    try:
        os.rename(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_dir(path.parent)


def link_new(source: Path, target: Path) -> bool:
    """Give `source` the name `target` too, unless the name is taken (returns False).

    File systems without hard links take `renameat2(RENAME_NOREPLACE)`; the source name is then gone.
    """
    try:
        os.link(source, target)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        return rename_new(source, target)
    return True


def rename_new(source: Path, target: Path) -> bool:
    """Rename without ever replacing. Returns False when the target exists."""
    libc = ctypes.CDLL(None, use_errno=True)
    done = libc.renameat2(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), RENAME_NOREPLACE)
    if done == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EEXIST, errno.ENOTEMPTY):
        return False
    raise OSError(code, os.strerror(code), str(target))


def same_file(a: Path, b: Path) -> bool:
    """Whether both names exist and lead to one inode."""
    try:
        return os.path.samestat(os.stat(a), os.stat(b))
    except FileNotFoundError:
        return False


def pwrite_all(fd: int, data: memoryview, offset: int) -> None:
    """`pwrite` until every byte is taken: one call may write less, and at most 2 GiB."""
    view = data.cast("B")
    while view:
        written = os.pwrite(fd, view[: 1 << 30], offset)
        if written == 0:
            raise OSError(errno.EIO, "pwrite took no bytes")
        view = view[written:]
        offset += written
