"""What a store holds, read from its records: the header, the layouts, the records, the manifest compiled from them.

The records are the truth; manifest.json, manifest.sha256 and index/ are derived and rebuilt at will. The manifest holds
contents only, so equal contents have one manifest_id wherever they lie. Leaves damage reports to `verify`.
"""

from __future__ import annotations

from pathlib import Path

from hsstore import durable, index, paths, zarrmeta
from hsstore.digest import sha256_file
from hsstore.errors import DamagedError, NotFoundError
from hsstore.records import (
    FORMAT,
    LayoutRecord,
    Manifest,
    ManifestShard,
    ShardRecord,
    StoreHeader,
    canonical,
    load_sealed,
    sha256_hex,
)


def load_header(root: Path) -> StoreHeader:
    """store.json. Raises `NotFoundError` when the directory is no store."""
    if not root.is_dir():
        raise NotFoundError(f"{root} does not exist or is no directory", hint="make a store with `hsstore extract`")
    if not (root / paths.HEADER).is_file():
        raise NotFoundError(f"{root} is not a store: it has no {paths.HEADER}", hint="make one with `hsstore extract`")
    return load_sealed(root / paths.HEADER, StoreHeader)


def load_layouts(root: Path, header: StoreHeader) -> list[LayoutRecord]:
    """Every layout, in order. Raises `DamagedError` for one of another store or none at all."""
    out = []
    for number in _numbers(root, paths.LAYOUTS):
        record = load_sealed(paths.layout(root, number), LayoutRecord)
        _check_owner(paths.layout(root, number), record.store_uuid, header)
        out.append(record)
    return out


def load_record(root: Path, header: StoreHeader, shard: int) -> ShardRecord:
    """records/N.json, checked: its own hash, its store, its number."""
    path = paths.record(root, shard)
    record = load_sealed(path, ShardRecord)
    _check_owner(path, record.store_uuid, header)
    if record.shard != shard:
        raise DamagedError(f"{path} is the record of shard {record.shard}", hint=_hint(root))
    expected = {zarrmeta.chunk_path(spec, shard) for spec in header.arrays}
    if set(record.files) != expected:
        raise DamagedError(f"{path} names other files than the store's arrays have", hint=_hint(root))
    return record


def load_records(root: Path, header: StoreHeader) -> list[ShardRecord]:
    """Every committed shard, ascending."""
    return [load_record(root, header, shard) for shard in _numbers(root, paths.RECORDS)]


def _numbers(root: Path, directory: str) -> list[int]:
    try:
        return paths.numbers_in(root / directory)
    except FileNotFoundError:
        raise DamagedError(f"{root / directory} is missing", hint=_hint(root)) from None


def _check_owner(path: Path, uuid: str, header: StoreHeader) -> None:
    if uuid != header.uuid:
        raise DamagedError(f"{path} belongs to store {uuid}, this one is {header.uuid}", hint="restore the right file")


def _hint(root: Path) -> str:
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
    samples = [s for shard in shards for s in shard.samples]
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


def load(root: Path) -> Manifest:
    """Compile the manifest of a store from its records."""
    header = load_header(root)
    return compile_manifest(header, load_records(root, header))


def manifest_id(manifest: Manifest) -> str:
    """SHA-256 of the canonical manifest, as hex: the name of that state of the store."""
    return sha256_hex(canonical(manifest))


def write(root: Path) -> str:
    """Rebuild manifest.json, manifest.sha256 and index/. Returns the manifest_id."""
    header = load_header(root)
    records = load_records(root, header)
    manifest = compile_manifest(header, records)
    body = canonical(manifest)
    columns = index.encode(index.build(manifest))
    durable.make_dirs(root / paths.INDEX)
    for name, data in columns.items():
        _replace_if_changed(root / paths.INDEX / name, data)
    _replace_if_changed(root / paths.MANIFEST, body)
    _replace_if_changed(root / paths.MANIFEST_SUMS, checksums(root, manifest, columns).encode())
    return sha256_hex(body)


def _replace_if_changed(path: Path, data: bytes) -> None:
    if not path.is_file() or path.read_bytes() != data:
        durable.replace(path, data)


def checksums(root: Path, manifest: Manifest, columns: dict[str, bytes]) -> str:
    """`sha256sum -c` input over every file of the store but itself, in path order."""
    sums = {path: sha for shard in manifest.shards for path, (_, sha) in shard.files.items()}
    sums[paths.MANIFEST] = manifest_id(manifest)
    sums |= {f"{paths.INDEX}/{name}": sha256_hex(data) for name, data in columns.items()}
    others = [root / paths.HEADER]
    others += [paths.layout(root, n) for n in _numbers(root, paths.LAYOUTS)]
    others += [paths.record(root, shard.shard) for shard in manifest.shards]
    others += sorted((root / zarrmeta.ROOT).rglob("zarr.json"))
    sums |= {path.relative_to(root).as_posix(): sha256_file(path) for path in others}
    return "".join(f"{sha}  {path}\n" for path, sha in sorted(sums.items()))
