"""What a store holds, read from its records: the header, the layouts, the records, the manifest compiled from them.

The records are the truth; manifest.json, manifest.sha256 and index/ are derived and rebuilt at will. The manifest holds
contents only, so equal contents have one manifest_id wherever they lie. Leaves damage reports to `verify`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from hsstore import durable, index, paths, zarrmeta
from hsstore.errors import DamagedError, NotFoundError, UsageError
from hsstore.records import (
    FORMAT,
    LayoutRecord,
    Manifest,
    ManifestShard,
    SampleEntry,
    ShardRecord,
    StoreHeader,
    Tombstone,
    canonical,
    decode,
    load_sealed,
    read_plain,
    sha256_hex,
)


def load_header(root: Path) -> StoreHeader:
    """store.json. Raises `NotFoundError` when the directory is no store."""
    if not root.is_dir():
        if url := paths.url_of(root):
            if url.startswith("file:"):
                raise UsageError(f"{url} is a URL, expected a path", hint="leave file:// out")
            raise UsageError(f"{url} is no directory", hint=f"copy it first: `hsstore copy {url} DIRECTORY`")
        raise NotFoundError(f"{root} does not exist or is no directory", hint="make a store with `hsstore extract`")
    if not (root / paths.HEADER).is_file():
        hint = "make one with `hsstore extract`"
        if (root / paths.RECORDS).is_dir():
            hint = f"it was one: bring {paths.HEADER} back with `hsstore repair {root} --from REPLICA`"
        raise NotFoundError(f"{root} is not a store: it has no {paths.HEADER}", hint=hint)
    return load_sealed(root / paths.HEADER, StoreHeader)


def load_layouts(root: Path, header: StoreHeader) -> list[LayoutRecord]:
    """Every layout, in order. Raises `DamagedError` for one of another store, a gap between them, or none at all."""
    layouts: list[LayoutRecord] = []
    for number in _numbers(root, paths.LAYOUTS) or [0]:
        layout = load_layout(root, header, number)
        expected = layouts[-1].numbers.stop if layouts else 0
        if layout.first_shard != expected:
            raise DamagedError(
                f"{paths.layout(root, number)} begins with shard {layout.first_shard}, expected {expected}: a layout"
                " is missing",
                hint=verify_hint(root),
            )
        layouts.append(layout)
    return layouts


def load_layout(root: Path, header: StoreHeader, number: int) -> LayoutRecord:
    """layouts/N.json, checked: its own hash, its store."""
    path = paths.layout(root, number)
    record = load_sealed(path, LayoutRecord)
    _check_owner(path, record.store_uuid, header)
    return record


def load_record(root: Path, header: StoreHeader, shard: int) -> ShardRecord:
    """records/N.json, checked: its own hash, its store, its number."""
    path = paths.record(root, shard)
    record = load_sealed(path, ShardRecord)
    _check_owner(path, record.store_uuid, header)
    if record.shard != shard:
        hint = f"bring its own back with `hsstore repair {root} --from REPLICA`; if no layout has it, remove the file"
        raise DamagedError(f"{path} is the record of shard {record.shard}", hint=hint)
    expected = {zarrmeta.chunk_path(spec, shard) for spec in header.arrays}
    if set(record.files) != expected:
        raise DamagedError(f"{path} names other files than the store's arrays have", hint=verify_hint(root))
    return record


def load_records(root: Path, header: StoreHeader) -> list[ShardRecord]:
    """Every committed shard that is not quarantined, ascending."""
    dead = quarantined(load_tombstones(root, header))
    return [load_record(root, header, shard) for shard in _numbers(root, paths.RECORDS) if shard not in dead]


class _Named(msgspec.Struct):
    shard: int


class _Names(msgspec.Struct):
    """What a manifest names; all else is skipped while decoding."""

    shards: list[_Named]


def lost_records(root: Path, header: StoreHeader) -> list[int]:
    """Shards that have no record though the manifest on disk names them and they are not quarantined.

    A record is never removed, so theirs were lost. A manifest that is damaged or another store's says nothing.
    """
    try:
        body, lines = read_plain(root / paths.MANIFEST), read_plain(root / paths.MANIFEST_SUMS).splitlines()
        ours = {paths.MANIFEST: sha256_hex(body), paths.HEADER: sha256_hex(canonical(header))}
        if not {f"{sha}  {name}".encode() for name, sha in ours.items()} <= set(lines):
            return []
        named = {s.shard for s in decode(body, _Names, root / paths.MANIFEST).shards}
    except (NotFoundError, DamagedError):
        return []
    directory = root / paths.RECORDS  # looked at after the manifest: what that names is committed by then
    there = set(paths.numbers_in(directory)) if directory.is_dir() else set()
    return sorted(named - there - set(quarantined(load_tombstones(root, header))))


def refuse_lost(root: Path, header: StoreHeader) -> None:
    """Raise `DamagedError` when a record was lost: what it committed must not silently be missing."""
    if lost := lost_records(root, header):
        more = f" and of {len(lost) - 1} more shards" if len(lost) > 1 else ""
        raise DamagedError(
            f"{paths.record(root, lost[0])} is missing{more}: {paths.MANIFEST} names what it committed",
            hint=f"run `hsstore repair {root} --from REPLICA`, or give it up with"
            f" `hsstore quarantine {root} --shard {lost[0]} --reason …`",
        )


def load_tombstones(root: Path, header: StoreHeader) -> list[Tombstone]:
    """Every tombstone, by shard and number.

    Raises `DamagedError` for one that cannot be read: whether its shard may be used is then not known.
    """
    directory = root / paths.TOMBSTONES
    if not directory.is_dir():
        return []
    names = (paths.tombstone_of(p.name) for p in directory.iterdir())
    return [load_tombstone(root, header, shard, number) for shard, number in sorted(filter(None, names))]


def load_tombstone(root: Path, header: StoreHeader, shard: int, number: int) -> Tombstone:
    """tombstones/N.n.json, checked: its own hash, its store, its name."""
    path = paths.tombstone(root, shard, number)
    stone = load_sealed(path, Tombstone)
    _check_owner(path, stone.store_uuid, header)
    if (stone.shard, stone.number) != (shard, number):
        raise DamagedError(f"{path} is tombstone {stone.number} of shard {stone.shard}", hint=verify_hint(root))
    return stone


def quarantined(tombstones: Iterable[Tombstone]) -> dict[int, Tombstone]:
    """The shards that must not be used, each with the tombstone that says why."""
    latest = {stone.shard: stone for stone in sorted(tombstones, key=lambda s: (s.shard, s.number))}
    return {shard: stone for shard, stone in latest.items() if stone.action == "quarantine"}


def _numbers(root: Path, directory: str) -> list[int]:
    try:
        return paths.numbers_in(root / directory)
    except FileNotFoundError:
        raise DamagedError(f"{root / directory} is missing", hint=verify_hint(root)) from None


def _check_owner(path: Path, uuid: str, header: StoreHeader) -> None:
    if uuid != header.uuid:
        raise DamagedError(f"{path} belongs to store {uuid}, this one is {header.uuid}", hint="restore the right file")


def verify_hint(root: Path) -> str:
    """What tells more about damage."""
    return f"run `hsstore verify manifest {root}`"


def compile_manifest(header: StoreHeader, records: list[ShardRecord]) -> Manifest:
    """The manifest of a header and its records, in shard order."""
    shards = tuple(
        ManifestShard(
            shard=r.shard,
            n_rows=r.n_rows,
            samples=r.samples,
            files={name: (entry.bytes, entry.sha256) for name, entry in r.files.items()},
        )
        for r in sorted(records, key=lambda r: r.shard)
    )
    samples = _each_once(shards)
    return Manifest(
        format=FORMAT,
        capture=header.capture,
        shard_rows=header.shard_rows,
        chunk_rows=header.chunk_rows,
        arrays=header.arrays,
        split=header.split,
        shards=shards,
        n_samples=sum(s.ok for s in samples),
        n_failed=sum(not s.ok for s in samples),
        n_tokens=sum(s.n_tokens for s in samples if s.ok),
        n_bytes=sum(size for shard in shards for size, _ in shard.files.values()),
    )


def _each_once(shards: Sequence[ManifestShard]) -> list[SampleEntry]:
    """The samples of all shards; of one that was redone the copy that has states, as the index has it."""
    samples = [s for shard in shards for s in shard.samples]
    best: dict[int, SampleEntry] = {}
    for s in samples:
        if s.source_index not in best or (s.ok and not best[s.source_index].ok):
            best[s.source_index] = s
    return list(best.values()) if len(best) < len(samples) else samples


def load(root: Path) -> Manifest:
    """Compile the manifest of a store from its records."""
    header = load_header(root)
    return compile_manifest(header, load_records(root, header))


def manifest_id(manifest: Manifest) -> str:
    """SHA-256 of the canonical manifest, as hex: the name of that state of the store."""
    return sha256_hex(canonical(manifest))


def write(root: Path) -> str:
    """Rebuild manifest.json, manifest.sha256 and index/, and keep the manifest under its id. Returns the manifest_id.

    manifest.json is prepared first and takes its place last: while it is current everything else is, and a build that
    was killed shows by the temporary file it leaves (`build_was_interrupted`). What other writers committed meanwhile
    is taken up, so that of several that finish at once the last one to end leaves what is current.
    """
    while True:
        before = _listing(root)
        header = load_header(root)
        refuse_lost(root, header)
        layouts, tombstones = load_layouts(root, header), load_tombstones(root, header)
        files = derived(header, layouts, load_records(root, header), tombstones)
        settle(root)
        _write_derived(root, files)
        if _listing(root) == before:
            return sha256_hex(files[paths.MANIFEST])


def settle(root: Path) -> None:
    """Make durable what was seen: whoever linked it may have died before its fsync, and a power cut would take it back.

    Goes before everything that rests on a record, layout or tombstone of another process.
    """
    for name in (paths.LAYOUTS, paths.RECORDS, paths.TOMBSTONES):
        if (root / name).is_dir():
            durable.fsync_dir(root / name)


def _listing(root: Path) -> list[set[str]]:
    """Names of everything that a manifest is made from."""
    directories = (root / name for name in (paths.LAYOUTS, paths.RECORDS, paths.TOMBSTONES))
    return [{p.name for p in d.iterdir() if p.suffix == ".json"} if d.is_dir() else set() for d in directories]


def _write_derived(root: Path, files: dict[str, bytes]) -> None:
    kept = paths.kept_manifest(root, sha256_hex(files[paths.MANIFEST]))
    durable.make_dirs(root / paths.INDEX, root)
    durable.make_dirs(kept.parent, root)
    expected = {**files, kept.relative_to(root).as_posix(): files[paths.MANIFEST]}
    changed = [p for p, data in expected.items() if not (root / p).is_file() or (root / p).read_bytes() != data]
    if not changed:
        return
    body = durable.prepare(root / paths.MANIFEST, files[paths.MANIFEST])
    durable.fsync_dir(root)  # its name says that a build is at work: it must be safe before anything is exchanged
    for relative in changed:
        if relative != paths.MANIFEST:
            durable.replace(root / relative, expected[relative])
    try:
        os.rename(body, root / paths.MANIFEST)  # where that fails it stays: it is what says that the build did not end
    except FileNotFoundError:  # garbage to somebody, while this process was stopped for long
        durable.replace(root / paths.MANIFEST, files[paths.MANIFEST])
    durable.fsync_dir(root)


def build_was_interrupted(root: Path) -> bool:
    """Whether a prepared manifest.json never took its place: a build was killed, or is at work."""
    return any(p.name.startswith(f".{paths.MANIFEST}.") and durable.is_temporary(p.name) for p in root.iterdir())


def derived(
    header: StoreHeader,
    layouts: Sequence[LayoutRecord],
    records: list[ShardRecord],
    tombstones: Iterable[Tombstone] = (),
) -> dict[str, bytes]:
    """Every derived file of a store by its path: the index, manifest.json, then manifest.sha256 (`sha256sum -c` input).

    `records` are those of the shards that may be used. manifest.sha256 lists what the files should be: it is computed
    from the records and reads no file; of a quarantined shard it lists the tombstones only.
    """
    manifest = compile_manifest(header, records)
    files = {f"{paths.INDEX}/{name}": data for name, data in index.encode(index.build(manifest)).items()}
    files[paths.MANIFEST] = canonical(manifest)
    sums = {path: sha for shard in manifest.shards for path, (_, sha) in shard.files.items()}
    immutable = {paths.HEADER: canonical(header)}
    immutable |= {f"{paths.LAYOUTS}/{paths.numbered(n)}": canonical(x) for n, x in enumerate(layouts)}
    immutable |= {f"{paths.RECORDS}/{paths.numbered(r.shard)}": canonical(r) for r in records}
    immutable |= {paths.tombstone(Path(), s.shard, s.number).as_posix(): canonical(s) for s in tombstones}
    immutable |= zarrmeta.documents(header, sum(len(x.shards) for x in layouts))
    sums |= {path: sha256_hex(data) for path, data in (files | immutable).items()}
    files[paths.MANIFEST_SUMS] = "".join(f"{sha}  {path}\n" for path, sha in sorted(sums.items())).encode()
    return files
