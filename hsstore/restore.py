"""The documents of a store that hash themselves, taken from a replica when they are damaged or gone here.

A document of a replica is taken only when it is whole, belongs to this store, and nothing here speaks against it: the
SHA-256 that manifest.sha256 lists, or else what is left here of the files it describes (`witness`). So the copy of a
store that went another way is never mixed in. Leaves what a missing document means to `repair`, shard files to
`rebuild`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from hsstore import durable, manifest, paths, plausible, zarrmeta
from hsstore.errors import DamagedError, HsstoreError, NotFoundError
from hsstore.reading import raise_if_ours
from hsstore.records import LayoutRecord, ShardRecord, StoreHeader, Tombstone, canonical
from hsstore.replicas import Replica, Replicas
from hsstore.witness import Witness

T = TypeVar("T", StoreHeader, LayoutRecord, ShardRecord, Tombstone)


class Restorer:
    """Documents of one store. `told(path, replica, why)` is called for each: restored from, or lost and why."""

    def __init__(
        self, root: Path, replicas: Replicas, told: Callable[[str, Replica | None, str], None], *, dry_run: bool
    ) -> None:
        self.root, self.replicas, self._told, self._dry_run = root, replicas, told, dry_run
        self.witness = Witness(root)
        self.restored: set[str] = set()
        self.lost: set[str] = set()

    def header(self) -> StoreHeader | None:
        """store.json, as it is or restored. None when it cannot be had; nothing else can be judged then."""
        wrong = ""
        try:
            header = manifest.load_header(self.root)
            if self.witness.speaks_for(header.uuid):
                return header
            wrong = f"{paths.HEADER} is of store {header.uuid}, everything else here of another"
        except DamagedError as error:
            wrong = self._bare(error)
        except NotFoundError:
            wrong = "does not exist"
        return self._take(paths.HEADER, StoreHeader, self._header_fits, wrong)

    def layouts(self, header: StoreHeader) -> dict[int, LayoutRecord]:
        """Every layout that can be had, by its number."""
        out = {}
        for number in sorted({0, *self.witness.layouts()}):
            path = f"{paths.LAYOUTS}/{paths.numbered(number)}"

            def load(number: int = number) -> LayoutRecord:
                return manifest.load_layout(self.root, header, number)

            def fits(found: LayoutRecord, path: str = path) -> str:
                wrong = self._owner(found.store_uuid, header) or plausible.layout_record(found)
                return wrong or self.witness.against_layout(path, found)

            expected = number == 0 or self.witness.is_here(path)
            layout = self._have(path, LayoutRecord, load, fits, expected=expected)
            if layout is not None:
                out[number] = layout
        return out

    def tombstones(self, header: StoreHeader) -> None:
        """Every tombstone: without one, a shard that must not be used would be."""
        for shard, number in sorted(self.witness.tombstones()):
            path = paths.tombstone(Path(), shard, number).as_posix()

            def load(shard: int = shard, number: int = number) -> Tombstone:
                return manifest.load_tombstone(self.root, header, shard, number)

            def fits(found: Tombstone, shard: int = shard, number: int = number) -> str:
                if (found.shard, found.number) != (shard, number):
                    return "is another tombstone"
                return self._owner(found.store_uuid, header)

            self._have(path, Tombstone, load, fits, expected=True)

    def records(self, header: StoreHeader, layouts: dict[int, LayoutRecord], dead: set[int]) -> None:
        """The record of every shard that was committed here, without quarantined ones."""
        planned = {n: plan for x in layouts.values() for n, plan in zip(x.numbers, x.shards, strict=True)}
        for shard in sorted(self.witness.records(header, set(planned)) - dead):
            path = f"{paths.RECORDS}/{paths.numbered(shard)}"

            def load(shard: int = shard) -> ShardRecord:
                return manifest.load_record(self.root, header, shard)

            def fits(found: ShardRecord, shard: int = shard) -> str:
                wrong = self._owner(found.store_uuid, header)
                if wrong or found.shard != shard:
                    return wrong or "is the record of another shard"
                if set(found.files) != {zarrmeta.chunk_path(spec, shard) for spec in header.arrays}:
                    return "names other files than the store's arrays have"
                plan = planned.get(shard)
                if plan is not None and (plan.n_samples, plan.n_rows) != (len(found.samples), found.n_rows):
                    return "has other rows than its layout says"
                return plausible.record(found, header) or self.witness.against_record(header, found)

            expected = self.witness.is_here(path) or shard in self.witness.manifest_shards
            self._have(path, ShardRecord, load, fits, expected=expected)

    def _have(
        self, path: str, type_: type[T], load: Callable[[], T], fits: Callable[[T], str], *, expected: bool
    ) -> T | None:
        try:
            return load()
        except DamagedError as error:
            wrong = self._bare(error)
        except NotFoundError:
            wrong = "does not exist"
        except OSError as error:
            if isinstance(error, HsstoreError):
                raise
            raise_if_ours(error)
            wrong = f"cannot be read: {error.strerror}"
        return self._take(path, type_, fits, wrong, expected=expected)

    def _take(
        self, path: str, type_: type[T], fits: Callable[[T], str], wrong: str, *, expected: bool = True
    ) -> T | None:
        """The document from the first replica whose one fits."""
        for replica, found in self.replicas.documents(path, type_):
            against = fits(found)
            if against:
                wrong += f"; that of {replica} {against}"
                continue
            obstacle = "" if self._dry_run else self._write(path, canonical(found))
            if obstacle:
                wrong += f"; {obstacle}"
                break
            self.restored.add(path)
            if self._dry_run and type_ in (StoreHeader, ShardRecord):
                wrong += "; what it describes is looked at once it is back"
            self._told(path, replica, wrong)
            return found
        if expected:
            self.lost.add(path)
            self._told(path, None, wrong)
        return None

    def _write(self, path: str, data: bytes) -> str:
        """Put a document in its place. Returns what is in the way, "" when nothing is."""
        final = self.root / path
        try:
            durable.make_dirs(final.parent)
            if final.exists() or final.is_symlink():
                durable.replace(final, data)
            else:
                durable.write_new(final, data)  # False: another one has just put it there
        except (IsADirectoryError, NotADirectoryError, FileExistsError) as error:
            return f"{error.filename2 or error.filename} is in the way: {error.strerror}"
        return ""

    def _header_fits(self, found: StoreHeader) -> str:
        return plausible.header(found) or self.witness.against_header(found)

    @staticmethod
    def _owner(uuid: str, header: StoreHeader) -> str:
        return "" if uuid == header.uuid else f"belongs to store {uuid}, this one is {header.uuid}"

    def _bare(self, error: HsstoreError) -> str:
        return error.message.removeprefix(f"{self.root}/")
