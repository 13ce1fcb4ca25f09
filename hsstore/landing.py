"""How one shard arrives at another place: its files whole and compared, then its record, which commits it.

In a directory the protocol is the one of every writer (docs/design/002-commit.md): files under staging/ names, fsync,
read again past the page cache, the record by a link that must not exist yet, final names. In an object store, which has
no links, files get their final keys at once, are read again, and the record follows by a conditional put: a file
without a record is nothing. Leaves the order of shards to `copying`, bytes and connections to `places`.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from hsstore import durable, owner, paths, zarrmeta
from hsstore.destination import fsync_tree
from hsstore.errors import ConflictError, DamagedError, IncompleteError, NotFoundError
from hsstore.places import LocalPlace, Piece, Place
from hsstore.publishing import publish
from hsstore.reading import RateLimit, raise_if_ours
from hsstore.records import ArraySpec, FileEntry, ShardRecord, StoreHeader, canonical

_PIECE_BYTES = 1 << 20  # stays in the CPU's cache between read, SHA-256 and write


class SourceDamagedError(DamagedError):
    """A file of the source is not what its record says; nothing of its shard is committed."""


class OvertakenError(FileNotFoundError):
    """What was staged is gone, and the shard is not committed, or not published: another process is at it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """What all threads of a copy share."""

    rate: RateLimit | None = None
    stop: threading.Event = field(default_factory=threading.Event)
    """Set: every thread ends at its next piece."""
    on_bytes: Callable[[int], None] = lambda n: None
    """Called with the bytes of the source that were dealt with, by any thread."""

    def passed(self, n_bytes: int) -> None:
        """Called for every piece that is read, at the source or at the destination."""
        if self.rate is not None:
            self.stop.wait(self.rate.reserve(n_bytes))
        if self.stop.is_set():
            raise IncompleteError("the copy was stopped")


class Landing(Protocol):
    """Where shards arrive."""

    def land(self, source: Place, record: ShardRecord) -> None:
        """Copy a shard and commit it; what an earlier copy brought whole is taken over.

        Raises `SourceDamagedError`, `ConflictError` when another one committed other contents, `DamagedError` for a
        destination that does not give back what was written.
        """


def landing_at(place: Place, header: StoreHeader, flow: Flow) -> Landing:
    if isinstance(place, LocalPlace):
        return LocalLanding(place, header, flow)
    return ObjectLanding(place, header, flow)


class LocalLanding:
    """Arrival in a directory."""

    def __init__(self, place: LocalPlace, header: StoreHeader, flow: Flow) -> None:
        self._place, self._root, self._header, self._flow = place, place.root, header, flow

    def land(self, source: Place, record: ShardRecord) -> None:
        # The attempt's own name: whoever rolls forward after a crash finds the files by the record.
        directory = paths.staging(self._root, record.shard, record.attempt)
        try:
            self._stage(source, record, directory)
        except SourceDamagedError:
            shutil.rmtree(directory, ignore_errors=True)
            raise
        except FileNotFoundError as error:
            # Another copy that took our lease for dead has committed the shard, and staging with it is gone; or it is
            # still at it.
            if not self._place.exists(record_path(record.shard)):
                raise OvertakenError(error.errno, error.strerror, error.filename) from None
        commit(self._place, record)
        try:
            publish(self._root, self._header, record)
        except FileNotFoundError as error:  # what was staged was taken for garbage: it is staged once more
            raise OvertakenError(error.errno, error.strerror, error.filename) from None

    def _stage(self, source: Place, record: ShardRecord, directory: Path) -> None:
        durable.make_dirs(directory, self._root)
        owner.mark(directory)
        self._sweep(directory)
        for spec in self._header.arrays:
            self._bring(source, record, spec, directory)
        durable.fsync_dir(directory)

    def _sweep(self, directory: Path) -> None:
        """Halves of files that a killed copy left. The lease says that nobody else is at it; should somebody be, he is
        overtaken."""
        for path in directory.iterdir():
            if durable.is_temporary(path.name):
                path.unlink(missing_ok=True)

    def _bring(self, source: Place, record: ShardRecord, spec: ArraySpec, directory: Path) -> None:
        relative = zarrmeta.chunk_path(spec, record.shard)
        entry = record.files[relative]
        staged = (directory / paths.staged_name(spec.name)).relative_to(self._root).as_posix()
        if self._place.exists(relative):  # a plain copy that was cut off, or a record that was lost
            if not self._is_whole(relative, entry):
                raise DamagedError(
                    f"{self._root / relative} is another file than {source} has, and no record names it",
                    hint="remove it, or copy to another place",
                )
            fsync_tree(self._root, [relative])  # whoever brought it may not have
            self._flow.on_bytes(entry.bytes)
            return
        if self._place.exists(staged):
            if self._is_whole(staged, entry):
                self._flow.on_bytes(entry.bytes)
                return
            (self._root / staged).unlink()
        self._write(source, record, spec, staged)

    def _write(self, source: Place, record: ShardRecord, spec: ArraySpec, staged: str) -> None:
        relative = zarrmeta.chunk_path(spec, record.shard)
        entry = record.files[relative]
        pieces = checked(source, record, spec, self._flow)
        temporary = self._place.write_temporary(staged, pieces, entry.bytes)
        try:
            if not self._is_whole(temporary.relative_to(self._root).as_posix(), entry):
                os.stat(temporary)  # gone is not damaged
                raise _not_kept(self._place, relative)
            os.chmod(temporary, 0o444)
            durable.fsync_file(temporary)
            durable.link_new(temporary, self._root / staged)
        finally:
            temporary.unlink(missing_ok=True)

    def _is_whole(self, path: str, entry: FileEntry) -> bool:
        return is_whole(self._place, path, entry, self._flow)


class ObjectLanding:
    """Arrival in an object store."""

    def __init__(self, place: Place, header: StoreHeader, flow: Flow) -> None:
        self._place, self._header, self._flow = place, header, flow

    def land(self, source: Place, record: ShardRecord) -> None:
        for spec in self._header.arrays:
            relative = zarrmeta.chunk_path(spec, record.shard)
            entry = record.files[relative]
            if is_whole(self._place, relative, entry, self._flow):
                self._flow.on_bytes(entry.bytes)
                continue
            # It may be another attempt's that never got a record: nothing refers to it.
            self._place.put(relative, lambda spec=spec: checked(source, record, spec, self._flow), entry.bytes)  # type: ignore[misc]
            if not is_whole(self._place, relative, entry, self._flow):
                raise _not_kept(self._place, relative)
        commit(self._place, record)


def record_path(shard: int) -> str:
    return f"{paths.RECORDS}/{paths.numbered(shard)}"


def commit(place: Place, record: ShardRecord) -> None:
    """The record, last. Raises `ConflictError` when another record has its name."""
    path, data = record_path(record.shard), canonical(record)
    if not place.write_new(path, data) and place.read(path) != data:
        raise ConflictError(
            f"shard {record.shard} was committed at {place} by another writer meanwhile", hint="copy to another place"
        )


def is_whole(place: Place, path: str, entry: FileEntry, flow: Flow) -> bool:
    """Whether a file lies there with exactly the recorded bytes, read from the medium."""
    if place.size(path) != entry.bytes:
        return False
    digest = hashlib.sha256()
    for piece in place.stream(path, _PIECE_BYTES, fresh=True):
        flow.passed(len(piece))
        digest.update(piece)
    return digest.hexdigest() == entry.sha256


def checked(source: Place, record: ShardRecord, spec: ArraySpec, flow: Flow) -> Iterator[Piece]:
    """The pieces of a file of the source. Raises `SourceDamagedError` in their midst, or behind the last one when they
    are not what the record says; whoever writes them drops them then."""
    relative = zarrmeta.chunk_path(spec, record.shard)
    entry = record.files[relative]
    digest, n_bytes, whole = hashlib.sha256(), 0, False
    try:
        for piece in _wherever(source, record, spec):
            flow.passed(len(piece))
            digest.update(piece)
            n_bytes += len(piece)
            flow.on_bytes(len(piece))
            yield piece
        if n_bytes != entry.bytes:
            raise SourceDamagedError(f"{relative}: has {n_bytes} bytes, its record says {entry.bytes}")
        if digest.hexdigest() != entry.sha256:
            raise SourceDamagedError(f"{relative}: SHA-256 differs from the record")
        whole = True
    except NotFoundError:
        raise SourceDamagedError(f"{relative}: the file is missing") from None
    except SourceDamagedError:
        raise
    except DamagedError as error:
        raise SourceDamagedError(f"{relative}: {error.message}") from None
    except OSError as error:  # links in a circle, no permission, a stale handle: of this file, not of the others
        raise_if_ours(error)
        raise SourceDamagedError(f"{relative}: cannot be read: {error.strerror}") from None
    finally:
        if not whole:
            flow.on_bytes(-n_bytes)  # they come again, or never


def _wherever(source: Place, record: ShardRecord, spec: ArraySpec) -> Iterator[Piece]:
    """A committed file under its final name, or its staged one while nobody has published it."""
    final = zarrmeta.chunk_path(spec, record.shard)
    staged = paths.staging(Path(), record.shard, record.attempt) / paths.staged_name(spec.name)
    for path in (final, staged.as_posix()):
        try:
            yield from source.stream(path, _PIECE_BYTES)
            return
        except NotFoundError:
            continue
    yield from source.stream(final, _PIECE_BYTES)


def _not_kept(place: Place, relative: str) -> DamagedError:
    return DamagedError(
        f"{place}: {relative} does not read back as it was written", hint="check that disk or service, then copy again"
    )
