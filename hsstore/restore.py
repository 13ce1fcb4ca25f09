"""The documents of a store that hash themselves, taken from a replica when they are damaged or gone here.

A document of a replica is taken only when it is whole, belongs to this store, and nothing here speaks against it: the
SHA-256 that manifest.sha256 lists, or else what is left here of the files it describes (`witness`). So the copy of a
store that went another way is never mixed in. One that is whole here is in doubt all the same when it makes no sense
or manifest.sha256 lists another: nothing may be derived from it. Leaves what a missing document means to `repair`,
shard files to `rebuild`.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from hsstore import durable, manifest, paths, plausible, zarrmeta
from hsstore.errors import DamagedError, HsstoreError, NotFoundError
from hsstore.reading import raise_if_ours
from hsstore.rebuild import in_the_way
from hsstore.records import LayoutRecord, ShardRecord, StoreHeader, Tombstone, canonical, load_sealed, sha256_hex
from hsstore.replicas import Replica, Replicas
from hsstore.witness import Witness

T = TypeVar("T", StoreHeader, LayoutRecord, ShardRecord, Tombstone)


class Restorer:
    """Documents of one store. `told(path, replica, why)` is called for each: restored from, or lost and why.

    `left(path, why)` of each that no replica can mend: something is in the way, or nothing ever committed it.
    """

    def __init__(
        self,
        root: Path,
        replicas: Replicas,
        told: Callable[[str, Replica | None, str], None],
        left: Callable[[str, str], None],
        *,
        dry_run: bool,
    ) -> None:
        self.root, self.replicas, self._told, self._left, self._dry_run = root, replicas, told, left, dry_run
        self.witness = Witness(root)
        self.restored: set[str] = set()
        self.lost: set[str] = set()
        """Damaged or in doubt, and not restored: what is derived from them must stay as it is."""
        self.doubted: set[str] = set()
        """Whole here and not to be believed, whether restored or not."""

    def header(self) -> StoreHeader | None:
        """store.json, as it is or restored. None when it cannot be had; nothing else can be judged then."""
        wrong = named = ""
        try:
            header = manifest.load_header(self.root)
            wrong = plausible.header(header)
            if not wrong and not self.witness.speaks_for(header.uuid):
                wrong = f"{paths.HEADER} is of store {header.uuid}, everything else here of another"
            against, named = self._disowned(paths.HEADER, header)
            wrong = wrong or against
            if not wrong:
                return header
            self.doubted.add(paths.HEADER)
        except DamagedError as error:
            wrong = self._bare(error)
        except NotFoundError:
            wrong = "does not exist"
        return self._take(paths.HEADER, StoreHeader, self._header_fits, wrong, named=named)

    def layouts(self, header: StoreHeader) -> dict[int, LayoutRecord]:
        """Every layout that can be had, by its number."""
        out: dict[int, LayoutRecord] = {}
        first: int | None = 0  # shard of the next layout, while that is known
        numbers = sorted({0, *self.witness.layouts()})
        for number in numbers:
            path = f"{paths.LAYOUTS}/{paths.numbered(number)}"

            def load(number: int = number) -> LayoutRecord:
                return manifest.load_layout(self.root, header, number)

            def sound(found: LayoutRecord, first: int | None = first) -> str:
                wrong = plausible.layout_record(found)
                if not wrong and first is not None and found.first_shard != first:
                    wrong = f"begins with shard {found.first_shard}, expected {first}"
                return wrong

            def fits(found: LayoutRecord, path: str = path, sound: Callable[[LayoutRecord], str] = sound) -> str:
                wrong = self._owner(found.store_uuid, header) or sound(found)
                return wrong or self.witness.against_layout(path, found)

            expected = number == 0 or self.witness.is_here(path)
            stray = number > 0 and number == numbers[-1] and first is not None and self._is_stray(header, path, first)
            layout = self._have(path, LayoutRecord, load, fits, sound, expected=expected, stray=stray)
            first = layout.numbers.stop if layout is not None else None
            if layout is not None:
                out[number] = layout
        return out

    def _is_stray(self, header: StoreHeader, path: str, first: int) -> bool:
        """Whether a last layout, which would begin with that shard, is whole and nothing here rests on it."""
        try:
            load_sealed(self.root / path, LayoutRecord)
        except HsstoreError:
            return False
        committed = self.witness.records(header, set())
        return path not in self.witness.sums and all(shard < first for shard in committed)

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

            self._have(path, Tombstone, load, fits, lambda found: "", expected=True)

    def records(self, header: StoreHeader, layouts: dict[int, LayoutRecord], dead: set[int]) -> None:
        """The record of every shard that was committed here, without quarantined ones."""
        planned = {n: plan for x in layouts.values() for n, plan in zip(x.numbers, x.shards, strict=True)}
        all_planned = bool(planned) and not any(p.startswith(f"{paths.LAYOUTS}/") for p in self.lost)
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
                return sound(found) or self.witness.against_record(header, found)

            def sound(found: ShardRecord, shard: int = shard) -> str:
                plan = planned.get(shard)
                if plan is None and all_planned:
                    return "is of a shard that no layout has"
                if plan is not None and (plan.n_samples, plan.n_rows) != (len(found.samples), found.n_rows):
                    return "has other rows than its layout says"
                return plausible.record(found, header)

            expected = self.witness.is_here(path) or shard in self.witness.manifest_shards
            stray = all_planned and shard not in planned and not self.witness.accounts_for(header, shard)
            self._have(path, ShardRecord, load, fits, sound, expected=expected, stray=stray)

    def _have(
        self,
        path: str,
        type_: type[T],
        load: Callable[[], T],
        fits: Callable[[T], str],
        sound: Callable[[T], str],
        *,
        expected: bool,
        stray: bool = False,
    ) -> T | None:
        """The document here, or else a replica's. `sound` is what is asked of either, `fits` of a replica's."""
        named = ""
        try:
            ours = load()
            against, named = self._disowned(path, ours)
            wrong = sound(ours) or against
            if not wrong:
                return ours
            self.doubted.add(path)
        except DamagedError as error:
            wrong = self._bare(error)
        except NotFoundError:
            wrong = "does not exist"
        except OSError as error:
            if isinstance(error, HsstoreError):
                raise
            raise_if_ours(error)
            wrong = f"cannot be read: {error.strerror}"
        return self._take(path, type_, fits, wrong, named=named, expected=expected, stray=stray)

    def _disowned(self, path: str, ours: T) -> tuple[str, str]:
        """Why manifest.sha256 is against a document that is here, and the SHA-256 that it names instead."""
        against = self.witness.against_ours(path, sha256_hex(canonical(ours)))
        return against, self.witness.sums[path] if against else ""

    def _take(
        self,
        path: str,
        type_: type[T],
        fits: Callable[[T], str],
        wrong: str,
        *,
        named: str = "",
        expected: bool = True,
        stray: bool = False,
    ) -> T | None:
        """The document from the first replica whose one fits, and has the SHA-256 `named` where that is given."""
        for replica, found in self.replicas.documents(path, type_):
            against = fits(found)
            if named and sha256_hex(canonical(found)) != named:
                against = against or f"is not the one that {paths.MANIFEST_SUMS} lists"
            if against:
                wrong += f"; that of {replica} {against}"
                continue
            obstacle = in_the_way(self.root, path) or ("" if self._dry_run else self._write(path, canonical(found)))
            if obstacle:
                self.lost.add(path)
                self._left(path, f"{wrong}; {replica} has it, but {obstacle}")
                return None
            self.restored.add(path)
            if self._dry_run and type_ in (StoreHeader, ShardRecord):
                wrong += "; what it describes is looked at once it is back"
            self._told(path, replica, wrong)
            return found
        if stray and self.witness.is_here(path):
            self.lost.add(path)
            command = f"rm {shlex.quote(str(self.root / path))}"
            self._left(path, f"{wrong}; a stray file: nothing commits it, it may be removed by hand: `{command}`")
        elif expected:
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
