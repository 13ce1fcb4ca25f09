"""Replicas: other places that hold the bytes of a store, and what can be had from them.

Responsible for who is a replica (the same store by its uuid, for a shard the same SHA-256 of the file), for trying the
next one when a block, a document or the place itself is broken, and for counting what was fetched. Every block is
checked against the store's own record before it is handed on. Leaves what is needed to `repair`.

Letters: C rows of a block.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from hsstore import paths, places
from hsstore.digest import crc32c
from hsstore.errors import (
    ConflictError,
    DamagedError,
    HsstoreError,
    NotFoundError,
    UnauthorizedError,
    UsageError,
    from_os_error,
)
from hsstore.findings import runs
from hsstore.places import Place
from hsstore.reading import raise_if_ours
from hsstore.records import LayoutRecord, ShardRecord
from hsstore.serviceplace import open_service
from hsstore.shardblocks import Wanted

FETCH_BYTES = 32 << 20  # of one request: neighbouring bad blocks are asked for together

_LOOKED_AT = 16  # documents of a replica whose header is damaged, before it counts as unknown

T = TypeVar("T")


def open_replica(
    spec: str, root: Path, *, uuid: str | None = None, token: str | None = None, patience_seconds: float = 120.0
) -> Place:
    """A directory, a bucket, a web server or an hsstore service, which is given up when it stays away for so long.

    Raises `UsageError` for the store itself, and what opening such a place raises.
    """
    if spec.lower().startswith(("http://", "https://")):
        service = open_service(spec, uuid=uuid, token=token, patience_seconds=patience_seconds)
        if service is not None:
            return service
    if places.is_url(spec) and not spec.lower().startswith("file://"):
        from hsstore.objectplace import Patience, open_object_place

        return open_object_place(spec, Patience(total_seconds=patience_seconds))
    place = places.open_place(spec)
    if place.local is not None and os.path.isdir(place.local) and os.path.samefile(place.local, root):
        raise UsageError(f"{spec} is the store that is repaired", hint="give another copy of it")
    return place


@dataclass(slots=True)
class Counts:
    """What came from replicas."""

    blocks_fetched: int = 0
    bytes_fetched: int = 0
    """Of shard files, whatever became of them."""
    replica_faults: int = 0
    """Blocks, documents and files that a replica had and that were damaged there."""


@dataclass(slots=True)
class Replica:
    """One of them."""

    place: Place
    refused: str = ""
    """Why it is asked no more."""
    away: bool = False
    """Whether it may have what is lost here: it did not answer, or not to the end."""
    _sums: dict[int, dict[str, str]] = field(default_factory=dict)
    """SHA-256 by file of each shard that was asked for, as its own record says."""

    def __str__(self) -> str:
        return str(self.place)

    def identify(self, uuid: str) -> None:
        """Raises `ConflictError` when it is another store, `NotFoundError` when no store lies there."""
        found = self.uuid()
        if found is not None and found != uuid:
            raise ConflictError(
                f"{self} is no replica: it is store {found}, this one is {uuid}",
                hint="give a copy of this store; a subset or a second extraction is another store",
            )

    def uuid(self) -> str | None:
        """Of the store there; None when none of its documents is whole enough to say."""
        try:
            return places.load_header(self.place).uuid
        except DamagedError:
            return self._uuid_of_others()
        except NotFoundError:
            found = self._uuid_of_others()
            if found is None:
                raise
            return found

    def _uuid_of_others(self) -> str | None:
        for directory, type_ in ((paths.LAYOUTS, LayoutRecord), (paths.RECORDS, ShardRecord)):
            for name in self.place.names(directory)[:_LOOKED_AT]:
                try:
                    return self._owner(f"{directory}/{name}", type_)
                except (DamagedError, NotFoundError):
                    continue
        return None

    def _owner(self, path: str, type_: type[LayoutRecord] | type[ShardRecord]) -> str:
        document: LayoutRecord | ShardRecord = places.load_sealed(self.place, path, type_)
        return document.store_uuid

    def differs(self, wanted: Wanted) -> str:
        """Why its file of that name is another one than ours; "" when it is the same or its record cannot say."""
        shard = wanted.record.shard
        if shard not in self._sums:
            self._sums[shard] = self._recorded(shard)
        if self._sums[shard].get(wanted.relative, wanted.sha256) == wanted.sha256:
            return ""
        return f"{self} has other content in shard {shard}: its record names other SHA-256s"

    def _recorded(self, shard: int) -> dict[str, str]:
        try:
            theirs = places.load_sealed(self.place, f"{paths.RECORDS}/{paths.numbered(shard)}", ShardRecord)
        except (DamagedError, NotFoundError):
            return {}  # every block is checked against our record anyway
        return {name: entry.sha256 for name, entry in theirs.files.items()}


class Replicas:
    """All of them, in the order they were given."""

    def __init__(self, found: Iterable[Place], refused: Callable[[str, str], None]) -> None:
        """`refused(replica, why)` is called when one is asked no more, for good or for a shard."""
        self.all = [Replica(place) for place in found]
        self.counts = Counts()
        self._refused = refused
        self._told: Counter[str] = Counter()

    def usable(self) -> list[Replica]:
        return [replica for replica in self.all if not replica.refused]

    def identify(self, uuid: str) -> None:
        """Refuse those that are another store. Raises the first refusal when none is left."""
        first: HsstoreError | None = None
        for replica in self.usable():
            try:
                replica.identify(uuid)
            except (HsstoreError, OSError) as error:
                if isinstance(error, OSError):
                    raise_if_ours(error)
                ours = error if isinstance(error, HsstoreError) else from_os_error(error)
                first = first or ours
                self.refuse(replica, ours.message, away=not isinstance(ours, ConflictError))
        if first is not None and not self.usable():
            raise first

    @property
    def all_answered(self) -> bool:
        """Whether what none of them gave is known to be with none of them."""
        return not any(replica.away for replica in self.all)

    def refuse(self, replica: Replica, why: str, *, away: bool) -> None:
        replica.refused, replica.away = why, away
        self._tell(replica, why)

    def _tell(self, replica: Replica, why: str) -> None:
        self._told[why] += 1
        if self._told[why] == 1:
            self._refused(str(replica), why)

    def documents(self, path: str, type_: type[T]) -> Iterator[tuple[Replica, T]]:
        """That document from each replica that has it whole."""
        for replica in self.usable():
            document = self._asked(replica, lambda it: places.load_sealed(it.place, path, type_))
            if document is not None:
                yield replica, document

    def contents(self, path: str) -> Iterator[tuple[Replica, bytes]]:
        """That small file from each replica that has it."""
        for replica in self.usable():
            data = self._asked(replica, lambda it: it.place.read(path))
            if data is not None:
                yield replica, data

    def of(self, wanted: Wanted) -> list[Replica]:
        """Those whose shard has the content of ours."""
        out = []
        for replica in self.usable():
            why = self._asked(replica, lambda it: it.differs(wanted))
            if why:
                self._tell(replica, why)
            elif why is not None:
                out.append(replica)
        return out

    def offers(self, wanted: Wanted) -> list[Replica]:
        """Those that have a file of that name: what a dry run can know."""
        return [r for r in self.of(wanted) if self._asked(r, lambda it: it.place.size(wanted.relative))]

    def fetch(
        self, wanted: Wanted, blocks: Sequence[int], replicas: Iterable[Replica] | None = None
    ) -> Iterator[tuple[int, memoryview, Replica]]:
        """(block, bytes, from where) of each of these blocks that some replica has whole."""
        left = list(blocks)
        for replica in self.of(wanted) if replicas is None else replicas:
            missing: list[int] = []
            for first, last in _requests(left, wanted.block_bytes):
                for block, piece in enumerate(self._pieces(replica, wanted, first, last), start=first):
                    if len(piece) == wanted.block_bytes and crc32c(piece) == wanted.crcs[block]:
                        self.counts.blocks_fetched += 1
                        yield block, piece, replica
                    else:
                        self.counts.replica_faults += bool(piece)
                        missing.append(block)
            left = missing
            if not left:
                return

    def _pieces(self, replica: Replica, wanted: Wanted, first: int, last: int) -> list[memoryview]:
        """The bytes of each of these blocks at a replica; none of one that it cannot give."""
        size, n_blocks = wanted.block_bytes, last - first + 1
        if replica.refused:
            return [memoryview(b"")] * n_blocks
        data = self._asked(replica, lambda it: it.place.read_range(wanted.relative, first * size, n_blocks * size))
        if data is None and n_blocks > 1:
            # What a medium or a service cannot give as one piece it may give in parts.
            return [self._pieces(replica, wanted, block, block)[0] for block in range(first, last + 1)]
        view = memoryview(data or b"")
        self.counts.bytes_fetched += len(view)
        return [view[i * size : (i + 1) * size] for i in range(n_blocks)]

    def _asked(self, replica: Replica, call: Callable[[Replica], T]) -> T | None:
        """What a replica answers; None when it does not have it whole. One that stays away is asked no more."""
        try:
            return call(replica)
        except NotFoundError:
            return None
        except DamagedError:
            self.counts.replica_faults += 1
            return None
        except UnauthorizedError:
            replica.away = True  # a bucket that may not be listed says so of a file that is not there
            return None
        except HsstoreError as error:
            self.refuse(replica, f"{replica} cannot be used any more: {error.message}", away=True)
        except OSError as error:
            raise_if_ours(error)
            self.refuse(replica, f"{replica} cannot be used any more: {from_os_error(error).message}", away=True)
        return None


def _requests(blocks: Sequence[int], block_bytes: int) -> Iterator[tuple[int, int]]:
    """(first, last) of neighbouring blocks that are asked for at once."""
    at_once = max(1, FETCH_BYTES // block_bytes)
    for first, last in runs(blocks):
        for start in range(first, last + 1, at_once):
            yield start, min(last, start + at_once - 1)
