"""One state of a store: its manifest_id, its samples as columns, its shards and their files.

Responsible for taking it from the derived files when these are proved to be those of the records as they are now (a
few milliseconds, whatever the size), from the records otherwise (always right, slower), or from a kept manifest when an
older state is asked for. Leaves the bytes of the arrays to `shardfiles`, what a manifest is to `manifest`.

The proof: manifest.sha256 is written with the manifest and names the SHA-256 of store.json, manifest.json and of every
column. When all of them match and the shards of that manifest are the shards that have a record and no tombstone, then
it is the manifest of those records, for a record never changes. Whatever does not match only makes opening slower.

Letters: N samples.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from hsstore import index, manifest, paths, plausible
from hsstore.errors import ConflictError, DamagedError, NotFoundError
from hsstore.index import Index
from hsstore.records import FORMAT, Manifest, StoreHeader, canonical, decode, read_plain, sha256_hex


class ShardFiles(msgspec.Struct, frozen=True):
    """What a manifest says of a shard, without its samples."""

    shard: int
    n_rows: int
    files: dict[str, tuple[int, str]]
    """(bytes, sha256) by path relative to the store."""


class _Table(msgspec.Struct, frozen=True):
    """What a manifest says of the files; its samples, by far the most of it, are skipped while decoding."""

    format: int
    shards: list[ShardFiles]


@dataclass(frozen=True, slots=True)
class Listing:
    """A manifest without its samples."""

    shards: tuple[ShardFiles, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    manifest_id: str
    index: Index
    """[N] of every sample, failed ones included."""
    shards: dict[int, ShardFiles]
    """By number, ascending."""
    taken_from: Literal["derived files", "records", "kept manifest"]

    @property
    def listing(self) -> Listing:
        return Listing(tuple(self.shards.values()))

    @property
    def n_bytes(self) -> int:
        return sum(size for shard in self.shards.values() for size, _ in shard.files.values())


def current(root: Path, header: StoreHeader) -> Snapshot:
    """The state of the store as it is now. Raises `DamagedError` when its records cannot be trusted."""
    live = live_shards(root, header)
    derived = _from_derived(root, header, live)
    if derived is not None:
        return derived
    manifest.refuse_lost(root, header)
    return _from_records(root, header, live)


def live_shards(root: Path, header: StoreHeader) -> list[int]:
    """Committed shards that are not quarantined, ascending."""
    dead = manifest.quarantined(manifest.load_tombstones(root, header))
    return [shard for shard in committed_shards(root) if shard not in dead]


def committed_shards(root: Path) -> list[int]:
    """Shards that have a record, ascending."""
    try:
        return paths.numbers_in(root / paths.RECORDS)
    except FileNotFoundError:
        raise DamagedError(f"{root / paths.RECORDS} is missing", hint=manifest.verify_hint(root)) from None


def pinned(root: Path, header: StoreHeader, manifest_id: str, shards: Iterable[int] | None = None) -> Snapshot:
    """The state of that id: the present one, a kept manifest, or (when its shards are known) some of the records.

    Raises `ConflictError` when the store has never had that state, or does not know it any more, `DamagedError` when
    what it has kept of it is damaged.
    """
    if paths.kept_id(paths.kept_manifest(root, manifest_id).name) != manifest_id:
        raise ConflictError(f"{manifest_id[:80]!r} is no manifest_id", hint=f"see {root / paths.MANIFESTS}/")
    live = live_shards(root, header)
    now = _from_derived(root, header, live)
    if now is not None and now.manifest_id == manifest_id:
        return now
    kept = _from_kept(root, header, manifest_id)
    if kept is not None:
        return kept
    wanted = live if shards is None else list(shards)
    if set(wanted) <= set(live):
        found = _from_records(root, header, wanted)
        if found.manifest_id == manifest_id:
            return found
    path = paths.kept_manifest(root, manifest_id)
    if path.exists():
        raise DamagedError(f"{path} cannot be used: it is damaged", hint=manifest.verify_hint(root))
    is_now = (now or _from_records(root, header, live)).manifest_id
    raise ConflictError(
        f"{root} now holds another state of the store: manifest {is_now[:12]}, was {manifest_id[:12]}, which it has not"
        f" kept in {paths.MANIFESTS}/",
        hint="start a new run on the new state, or restore the old one",
    )


def _from_derived(root: Path, header: StoreHeader, live: list[int]) -> Snapshot | None:
    try:
        sums = _read_sums(root)
        body = _matching(root, paths.MANIFEST, sums)
        names = [f"{name}.npy" for name in index.COLUMNS]
        columns = {name: _matching(root, f"{paths.INDEX}/{name}", sums) for name in names}
        if sums.get(paths.HEADER) != sha256_hex(canonical(header)):
            return None  # of another store
        shards = _table(body, root / paths.MANIFEST)
        if list(shards) != live:
            return None  # records were committed, or shards quarantined, since it was built
        samples = index.decode(columns)
    except (NotFoundError, DamagedError):
        return None  # the records say what is right, `hsstore verify` what is wrong
    return Snapshot(manifest_id=sums[paths.MANIFEST], index=samples, shards=shards, taken_from="derived files")


def _read_sums(root: Path) -> dict[str, str]:
    """SHA-256 by path, of the lines of manifest.sha256."""
    text = read_plain(root / paths.MANIFEST_SUMS).decode(errors="replace")
    return {name: sha for sha, _, name in (line.partition("  ") for line in text.splitlines())}


def _matching(root: Path, relative: str, sums: dict[str, str]) -> bytes:
    data = read_plain(root / relative)
    if sums.get(relative) != sha256_hex(data):
        raise DamagedError(f"{root / relative} is not what {paths.MANIFEST_SUMS} says")
    return data


def _table(body: bytes, where: Path) -> dict[int, ShardFiles]:
    table = decode(body, _Table, where)
    if table.format != FORMAT:
        raise DamagedError(f"{where} has format {table.format}, expected {FORMAT}")
    return {shard.shard: shard for shard in table.shards}


def _from_kept(root: Path, header: StoreHeader, manifest_id: str) -> Snapshot | None:
    data = kept_bytes(root, manifest_id)
    if data is None:
        return None
    kept = decode(data, Manifest, f"manifest {manifest_id[:12]}")
    shards = {s.shard: ShardFiles(s.shard, s.n_rows, s.files) for s in kept.shards}
    if (kept.capture, kept.arrays, kept.shard_rows) != (header.capture, header.arrays, header.shard_rows):
        raise ConflictError(f"manifest {manifest_id[:12]} is one of another store than {root}")
    return Snapshot(manifest_id=manifest_id, index=index.build(kept), shards=shards, taken_from="kept manifest")


def kept_bytes(root: Path, manifest_id: str) -> bytes | None:
    """The manifest of that id, from manifests/ or manifest.json; None when neither has it unharmed."""
    for path in (paths.kept_manifest(root, manifest_id), root / paths.MANIFEST):
        try:
            data = read_plain(path)
        except (NotFoundError, DamagedError):
            continue  # the next one, or the records, may still tell; `hsstore verify` says what is wrong here
        if sha256_hex(data) == manifest_id:
            return data
    return None


def manifest_bytes(root: Path, header: StoreHeader, state: Snapshot) -> bytes:
    """The canonical manifest of a state: its SHA-256 is the manifest_id.

    Raises `DamagedError` when no copy is left and the records are others than they were.
    """
    data = kept_bytes(root, state.manifest_id)
    if data is None:
        data = canonical(compile_shards(root, header, state.shards))
        if sha256_hex(data) != state.manifest_id:
            raise DamagedError(
                f"the records of {root} are not those that it was opened with", hint=manifest.verify_hint(root)
            )
    return data


def _from_records(root: Path, header: StoreHeader, shards: Iterable[int]) -> Snapshot:
    compiled = compile_shards(root, header, shards)
    return Snapshot(
        manifest_id=manifest.manifest_id(compiled),
        index=index.build(compiled),
        shards={s.shard: ShardFiles(s.shard, s.n_rows, s.files) for s in compiled.shards},
        taken_from="records",
    )


def compile_shards(root: Path, header: StoreHeader, shards: Iterable[int]) -> Manifest:
    """The manifest of some shards, from their records. Raises `DamagedError` for one that makes no sense."""
    records = []
    for shard in shards:
        record = manifest.load_record(root, header, shard)
        if wrong := plausible.record(record, header):
            raise DamagedError(f"{paths.record(root, shard)} {wrong}", hint=manifest.verify_hint(root))
        records.append(record)
    return manifest.compile_manifest(header, records)


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Sums over the samples of a state, each source line counted once."""

    n_samples: int
    """Without failed ones."""
    n_failed: int
    n_tokens: int
    n_bytes: int
    n_shards: int

    @classmethod
    def of(cls, state: Snapshot) -> Totals:
        ok = index.usable(state.index)
        return cls(
            n_samples=int(ok.sum()),
            n_failed=int((~ok).sum()),
            n_tokens=int(state.index.n_tokens[ok].sum(dtype=np.uint64)),
            n_bytes=state.n_bytes,
            n_shards=len(state.shards),
        )
