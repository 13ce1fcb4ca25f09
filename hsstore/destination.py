"""What makes a place the same store as the source, besides its shards: header, layouts, tombstones, Zarr metadata, and
at last what is derived.

Responsible for looking at what lies at either end, for refusing a destination that holds anything else, and for a
destination that is a store from its first instant. Leaves shards to `landing`, the order of a copy to `copying`.
"""

from __future__ import annotations

import secrets
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from hsstore import durable, manifest, paths, places, zarrmeta
from hsstore.errors import ConflictError, DamagedError, FormatError, HsstoreError
from hsstore.places import LocalPlace, Place
from hsstore.publishing import roll_forward
from hsstore.records import LayoutRecord, ShardRecord, StoreHeader, Tombstone, canonical, sha256_hex


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What a place held when it was looked at."""

    header: StoreHeader
    layouts: list[LayoutRecord]
    tombstones: list[Tombstone]
    records: dict[int, ShardRecord]
    """Of every committed shard that is not quarantined and whose record and tombstones can be read."""
    damaged: dict[int, str]
    """Shards whose record or tombstone is missing or cannot be read, and why."""

    @property
    def quarantined(self) -> dict[int, Tombstone]:
        return manifest.quarantined(self.tombstones)

    def manifest_id(self) -> str:
        return manifest.manifest_id(manifest.compile_manifest(self.header, list(self.records.values())))


def state_of(place: Place) -> State:
    """Raises `NotFoundError` where no store lies, `DamagedError` for a damaged header, layout or tombstone."""
    state, unreadable = _look(place)
    for error in unreadable.values():
        raise error
    return state


def source_state_of(place: Place) -> State:
    """The same of what is to be copied: whatever costs a shard is damage of that shard, also a record that is gone
    though the manifest names it, and a tombstone that cannot be read, which leaves open whether the shard may be used.
    """
    state, unreadable = _look(place)
    known = {*state.records, *state.damaged, *state.quarantined}
    named = places.named_shards(place, state.header) - known
    gone = places.load_records(place, state.header, {n for n in named if n < state.layouts[-1].numbers.stop})
    # One that can be read after all was committed since the records were listed: the next run copies it.
    lost = {n: f"{r.message}, its manifest names it" for n, r in gone.items() if isinstance(r, HsstoreError)}
    damaged = state.damaged | lost | {n: error.message for n, error in unreadable.items()}
    records = {n: r for n, r in state.records.items() if n not in damaged}
    return replace(state, records=records, damaged=dict(sorted(damaged.items())))


def _look(place: Place) -> tuple[State, dict[int, HsstoreError]]:
    """What lies there, and the shards with a tombstone that cannot be read."""
    header = places.load_header(place)
    # Records are listed before the layouts are: growth writes the layout first, so none is listed without its own.
    listed = places.record_numbers(place)
    layouts, stones = places.load_layouts(place, header), places.look_at_tombstones(place, header)
    tombstones = [s for s in stones.values() if isinstance(s, Tombstone)]
    found = places.load_records(place, header, set(listed) - set(manifest.quarantined(tombstones)))
    state = State(
        header=header,
        layouts=layouts,
        tombstones=tombstones,
        records={n: r for n, r in found.items() if isinstance(r, ShardRecord)},
        damaged={n: r.message for n, r in found.items() if isinstance(r, HsstoreError)},
    )
    return state, {shard: e for (shard, _), e in stones.items() if isinstance(e, HsstoreError)}


def begin(place: Place, source: State) -> State:
    """Make the destination a store, unless it is one. Returns what lies there then.

    Raises `ConflictError` for what is no store, `DamagedError` or `FormatError` for one that cannot be used.
    """
    if not place.exists(paths.HEADER):
        if place.is_empty() or (isinstance(place, LocalPlace) and _begun_in_place(place.root, source)):
            create(place, source)
        elif not place.exists(paths.HEADER):  # it may have come meanwhile, by another copy
            raise ConflictError(
                f"{place} is not empty and not a store", hint="give a destination that is empty or does not exist"
            )
    elif place.local is None and place.read(paths.HEADER) == canonical(source.header):
        create(place, source)  # an earlier copy, or another one just now, may not have come to the layouts yet
    try:
        return state_of(place)
    except (DamagedError, FormatError) as error:
        raise type(error)(f"the destination cannot be used: {error.message}", hint=error.hint) from None


def _begun_in_place(root: Path, source: State) -> bool:
    """Whether nothing lies there but files that a copy of this source begins with."""
    expected = _first_files(source)

    def is_ours(path: Path) -> bool:
        try:
            if durable.is_temporary(path.name):
                return True
            return path.is_file() and path.read_bytes() == expected.get(path.relative_to(root).as_posix())
        except FileNotFoundError:
            return True  # gone since it was listed: it does not lie there

    return root.is_dir() and all(map(is_ours, durable.files_below(root)))


def refuse_other(place: Place, source: State, there: State) -> None:
    """Raises `ConflictError` unless the destination is the same store, as far as it goes."""
    hint = "copy to another destination"
    if canonical(there.header) != canonical(source.header):
        raise ConflictError(
            f"{place} is another store ({there.header.uuid}, {there.header.capture.model}),"
            f" the source is {source.header.uuid} ({source.header.capture.model})",
            hint=hint,
        )
    for number, (a, b) in enumerate(zip(source.layouts, there.layouts, strict=False)):
        if canonical(a) != canonical(b):
            raise ConflictError(f"{place} has grown in another way: its layout {number} differs", hint=hint)
    stones = {(s.shard, s.number): s for s in there.tombstones}
    for stone in source.tombstones:
        if canonical(stones.get((stone.shard, stone.number), stone)) != canonical(stone):
            raise ConflictError(f"{place} has another tombstone {stone.number} of shard {stone.shard}", hint=hint)
    other = [n for n in sorted(set(source.records) & set(there.records)) if not _equal(source, there, n)]
    if other:
        shown = ", ".join(map(str, other[:8])) + (" …" if len(other) > 8 else "")
        raise ConflictError(f"{place} has other contents in {len(other)} shards ({shown})", hint=hint)


def _equal(source: State, there: State, shard: int) -> bool:
    """Equal contents: the attempt that brought them does not matter."""
    a, b = source.records[shard], there.records[shard]
    return (a.n_rows, a.samples, a.files) == (b.n_rows, b.samples, b.files)


def _beginnings(source: State) -> dict[str, bytes]:
    """What a store has besides shards and what is derived, in the order in which it may appear."""
    files = {paths.HEADER: canonical(source.header)}
    files |= {f"{paths.LAYOUTS}/{paths.numbered(n)}": canonical(x) for n, x in enumerate(source.layouts)}
    files |= {paths.tombstone(Path(), s.shard, s.number).as_posix(): canonical(s) for s in source.tombstones}
    return files


def _first_files(source: State) -> dict[str, bytes]:
    return _beginnings(source) | zarrmeta.documents(source.header, source.layouts[-1].numbers.stop)


def create(place: Place, source: State) -> None:
    """An empty store with the source's header, layouts and tombstones.

    A directory that is made for it appears whole or not at all. One that is there, such as the root of a disk, is
    filled in place, store.json last.
    """
    if not isinstance(place, LocalPlace):
        add_beginnings(place, source)
    elif place.root.exists():
        _fill_directory(place, source)
    else:
        _create_directory(place.root.absolute(), source)


def _fill_directory(place: LocalPlace, source: State) -> None:
    files = _first_files(source)
    header = files.pop(paths.HEADER)
    for name in (paths.RECORDS, paths.STAGING):
        durable.make_dirs(place.root / name, place.root)
    for relative, data in files.items():
        _write_same(place, relative, data)
    fsync_tree(place.root, list(files))  # an earlier copy may have been killed before it came to that
    _write_same(place, paths.HEADER, header)


def _create_directory(root: Path, source: State) -> None:
    durable.make_dirs(root.parent)
    building = root.with_name(f".{root.name}.{secrets.token_hex(8)}.creating")
    try:
        for name in (paths.RECORDS, paths.STAGING):
            durable.make_dirs(building / name)
        for relative, data in _first_files(source).items():
            durable.make_dirs((building / relative).parent)
            durable.write_new(building / relative, data)
        durable.rename_new(building, root)  # whoever was first: the caller looks at what lies there now
        durable.fsync_dir(root.parent)
    finally:
        shutil.rmtree(building, ignore_errors=True)


def add_beginnings(place: Place, source: State) -> None:
    for relative, data in _beginnings(source).items():
        if not place.exists(relative):
            _write_same(place, relative, data)


def add_missing(place: Place, source: State, there: State) -> None:
    """Layouts and tombstones that the source has got since, and the Zarr metadata that follows from the layouts."""
    add_beginnings(place, source)
    n_layouts = max(len(source.layouts), len(there.layouts))
    layouts = max(source.layouts, there.layouts, key=len)
    while True:
        for relative, data in zarrmeta.documents(source.header, layouts[-1].numbers.stop).items():
            put_if_other(place, relative, data)
        if places.n_layouts(place) <= n_layouts:
            return
        layouts = places.load_layouts(place, source.header)  # it has grown meanwhile: ours may have replaced newer ones
        n_layouts = len(layouts)


def settle(root: Path, there: State) -> None:
    """Make durable the documents that lie there, before anything rests on them: a plain copy brought them, or a writer
    that was killed, and a power cut would take them back."""
    n_shards = there.layouts[-1].numbers.stop
    files = [*_beginnings(there), *zarrmeta.documents(there.header, n_shards)]
    files += [f"{paths.RECORDS}/{paths.numbered(n)}" for n in there.records]
    fsync_tree(root, [f for f in files if (root / f).is_file()])
    durable.fsync_dir(root.absolute().parent)


def settle_files(root: Path, there: State) -> dict[int, str]:
    """The same for the files of committed shards. Returns the shards of which one is missing or has another size."""
    bad = {}
    for shard, record in there.records.items():
        whole = _whole_files(root, record)
        if len(whole) < len(record.files):  # another copy has just committed it, and comes to publishing it
            roll_forward(root, there.header, [record])
            whole = _whole_files(root, record)
        fsync_tree(root, whole)
        if other := sorted(set(record.files) - set(whole)):
            bad[shard] = f"{other[0]} is missing or has another size at the destination"
    return bad


def _whole_files(root: Path, record: ShardRecord) -> list[str]:
    return [f for f, entry in record.files.items() if LocalPlace(root).size(f) == entry.bytes]


def fsync_tree(root: Path, files: list[str]) -> None:
    """Make files durable, with the names of every directory that leads to them."""
    directories = {root}
    for relative in files:
        durable.fsync_file(root / relative)
        directories |= {root / parent for parent in Path(relative).parents}
    for directory in sorted(directories, key=lambda d: -len(d.parts)):
        durable.fsync_dir(directory)


def _write_same(place: Place, path: str, data: bytes) -> None:
    if not place.write_new(path, data) and place.read(path) != data:
        raise ConflictError(f"{place} has another {path}", hint="copy to another destination")


def write_derived(place: Place) -> str:
    """Manifest, checksums and index of an object store, from what lies there; manifest.json last. Returns its id."""
    state = state_of(place)
    if state.damaged:
        shard, why = next(iter(state.damaged.items()))
        raise DamagedError(f"the destination's record of shard {shard} cannot be read: {why}")
    files = manifest.derived(state.header, state.layouts, list(state.records.values()), state.tombstones)
    body = files.pop(paths.MANIFEST)
    manifest_id = sha256_hex(body)
    for relative, data in files.items():
        put_if_other(place, relative, data)
    place.write_new(f"{paths.MANIFESTS}/{manifest_id}.json", body)
    put_if_other(place, paths.MANIFEST, body)
    return sha256_hex(place.read(paths.MANIFEST))


def put_if_other(place: Place, path: str, data: bytes) -> None:
    """Replace a file unless it has these bytes already."""
    if place.size(path) != len(data) or place.read(path) != data:
        place.put(path, lambda: [data], len(data))
