"""Where the files of a store can lie: a local directory, a bucket, a plain web server; one small interface for all.

Responsible for opening a place by its path or URL, for a local directory as a place, and for reading a store's
records from any place with the checks that `manifest` makes locally. Leaves object stores and web servers to
`objectplace`, what is copied in which order to `copying`, which bytes are bad to `verify` and `repair`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol, TypeVar
from urllib.parse import unquote, urlsplit

from hsstore import durable, paths, plausible, zarrmeta
from hsstore.errors import DamagedError, HsstoreError, NotFoundError, UsageError
from hsstore.reading import raise_if_ours
from hsstore.records import (
    LayoutRecord,
    Manifest,
    ShardRecord,
    StoreHeader,
    Tombstone,
    canonical,
    check_format,
    decode,
    read_plain,
    sealed,
    sha256_hex,
)

PIECE_BYTES = 8 << 20
SCHEMES = ("s3", "s3a", "gs", "az", "abfs", "abfss", "http", "https", "file", "memory")
_AT_ONCE = 16  # records of a bucket are small and far away: their requests overlap

Piece = bytes | bytearray | memoryview
Pieces = Callable[[], Iterable[Piece]]
T = TypeVar("T")
K = TypeVar("K")


class Place(Protocol):
    """Where a store lies. Paths are relative to it, with `/`; every method may be called from any thread.

    Raises `NotFoundError` for a file that is not there, `DamagedError` for a medium that gives an error, `ServiceError`
    for a service that stays away, `UnauthorizedError` for one that refuses; a full disk is an `OSError`.
    """

    local: Path | None
    """Its directory, when it is one on this machine."""

    def __str__(self) -> str:
        """As the user gave it."""

    def read(self, path: str) -> bytes:
        """All bytes of a small file."""

    def read_range(self, path: str, start: int, n_bytes: int) -> bytes:
        """`n_bytes` from `start`; fewer where the file ends before."""

    def stream(self, path: str, piece_bytes: int = PIECE_BYTES, *, fresh: bool = False) -> Iterator[Piece]:
        """The file in order, a piece at a time; a piece is valid until the next one is asked for.

        `fresh`: from the medium rather than from the page cache, as far as the system allows.
        """

    def size(self, path: str) -> int | None:
        """Bytes of the file; None when there is none."""

    def names(self, directory: str) -> list[str]:
        """Names of the files directly in a directory ("" is the place itself), sorted; none without a directory."""

    def write_new(self, path: str, data: bytes) -> bool:
        """Write a file that must not exist yet, whole, durable. False when the name is taken."""

    def put(self, path: str, pieces: Pieces, n_bytes: int) -> None:
        """Write or replace a file, whole and durable or not at all. An error of `pieces` itself passes through.

        `pieces` is called once for every try: where a connection breaks they are wanted again.
        """

    def exists(self, path: str) -> bool:
        """Whether the file is there."""

    def is_empty(self) -> bool:
        """Whether nothing lies there, not even a file that is none of a store's."""


def is_url(spec: str | Path) -> bool:
    """Whether that names a place by a URL of a scheme that we know."""
    scheme, found, _ = str(spec).partition("://")
    return bool(found) and scheme.lower() in SCHEMES


def open_place(spec: str | Path) -> Place:
    """A local directory (which need not exist), or s3://, gs://, az://, http(s)://, file://, memory:// (tests).

    Raises `UsageError` for a URL that cannot be one, `MissingExtraError` when the library for it is not installed.
    """
    text = str(spec)
    if not is_url(text):
        if "://" in text:
            known = ", ".join(f"{s}://" for s in SCHEMES)
            raise UsageError(f"{text} has a scheme that hsstore does not know; it knows {known}")
        return LocalPlace(spec)
    if text.lower().startswith("file://"):
        parts = urlsplit(text)
        if parts.netloc not in ("", "localhost") or not parts.path:
            raise UsageError(f"{text} names no path of this machine", hint="write file:///absolute/path")
        return LocalPlace(unquote(parts.path), name=text)
    from hsstore.objectplace import open_object_place

    return open_object_place(text)


class LocalPlace:
    """A directory of this machine."""

    def __init__(self, root: str | Path, name: str = "") -> None:
        self.root = Path(root)
        self.local: Path | None = self.root
        self._name = name or str(root)

    def __str__(self) -> str:
        return self._name

    def read(self, path: str) -> bytes:
        return read_plain(self.root / path)

    def read_range(self, path: str, start: int, n_bytes: int) -> bytes:
        fd = self._open(path)
        out = bytearray()
        try:
            while len(out) < n_bytes and (piece := os.pread(fd, n_bytes - len(out), start + len(out))):
                out += piece
        except OSError as error:
            raise self._read_error(path, error) from None
        finally:
            os.close(fd)
        return bytes(out)

    def stream(self, path: str, piece_bytes: int = PIECE_BYTES, *, fresh: bool = False) -> Iterator[Piece]:
        fd = self._open(path)
        buffer = memoryview(bytearray(piece_bytes))
        try:
            with contextlib.suppress(OSError):  # file systems that take no advice are read through their cache
                if fresh:
                    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
            while n := os.readv(fd, [buffer]):
                yield buffer[:n]
        except OSError as error:
            raise self._read_error(path, error) from None
        finally:
            os.close(fd)

    def size(self, path: str) -> int | None:
        try:
            found = os.stat(self.root / path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            return None  # links in a circle: there is no file
        return found.st_size if stat.S_ISREG(found.st_mode) else None

    def names(self, directory: str) -> list[str]:
        try:
            with os.scandir(self.root / directory) as entries:
                return sorted(e.name for e in entries if not e.is_dir(follow_symlinks=False))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def write_new(self, path: str, data: bytes) -> bool:
        durable.make_dirs((self.root / path).parent, self.root)
        return durable.write_new(self.root / path, data)

    def put(self, path: str, pieces: Pieces, n_bytes: int) -> None:
        durable.make_dirs((self.root / path).parent, self.root)
        durable.take_place(self.write_temporary(path, pieces(), n_bytes), self.root / path)

    def write_temporary(self, path: str, pieces: Iterable[Piece], n_bytes: int) -> Path:
        """The pieces, durable, under a temporary name beside `path`, whose directory exists."""
        final = self.root / path
        temporary = final.with_name(f".{final.name}.{secrets.token_hex(8)}.tmp")
        try:
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            try:
                offset = 0
                for piece in pieces:
                    durable.pwrite_all(fd, memoryview(piece), offset)
                    offset += len(piece)
                os.fsync(fd)
            finally:
                os.close(fd)
            check_length(path, offset, n_bytes)
        except BaseException as error:
            temporary.unlink(missing_ok=True)
            if isinstance(error, OSError) and error.filename is None:
                error.filename = str(final)  # a full disk should be named
            raise
        return temporary

    def exists(self, path: str) -> bool:
        return self.size(path) is not None

    def is_empty(self) -> bool:
        try:
            with os.scandir(self.root) as entries:
                return next(entries, None) is None
        except FileNotFoundError:
            return True
        except NotADirectoryError:
            return False

    def _open(self, path: str) -> int:
        """Raises `DamagedError` for what is no plain file: reading a FIFO would wait for ever."""
        try:
            fd = os.open(self.root / path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise self._read_error(path, error) from None
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise DamagedError(f"{self.root / path} is no plain file")
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _read_error(self, path: str, error: OSError) -> Exception:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            return NotFoundError(f"{self.root / path} does not exist")
        if error.errno == errno.EIO:
            return DamagedError(f"{self.root / path} cannot be read: {error.strerror}")
        error.filename = error.filename or str(self.root / path)
        return error


def check_length(path: str, found: int, expected: int) -> None:
    """Raises `DamagedError` unless as many bytes came as were announced."""
    if found != expected:
        raise DamagedError(f"{path} has {found} bytes, expected {expected}")


def load_header(place: Place) -> StoreHeader:
    """store.json of a place. Raises `NotFoundError` when no store lies there."""
    try:
        header = load_sealed(place, paths.HEADER, StoreHeader)
    except NotFoundError:
        raise NotFoundError(f"{place} is not a store: it has no {paths.HEADER}", hint="check the path") from None
    _refuse_implausible(place, paths.HEADER, plausible.header(header))
    return header


def load_layouts(place: Place, header: StoreHeader) -> list[LayoutRecord]:
    """Every layout of a place, in order. Raises `DamagedError` for one of another store, a gap, or none at all."""
    layouts: list[LayoutRecord] = []
    for number in _numbers(place, paths.LAYOUTS) or [0]:
        path = f"{paths.LAYOUTS}/{paths.numbered(number)}"
        try:
            layout = load_sealed(place, path, LayoutRecord)
        except NotFoundError as error:
            raise DamagedError(f"{error.message}: the store has no layout", hint=_hint(place)) from None
        _check_owner(place, path, layout.store_uuid, header)
        expected = layouts[-1].numbers.stop if layouts else 0
        if layout.first_shard != expected:
            raise DamagedError(
                f"{_at(place, path)} begins with shard {layout.first_shard}, expected {expected}", hint=_hint(place)
            )
        _refuse_implausible(place, path, plausible.layout_record(layout))
        layouts.append(layout)
    return layouts


def n_layouts(place: Place) -> int:
    """How many layouts a place has by their names."""
    return len(_numbers(place, paths.LAYOUTS))


def load_tombstones(place: Place, header: StoreHeader) -> list[Tombstone]:
    """Every tombstone of a place, by shard and number. Raises for the first that cannot be read."""
    return [_value(result) for result in look_at_tombstones(place, header).values()]


def look_at_tombstones(place: Place, header: StoreHeader) -> dict[tuple[int, int], Tombstone | HsstoreError]:
    """The same by (shard, number); one that cannot be read is the error that says why."""
    found = sorted(filter(None, map(paths.tombstone_of, _entries(place, paths.TOMBSTONES))))

    def load(name: tuple[int, int]) -> Tombstone:
        path = paths.tombstone(Path(), *name).as_posix()
        stone = load_sealed(place, path, Tombstone)
        _check_owner(place, path, stone.store_uuid, header)
        if (stone.shard, stone.number) != name:
            raise DamagedError(f"{_at(place, path)} is tombstone {stone.number} of shard {stone.shard}")
        return stone

    return dict(zip(found, _each(load, found), strict=True))


def load_record(place: Place, header: StoreHeader, shard: int) -> ShardRecord:
    """records/N.json of a place, checked: its own hash, its store, its number, its files."""
    path = f"{paths.RECORDS}/{paths.numbered(shard)}"
    record = load_sealed(place, path, ShardRecord)
    _check_owner(place, path, record.store_uuid, header)
    if record.shard != shard:
        raise DamagedError(f"{_at(place, path)} is the record of shard {record.shard}", hint=_hint(place))
    if set(record.files) != {zarrmeta.chunk_path(spec, shard) for spec in header.arrays}:
        raise DamagedError(f"{_at(place, path)} names other files than the store's arrays have", hint=_hint(place))
    _refuse_implausible(place, path, plausible.record(record, header))
    return record


def named_shards(place: Place, header: StoreHeader) -> set[int]:
    """The shards that the manifest of a place says were committed when it was built; none when it has no sound one."""
    listed = _lines(place)
    if f"{sha256_hex(canonical(header))}  {paths.HEADER}" in listed:
        names = [name.partition("/") for _, _, name in (line.partition("  ") for line in listed)]
        return {n for folder, _, file in names if folder == paths.RECORDS and (n := paths.number_of(file)) is not None}
    try:
        found = decode(place.read(paths.MANIFEST), Manifest, _at(place, paths.MANIFEST))
    except (DamagedError, NotFoundError, OSError):
        return set()  # derived, and never needed: `hsstore verify` says what is wrong with it
    ours = (found.capture, found.arrays, found.shard_rows) == (header.capture, header.arrays, header.shard_rows)
    return {shard.shard for shard in found.shards} if ours else set()


def _lines(place: Place) -> list[str]:
    try:
        return place.read(paths.MANIFEST_SUMS).decode("utf-8", "replace").splitlines()
    except (DamagedError, NotFoundError, OSError):
        return []  # as above


def record_numbers(place: Place) -> list[int]:
    """Numbers of the committed shards, ascending, also of quarantined ones."""
    return _numbers(place, paths.RECORDS)


def load_records(
    place: Place, header: StoreHeader, shards: Iterable[int] | None = None
) -> dict[int, ShardRecord | HsstoreError]:
    """The committed shards of a place (or those of them in `shards`), ascending; a record that cannot be read is the
    `NotFoundError` or `DamagedError` that says why. Any other error is raised."""
    numbers = record_numbers(place) if shards is None else sorted(shards)
    return dict(zip(numbers, _each(lambda shard: load_record(place, header, shard), numbers), strict=True))


def _each(load: Callable[[K], T], names: Sequence[K]) -> list[T | HsstoreError]:
    """`load` of every name in order, several at once; damage is a result, so that the others can be looked at."""

    def one(name: K) -> T | HsstoreError:
        try:
            return load(name)
        except (DamagedError, NotFoundError) as error:
            return error
        except OSError as error:  # links in a circle, no permission, a stale handle: this one only
            raise_if_ours(error)
            return DamagedError(f"{error.filename or name} cannot be read: {error.strerror}")

    if len(names) < 2:
        return [one(name) for name in names]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return list(pool.map(one, names))


def _value(result: T | HsstoreError) -> T:
    if isinstance(result, HsstoreError):
        raise result
    return result


def load_sealed(place: Place, path: str, type_: type[T]) -> T:
    """A self-hashed record, checked as `records.load_sealed` does: exactly its canonical spelling."""
    data, where, hint = place.read(path), _at(place, path), _hint(place)
    check_format(data, where, hint=hint)
    document = decode(data, type_, where, hint=hint)
    if canonical(sealed(document)) != data:
        raise DamagedError(f"{where} does not match its own SHA-256", hint=hint)
    return document


def _numbers(place: Place, directory: str) -> list[int]:
    return sorted(n for n in map(paths.number_of, _entries(place, directory)) if n is not None)


def _entries(place: Place, directory: str) -> list[str]:
    """Names in a directory whatever lies under them: a record that became a directory is a record that is damaged."""
    if place.local is None:
        return place.names(directory)
    try:
        return os.listdir(place.local / directory)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _refuse_implausible(place: Place, path: str, wrong: str) -> None:
    if wrong:
        raise DamagedError(f"{_at(place, path)} {wrong}", hint=_hint(place))


def _check_owner(place: Place, path: str, uuid: str, header: StoreHeader) -> None:
    if uuid != header.uuid:
        raise DamagedError(
            f"{_at(place, path)} belongs to store {uuid}, this one is {header.uuid}", hint="restore the right file"
        )


def _at(place: Place, path: str) -> str:
    return f"{str(place).rstrip('/')}/{path}"


def _hint(place: Place) -> str:
    return f"run `hsstore verify manifest {place}`" if place.local else "restore that file from a copy"
