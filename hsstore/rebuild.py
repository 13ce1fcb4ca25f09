"""A shard file written anew: good blocks of the copies here, the others from replicas, the recorded bytes or nothing.

The file that is there is never written to, and keeps its name until the new one is whole, read back from the disk and
durable: whoever has it mapped keeps the old one, and a crash at any step leaves the store as it was. Equal bytes under
one name come out whoever is faster, so several repairs at once do no harm. Leaves finding what is damaged to `repair`.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from hsstore import durable, owner, paths
from hsstore.digest import sha256_file
from hsstore.replicas import Replica, Replicas
from hsstore.shardblocks import Copies, Wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebuilt:
    """What became of one file."""

    lost: tuple[int, ...] = ()
    """Blocks that nobody has; the file is as it was then."""
    obstacle: str = ""
    """What kept the new file from its name."""
    fetched: Counter[str] = field(default_factory=Counter)
    """Blocks by the replica that gave them."""

    @property
    def done(self) -> bool:
        return not self.lost and not self.obstacle


class Workplace:
    """A directory of this run in staging/; gone when the run ends, garbage when it was killed."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._directory: Path | None = None

    def __enter__(self) -> Workplace:
        return self

    def __exit__(self, *_: object) -> None:
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)

    def new(self, name: str) -> Path:
        """A path for a new file."""
        if self._directory is None:
            directory = self._root / paths.STAGING / f"repair.{secrets.token_hex(8)}"
            durable.make_dirs(directory, self._root)
            self._directory = directory
            owner.mark(directory)
        return self._directory / name


def in_the_way(root: Path, relative: str) -> str:
    """What keeps a file from that name, "" when nothing does: what is no directory above it, a directory in its place.

    Anything else that is no plain file is replaced by a rename.
    """
    path = root
    for part in Path(relative).parent.parts:
        path /= part
        if os.path.lexists(path) and not path.is_dir():
            return f"{path.relative_to(root)} is in the way: no directory"
    final = root / relative
    if final.is_dir() and not final.is_symlink():
        return f"{relative} is in the way: a directory"
    return ""


def rebuild(root: Path, wanted: Wanted, bad: Iterable[int], replicas: Replicas, workplace: Workplace) -> Rebuilt:
    """Publish a new file in the place of a damaged or missing one, or change nothing.

    Raises the `OSError` of the store's own disk; a full one leaves what is there untouched.
    """
    path = workplace.new(f"{wanted.record.shard}.{paths.staged_name(wanted.spec.name)}")
    fetched: Counter[str] = Counter()
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with Copies(root, wanted) as copies:
                lost = _fill(fd, wanted, set(bad), copies, replicas, fetched)
            if lost:
                return Rebuilt(lost=tuple(lost), fetched=fetched)
            durable.pwrite_all(fd, memoryview(wanted.footer), wanted.n_blocks * wanted.block_bytes)
            if not _settled(fd, path, wanted) and not _whole_from_one(fd, path, wanted, replicas, fetched):
                return Rebuilt(lost=tuple(range(wanted.n_blocks)), fetched=fetched)
        finally:
            os.close(fd)
        return Rebuilt(obstacle=_publish(path, root / wanted.relative, root), fetched=fetched)
    finally:
        path.unlink(missing_ok=True)


def _fill(
    fd: int, wanted: Wanted, bad: set[int], copies: Copies, replicas: Replicas, fetched: Counter[str]
) -> list[int]:
    """Write every block to its place, the fetched ones first: without them the rest is not worth copying.

    Returns the blocks that nobody has.
    """
    lost = _fetch(fd, wanted, bad, replicas, fetched)
    if lost:
        return lost
    vanished = []
    for block in range(wanted.n_blocks):
        if block in bad:
            continue
        data = copies.block(block)
        if data is None:  # it was good when the file was looked at
            vanished.append(block)
        else:
            durable.pwrite_all(fd, memoryview(data), block * wanted.block_bytes)
    return _fetch(fd, wanted, vanished, replicas, fetched)


def _fetch(
    fd: int,
    wanted: Wanted,
    blocks: Iterable[int],
    replicas: Replicas,
    fetched: Counter[str],
    only: list[Replica] | None = None,
) -> list[int]:
    left = set(blocks)
    for block, data, replica in replicas.fetch(wanted, sorted(left), only) if left else ():
        durable.pwrite_all(fd, data, block * wanted.block_bytes)
        fetched[str(replica)] += 1
        left.discard(block)
    return sorted(left)


def _settled(fd: int, path: Path, wanted: Wanted) -> bool:
    """Durable, and what the disk gives back is what the record says."""
    os.fsync(fd)
    with contextlib.suppress(OSError):  # a file system that takes no advice answers from its cache
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    return os.fstat(fd).st_size == wanted.n_bytes and sha256_file(path) == wanted.sha256


def _whole_from_one(fd: int, path: Path, wanted: Wanted, replicas: Replicas, fetched: Counter[str]) -> bool:
    """Every block agrees with its CRC32C and the file not with its SHA-256: take all of it from one replica."""
    for replica in replicas.of(wanted):
        lost = _fetch(fd, wanted, range(wanted.n_blocks), replicas, fetched, [replica])
        if not lost and _settled(fd, path, wanted):
            return True
    return False


def _publish(new: Path, final: Path, root: Path) -> str:
    """Give the new file its name. Returns what is in the way, "" when nothing is."""
    os.chmod(new, 0o444)
    try:
        durable.make_dirs(final.parent, root)
        os.rename(new, final)
    except (IsADirectoryError, NotADirectoryError, FileExistsError) as error:
        return f"{error.strerror or 'something else'}: {error.filename2 or error.filename} is in the way"
    durable.fsync_dir(final.parent)
    return ""
