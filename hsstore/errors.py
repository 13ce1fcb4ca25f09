"""Every error hsstore raises on purpose: one tree, and the tables that turn it into exit codes and HTTP statuses.

    HsstoreError                      something was expected, something else was found
    ├── UsageError (ValueError)       change the call: a bad option, path, value, input file
    │   └── MissingExtraError         install the extra that the message names
    ├── NotFoundError (FileNotFoundError)  no such store, sample, plan, batch
    ├── DamagedError                  bytes are not what was committed: run `hsstore verify manifest`
    ├── IncompleteError               the work stopped part-way and can be resumed
    ├── ConflictError                 this store was made from something else (model, layers, prompts …)
    ├── LockedError                   another process holds what is needed (a port, a store)
    ├── FormatError                   written by a version this one does not read
    ├── NoSpaceError                  the disk is full or the data will not fit
    ├── UnauthorizedError             the service wants a token
    └── ServiceError                  the service did not answer as agreed; a retry may help

A class says what the caller should do, `kind` is the stable, append-only code that logs, `--json` and HTTP carry.
Messages name what was expected, what was found, where, and in `hint` the command that helps.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator


class HsstoreError(Exception):
    """Base of the tree. ``hint`` is one sentence, mostly a command, that helps."""

    kind = "error"
    exit_code = 1
    http_status = 500

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class UsageError(HsstoreError, ValueError):
    kind = "usage"
    exit_code = 2
    http_status = 422


class MissingExtraError(UsageError):
    kind = "missing_extra"
    exit_code = 2
    http_status = 501


class NotFoundError(HsstoreError, FileNotFoundError):
    kind = "not_found"
    exit_code = 10
    http_status = 404


class DamagedError(HsstoreError):
    kind = "damaged"
    exit_code = 3
    http_status = 503


class IncompleteError(HsstoreError):
    kind = "incomplete"
    exit_code = 4
    http_status = 503


class ConflictError(HsstoreError, ValueError):
    kind = "conflict"
    exit_code = 2
    http_status = 409


class LockedError(HsstoreError):
    kind = "locked"
    exit_code = 11
    http_status = 423


class FormatError(HsstoreError):
    kind = "format_not_supported"
    exit_code = 12
    http_status = 501


class NoSpaceError(HsstoreError):
    kind = "no_space"
    exit_code = 4
    http_status = 507


class UnauthorizedError(HsstoreError):
    kind = "unauthorized"
    exit_code = 2
    http_status = 401


class ServiceError(HsstoreError):
    kind = "service"
    exit_code = 1
    http_status = 502


EXIT_INTERRUPTED = 130
EXIT_READER_LEFT = 141


def class_of(kind: str, otherwise: type[HsstoreError] = HsstoreError) -> type[HsstoreError]:
    """The class that a stable code stands for: an error of another process or machine becomes one of ours again."""
    return {found.kind: found for found in _tree(HsstoreError)}.get(kind, otherwise)


def _tree(root: type[HsstoreError]) -> Iterator[type[HsstoreError]]:
    """Without what other modules derive from it for themselves."""
    yield root
    for below in root.__subclasses__():
        if below.__module__ == __name__:
            yield from _tree(below)


def extra_hint(extra: str) -> str:
    """The pip command that adds an extra, the same words everywhere."""
    return f"pip install 'hsstore[{extra}]'"


def from_os_error(error: OSError) -> HsstoreError:
    """What the operating system said, as one of ours: the one place where errno becomes words."""
    name = error.filename2 or error.filename  # of a rename, the name that was wanted
    where = f" {name}" if name else ""
    reason = f"{(error.strerror or str(error)).lower()}"
    match error.errno:
        case errno.ENOSPC | errno.EDQUOT:
            return NoSpaceError(
                f"no space left for{where or ' the data'}", hint="free some space, then run the command again"
            )
        case errno.EFBIG:
            hint = "raise the limit with `ulimit -f`, or use a file system for larger files"
            return NoSpaceError(
                f"a file would be larger than this user or file system allows:{where or ' a file'}", hint=hint
            )
        case errno.EISDIR:
            return UsageError(f"expected a file, found a directory:{where}", hint="remove it, or move it away")
        case errno.EROFS | errno.EACCES | errno.EPERM:
            return UsageError(f"cannot use{where}: {reason}", hint="give a path this user may use")
        case errno.EADDRINUSE:
            return LockedError(f"the address is in use:{where} {reason}", hint="give another --port")
        case errno.ENOENT | errno.ENOTDIR:
            return NotFoundError(f"{where.strip() or 'a file'}: {reason}", hint="check the path")
        case errno.EMFILE | errno.ENFILE:
            return HsstoreError("too many open files", hint="raise the limit with `ulimit -n`")
    return HsstoreError(f"the system refused:{where} {reason}")
