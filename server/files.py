"""The files of a served store under the names that its records give them: what a repair or a copy elsewhere reads.

Responsible for which names there are (a name is looked up in the records, never joined to a path, so there is nothing
to traverse) and for reading shard files with `pread`: a file that became shorter is an error here, where a map would
be SIGBUS. Documents come out of memory as the opened state implies them, so they cannot be damaged on the way. Leaves
HTTP to `routes.files` and judging the bytes of a shard file to who asked for them: it has their checksums.
"""

from __future__ import annotations

import errno
import os
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hsstore import manifest, paths, zarrmeta
from hsstore.errors import DamagedError, HsstoreError, NotFoundError, from_os_error
from hsstore.plainfile import open_plain
from hsstore.records import ArraySpec, ShardRecord, canonical, decode, read_plain, sha256_hex
from hsstore.store import Store

PIECE_BYTES = 4 << 20
_CHUNK = re.compile(rf"{re.escape(zarrmeta.ROOT)}/(?P<array>.+)/c/(?P<shard>\d{{1,9}})(?:/0)*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A small file, whole."""

    data: bytes

    @property
    def n_bytes(self) -> int:
        return len(self.data)

    @property
    def sha256(self) -> str:
        return sha256_hex(self.data)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardFile:
    """A sealed file on disk. Size and digest are the recorded ones, whatever lies there."""

    path: Path
    relative: str
    n_bytes: int
    sha256: str

    def pieces(self, start: int, stop: int) -> Iterator[memoryview]:
        """Bytes `start … stop` in pieces of at most 4 MiB.

        Raises `DamagedError` where the file ends early, is missing, no plain file or cannot be read. A part that is
        there is given even when the file has another size than recorded: it may be just what is broken elsewhere.
        """
        try:
            fd = open_plain(self.path, name=self.relative, hint=_HINT)
        except OSError as error:
            raise self._error(error) from None
        try:
            self._check_size(os.fstat(fd).st_size, start, stop)
            while start < stop:
                data = os.pread(fd, min(PIECE_BYTES, stop - start), start)
                if not data:
                    raise DamagedError(f"{self.relative} became shorter while it was read", hint=_HINT)
                start += len(data)
                yield memoryview(data)
        except OSError as error:
            if isinstance(error, HsstoreError):
                raise
            raise self._error(error) from None
        finally:
            os.close(fd)

    def _check_size(self, found: int, start: int, stop: int) -> None:
        whole = (start, stop) == (0, self.n_bytes)
        if found < stop or (whole and found != self.n_bytes):
            raise DamagedError(f"{self.relative} has {found} bytes, its record says {self.n_bytes}", hint=_HINT)

    def _error(self, error: OSError) -> HsstoreError:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EIO):
            return DamagedError(f"{self.relative} cannot be read: {error.strerror}", hint=_HINT)
        return from_os_error(error)


_HINT = "run `hsstore verify manifest STORE` where the service runs"


class Catalogue:
    """Every file that one opened store consists of, by its path relative to the store."""

    def __init__(self, store: Store) -> None:
        """Reads every record once. Raises `DamagedError` for one that is not what the manifest was made of."""
        self._store = store
        # As bytes, 10 kB a shard: an answer stays whole when the file breaks later.
        self._records = {shard: canonical(store.record(shard)) for shard in store.state.shards}
        self._derived: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def find(self, relative: str) -> Document | ShardFile:
        """The file of that name. Raises `NotFoundError` for a name that the records do not give."""
        found = self._chunk(relative) or self._document(relative)
        if found is None:
            raise NotFoundError(f"no file {relative[:200]!r} belongs to the store", hint=f"see {paths.MANIFEST_SUMS}")
        return found

    def _chunk(self, relative: str) -> ShardFile | None:
        match = _CHUNK.fullmatch(relative)
        if match is None:
            return None
        record = self._record(int(match["shard"]))
        spec = next((a for a in self._store.header.arrays if a.name == match["array"]), None)
        if record is None or spec is None or relative not in record.files:
            return None
        entry = record.files[relative]
        path = self._where(record, spec, relative)
        return ShardFile(path=path, relative=relative, n_bytes=entry.bytes, sha256=entry.sha256)

    def _where(self, record: ShardRecord, spec: ArraySpec, relative: str) -> Path:
        root = self._store.root
        staged = paths.staging(root, record.shard, record.attempt) / paths.staged_name(spec.name)
        # Committed, not published yet: its staged name is as good.
        return staged if not (root / relative).exists() and staged.exists() else root / relative

    def _record(self, shard: int) -> ShardRecord | None:
        data = self._records.get(shard)
        return None if data is None else decode(data, ShardRecord, paths.numbered(shard))

    def _document(self, relative: str) -> Document | None:
        store = self._store
        directory, _, name = relative.rpartition("/")
        number, kept = paths.number_of(name), paths.kept_id(name)
        if relative == paths.HEADER:
            return Document(data=canonical(store.header))
        if directory == paths.RECORDS and number is not None:
            return Document(data=self._records[number]) if number in self._records else None
        if directory == paths.MANIFESTS and kept is not None:
            return self._kept_manifest(kept)
        data = self._implied().get(relative)
        return Document(data=data) if data is not None else None

    def _kept_manifest(self, manifest_id: str) -> Document | None:
        try:
            data = read_plain(paths.kept_manifest(self._store.root, manifest_id))
        except NotFoundError:
            return None
        if sha256_hex(data) != manifest_id:
            raise DamagedError(f"{paths.MANIFESTS}/{manifest_id}.json does not have the SHA-256 it is named by")
        return Document(data=data)

    def _implied(self) -> dict[str, bytes]:
        """Layouts, tombstones, zarr.json and everything derived, all of the state that was opened."""
        with self._lock:
            if not self._derived:
                root, header = self._store.root, self._store.header
                layouts, stones = manifest.load_layouts(root, header), manifest.load_tombstones(root, header)
                records = [decode(data, ShardRecord, paths.numbered(n)) for n, data in self._records.items()]
                files = manifest.derived(header, layouts, records, stones)
                files |= {f"{paths.LAYOUTS}/{paths.numbered(n)}": canonical(x) for n, x in enumerate(layouts)}
                files |= {paths.tombstone(Path(), s.shard, s.number).as_posix(): canonical(s) for s in stones}
                files |= zarrmeta.documents(header, sum(len(x.shards) for x in layouts))
                self._derived = files
            return self._derived
