"""A layer under hsstore at the calls to the operating system: counts every one and makes chosen ones fail.

Replaces what Python offers for files (`os.*`, `open` down to the raw file's read and write, `mmap`, the C library's
`renameat2`) while a `Shim` is entered, for paths below one directory; everything else passes. `fsync` is counted and
not done: the faults are what is tested here, and a disk would only make it slow. Names drawn by `secrets` come from a
counter, so that a run can be repeated call by call. Leaves to `scenarios` what is done, to `harness` what must hold.
"""

from __future__ import annotations

import builtins
import ctypes
import errno
import io
import mmap
import os
import re
import secrets
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
SHORT = 0  # not an errno: the call takes or gives fewer bytes than asked, which POSIX allows
_OURS = tuple(str(ROOT / package) + "/" for package in ("hsstore", "extractor", "server", "trainer"))
_UNIQUE = re.compile(r"[0-9a-f]{16}")

_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
_NAME = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO)
ERRNOS: dict[str, tuple[int, ...]] = {
    "open": (errno.EIO, errno.EACCES, errno.EMFILE),
    "create": (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EMFILE, errno.EIO),
    "read": (errno.EIO, SHORT),
    "write": (*_WRITE, SHORT),
    "fsync": _WRITE,
    "truncate": _WRITE,
    "allocate": _WRITE,
    "close": _WRITE,
    "closeread": (errno.EIO,),
    "link": (*_NAME, errno.EPERM, errno.EMLINK),
    "rename": _NAME,
    "mkdir": _NAME,
    "unlink": (errno.EROFS, errno.EACCES, errno.EIO),
    "rmdir": (errno.EROFS, errno.EACCES, errno.EIO),
    "stat": (errno.EIO, errno.EACCES),
    "list": (errno.EIO, errno.EACCES, errno.EMFILE),
    "readdir": (errno.EIO,),
    "chmod": (errno.EROFS, errno.EACCES, errno.EIO),
    "utime": (errno.EROFS, errno.EACCES, errno.EIO),
    "advise": (errno.EINVAL,),
    "mmap": (errno.ENOMEM, errno.EMFILE, errno.EACCES),
    "statvfs": (errno.EIO, errno.EACCES),
    "lock": (errno.EIO, errno.ENOLCK),
}
"""What each kind of call may answer, by the manual pages of Linux."""

# Everything of `os` that takes a path or a descriptor: kind, and whether the first argument is a descriptor.
_OS: dict[str, tuple[str, bool]] = {
    "read": ("read", True),
    "readv": ("read", True),
    "pread": ("read", True),
    "preadv": ("read", True),
    "write": ("write", True),
    "writev": ("write", True),
    "pwrite": ("write", True),
    "pwritev": ("write", True),
    "fsync": ("fsync", True),
    "fdatasync": ("fsync", True),
    "ftruncate": ("truncate", True),
    "truncate": ("truncate", False),
    "posix_fallocate": ("allocate", True),
    "posix_fadvise": ("advise", True),
    "fstat": ("stat", True),
    "stat": ("stat", False),
    "lstat": ("stat", False),
    "link": ("link", False),
    "symlink": ("link", False),
    "rename": ("rename", False),
    "replace": ("rename", False),
    "mkdir": ("mkdir", False),
    "unlink": ("unlink", False),
    "remove": ("unlink", False),
    "rmdir": ("rmdir", False),
    "listdir": ("list", False),
    "chmod": ("chmod", False),
    "fchmod": ("chmod", True),
    "utime": ("utime", False),
    "statvfs": ("statvfs", False),
    "fstatvfs": ("statvfs", True),
    "copy_file_range": ("write", True),
    "sendfile": ("write", True),
}
_LENGTH_AT = {"read": 1, "pread": 1}  # argument that says how much; of the others it is a buffer


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call that the code under test made."""

    number: int
    kind: str
    name: str
    """Function that was called, e.g. `os.pwrite`."""
    path: str
    """Relative to the watched directory, unique parts replaced by `*`."""
    place: str
    """Innermost line of ours that led here, e.g. `hsstore/durable.py:31 fsync_dir`."""
    may_be_short: bool = False
    """Whether it moves at least two bytes, so that it can be cut."""

    @property
    def faults(self) -> tuple[int, ...]:
        return tuple(e for e in ERRNOS[self.kind] if e != SHORT or self.may_be_short)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Make call number `at` fail with `code`; with `lasting` also every later one that can fail like this."""

    at: int
    code: int
    lasting: bool = False

    @property
    def name(self) -> str:
        return "SHORT" if self.code == SHORT else errno.errorcode[self.code]


@dataclass(slots=True)
class Shim:
    """While entered: counts the calls below `root`, and makes those of `fault` fail."""

    root: Path
    fault: Fault | None = None
    calls: list[Call] = field(default_factory=list)
    raised: list[Call] = field(default_factory=list)
    """The calls that were made to fail."""
    _fds: dict[int, str] = field(default_factory=dict)
    _real: dict[tuple[Any, str], Any] = field(default_factory=dict)
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _names: Iterator[int] = field(default_factory=lambda: iter(range(1, 1 << 40)))
    _prefix: str = ""

    def __enter__(self) -> Shim:
        self._prefix = os.path.abspath(self.root)
        for name, (kind, by_fd) in _OS.items():
            self._replace(os, name, self._wrapped(name, kind, by_fd))
        self._replace(os, "open", self._os_open)
        self._replace(os, "close", self._os_close)
        self._replace(os, "scandir", self._scandir)
        self._replace(io, "open", self._open)
        self._replace(builtins, "open", self._open)
        self._replace(mmap, "mmap", self._mmap_class())
        self._replace(ctypes, "CDLL", self._cdll)
        self._replace(secrets, "token_hex", self._token_hex)
        self._replace(ThreadPoolExecutor, "submit", _at_once)  # one call after the other, in an order that is repeated
        # By name, not by descriptor: the same calls under every Python. What is raced against is not tested here.
        self._replace(shutil, "_use_fd_functions", False)
        return self

    def __exit__(self, *_: object) -> None:
        for (owner, name), real in self._real.items():
            setattr(owner, name, real)
        self._real.clear()

    def _replace(self, owner: Any, name: str, new: Any) -> None:
        self._real[owner, name] = getattr(owner, name)
        setattr(owner, name, new)

    def real(self, owner: Any, name: str) -> Any:
        return self._real[owner, name] if self._real else getattr(owner, name)

    def inside(self, path: Any, dir_fd: int | None = None) -> str | None:
        """The absolute path when it is one below `root`."""
        if isinstance(path, int):
            return self._fds.get(path)
        text = os.fsdecode(path)
        if dir_fd is not None and not os.path.isabs(text):
            text = os.path.join(self._fds.get(dir_fd, "/"), text)
        text = os.path.normpath(os.path.join(os.getcwd(), text))
        return text if text == self._prefix or text.startswith(self._prefix + "/") else None

    def check(self, kind: str, name: str, path: str, n_bytes: int = 0, second: str | None = None) -> bool:
        """Count a call. Raises the fault that is due; returns True when the call is to be short."""
        with self._lock:
            relative = _UNIQUE.sub("*", os.path.relpath(path, self._prefix))
            call = Call(
                number=len(self.calls),
                kind=kind,
                name=name,
                path=relative,
                place=_place(sys._getframe(1)),
                may_be_short=n_bytes > 1,
            )
            self.calls.append(call)
            fault = self.fault
            if fault is None or fault.code not in call.faults:
                return False
            if call.number != fault.at and not (fault.lasting and call.number > fault.at):
                return False
            self.raised.append(call)
        if fault.code == SHORT:
            return True
        raise OSError(fault.code, os.strerror(fault.code), path, None, second)

    def opened(self, fd: int, path: str) -> None:
        self._fds[fd] = path

    def closed(self, fd: int) -> str | None:
        return self._fds.pop(fd, None)

    def _wrapped(self, name: str, kind: str, by_fd: bool) -> Callable[..., Any]:
        real = getattr(os, name)

        def call(*arguments: Any, **options: Any) -> Any:
            first = arguments[0] if arguments else options.get("path", options.get("src", "."))
            path = self._fds.get(first) if by_fd else self.inside(first, options.get("dir_fd"))
            second = os.fsdecode(arguments[1]) if kind in ("link", "rename") and len(arguments) > 1 else None
            if path is None and second is not None:
                path = self.inside(second)  # into the store from outside it
            if path is None:
                return real(*arguments, **options)
            asked = _asked(name, arguments) if kind in ("read", "write") else 0
            if self.check(kind, f"os.{name}", path, asked, second):
                arguments = _shortened(name, arguments, asked // 2)
            return None if kind == "fsync" else real(*arguments, **options)

        return call

    def _os_open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        inside = self.inside(path, dir_fd)
        if inside is not None:
            self.check("create" if flags & os.O_CREAT else "open", "os.open", inside)
        fd: int = self.real(os, "open")(path, flags, mode, dir_fd=dir_fd)
        if inside is not None:
            self.opened(fd, inside)
        return fd

    def _os_close(self, fd: int) -> None:
        path = self.closed(fd)
        self.real(os, "close")(fd)  # a failed close has closed all the same
        if path is not None:
            self.check("closeread", "os.close", path)

    def _scandir(self, path: Any = ".") -> Any:
        inside = self.inside(path)
        if inside is None:
            return self.real(os, "scandir")(path)
        self.check("list", "os.scandir", inside)
        return _Listing(self, inside, self.real(os, "scandir")(path))

    def _open(
        self,
        file: Any,
        mode: str = "r",
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
        closefd: bool = True,
        opener: Any = None,
    ) -> Any:
        """`io.open` step by step over a raw file of ours."""
        path = self.inside(file)
        if path is None:
            return self.real(io, "open")(file, mode, buffering, encoding, errors, newline, closefd, opener)
        if not isinstance(file, int):
            self.check("create" if set(mode) & set("wxa") else "open", "open", path)
        raw = _File(self, path, file, mode, closefd, opener)
        if "b" in mode and buffering == 0:
            return raw
        size = buffering if buffering > 1 else io.DEFAULT_BUFFER_SIZE
        if "+" in mode:
            buffered: Any = io.BufferedRandom(raw, size)
        else:
            buffered = io.BufferedReader(raw, size) if "r" in mode else io.BufferedWriter(raw, size)
        return buffered if "b" in mode else io.TextIOWrapper(buffered, encoding, errors, newline, buffering == 1)

    def _mmap_class(self) -> Any:
        shim, real = self, mmap.mmap

        class Map(real):  # type: ignore[misc,valid-type]
            def __new__(cls, fd: int, *arguments: Any, **options: Any) -> Any:
                path = shim._fds.get(fd)
                if path is not None:
                    shim.check("mmap", "mmap.mmap", path)
                return real.__new__(cls, fd, *arguments, **options)

        return Map

    def _cdll(self, name: Any, *arguments: Any, **options: Any) -> Any:
        library = self.real(ctypes, "CDLL")(name, *arguments, **options)
        return _Library(self, library) if name is None else library

    def _token_hex(self, n_bytes: int = 16) -> str:
        return f"{next(self._names):0{2 * n_bytes}x}"


class _File(io.FileIO):
    """The raw file under every `open`: each system call of its own."""

    def __init__(self, shim: Shim, path: str, file: Any, mode: str, closefd: bool, opener: Any) -> None:
        self._shim, self._path, self._writes = shim, path, bool(set(mode) & set("wxa+"))
        super().__init__(file, mode.replace("b", "").replace("t", ""), closefd, opener)
        shim.opened(self.fileno(), path)

    def readinto(self, buffer: Any) -> int | None:  # type: ignore[override]
        view = memoryview(buffer).cast("B")
        if self._shim.check("read", "file.readinto", self._path, len(view)):
            view = view[: len(view) // 2]
        return super().readinto(view)

    def read(self, size: int | None = -1) -> bytes | None:  # type: ignore[override]
        if size is None or size < 0:
            return self.readall()
        if self._shim.check("read", "file.read", self._path, size):
            size //= 2
        return super().read(size)

    def readall(self) -> bytes:
        self._shim.check("read", "file.readall", self._path)
        return super().readall()

    def write(self, data: Any) -> int | None:  # type: ignore[override]
        view = memoryview(data).cast("B")
        if self._shim.check("write", "file.write", self._path, len(view)):
            view = view[: len(view) // 2]
        return super().write(view)

    def truncate(self, size: int | None = None) -> int:
        self._shim.check("truncate", "file.truncate", self._path)
        return super().truncate(size)

    def close(self) -> None:
        if self.closed:
            return
        self._shim.closed(self.fileno())
        super().close()
        self._shim.check("close" if self._writes else "closeread", "file.close", self._path)


class _Listing:
    """A scandir iterator whose reading of entries can fail too."""

    def __init__(self, shim: Shim, path: str, entries: Any) -> None:
        self._shim, self._path, self._entries, self._begun = shim, path, entries, False

    def __iter__(self) -> _Listing:
        return self

    def __next__(self) -> Any:
        if not self._begun:
            self._begun = True
            self._shim.check("readdir", "scandir.next", self._path)
        return next(self._entries)

    def __enter__(self) -> _Listing:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._entries.close()


class _Library:
    """The C library as ctypes gives it, its renameat2 counted."""

    def __init__(self, shim: Shim, library: Any) -> None:
        self._shim, self._library = shim, library

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, name)

    def renameat2(self, from_fd: int, source: bytes, to_fd: int, target: bytes, flags: int) -> int:
        path = self._shim.inside(target)
        if path is not None:
            try:
                self._shim.check("rename", "renameat2", path)
            except OSError as error:
                ctypes.set_errno(error.errno or 0)
                return -1
        done: int = self._library.renameat2(from_fd, source, to_fd, target, flags)
        return done


def _at_once(_: ThreadPoolExecutor, work: Callable[..., Any], /, *arguments: Any, **options: Any) -> Future[Any]:
    """`submit` without a thread: the work is done before it returns."""
    future: Future[Any] = Future()
    try:
        future.set_result(work(*arguments, **options))
    except BaseException as error:
        future.set_exception(error)
    return future


def _asked(name: str, arguments: tuple[Any, ...]) -> int:
    """How many bytes a read or write is to move; 0 when it cannot be cut."""
    if name in ("sendfile", "copy_file_range"):
        return int(arguments[3] if name == "sendfile" else arguments[2])
    what = arguments[1]
    if name in _LENGTH_AT:
        return int(what)
    if name in ("readv", "preadv", "writev", "pwritev"):
        return memoryview(what[0]).nbytes
    return memoryview(what).nbytes


def _shortened(name: str, arguments: tuple[Any, ...], n: int) -> tuple[Any, ...]:
    if name == "sendfile":
        return (*arguments[:3], n, *arguments[4:])
    if name == "copy_file_range":
        return (*arguments[:2], n, *arguments[3:])
    what = arguments[1]
    if name in _LENGTH_AT:
        return (arguments[0], n, *arguments[2:])
    if name in ("readv", "preadv", "writev", "pwritev"):
        return (arguments[0], [memoryview(what[0]).cast("B")[:n]], *arguments[2:])
    return (arguments[0], memoryview(what).cast("B")[:n], *arguments[2:])


def _place(frame: FrameType | None) -> str:
    """`file:line function` of the innermost frame that is ours."""
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_OURS):
            return f"{os.path.relpath(file, ROOT)}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return "outside"
