"""Is everything that was committed still there, whole, and nothing else? Streams findings, changes nothing.

`quick` checks every record's own hash, names, sizes, footers, metadata, small files whole and three blocks of each
large file; `full` reads every byte. A finding names file, rows, sample ids and source lines. Never raises on damage.

Letters: S rows of a shard, C rows of a block.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from hsstore import durable, index, manifest, paths, zarrmeta
from hsstore.digest import crc32c, decode_blocks, digest_file
from hsstore.errors import DamagedError, HsstoreError, NotFoundError
from hsstore.findings import Finding, Summary, at, damage, printable, runs, stale
from hsstore.records import (
    ArraySpec,
    LayoutRecord,
    Manifest,
    ShardRecord,
    StoreHeader,
    Tombstone,
    decode,
    read_plain,
    sha256_hex,
)

Depth = Literal["quick", "full"]
SMALL_FILE_BYTES = 1 << 20


@dataclass(slots=True)
class _Known:
    """What could be trusted so far; the later checks rest on it."""

    header: StoreHeader
    layouts: list[LayoutRecord] = field(default_factory=list)
    records: dict[int, ShardRecord] = field(default_factory=dict)
    layouts_sound: bool = True
    tombstones: list[Tombstone] = field(default_factory=list)
    quarantined: dict[int, Tombstone] = field(default_factory=dict)
    unreadable: set[int] = field(default_factory=set)


class Verifier:
    """One verification of one store. `findings()` does the work; `summary` counts it."""

    def __init__(self, root: str | Path, depth: Depth = "quick") -> None:
        self.root = Path(root)
        self.depth = depth
        self.summary = Summary()
        self.on_file: Callable[[], None] = lambda: None

    def findings(self) -> Iterator[Finding]:
        """Every finding as it is met.

        Raises `NotFoundError` when the directory is no store, `FormatError` for a format this release cannot judge.
        """
        for finding in self._run():
            if finding.severity == "damage":
                self.summary.damage += 1
            else:
                self.summary.notes += 1
            yield finding

    def files_to_read(self) -> int:
        """Shard files the store's records name: the unit of progress."""
        try:
            header = manifest.load_header(self.root)
            return len(paths.numbers_in(self.root / paths.RECORDS)) * len(header.arrays)
        except (HsstoreError, FileNotFoundError):
            return 0  # `findings` says what is wrong

    def _run(self) -> Iterator[Finding]:
        try:
            known = _Known(header=manifest.load_header(self.root))
        except (DamagedError, NotFoundError) as error:
            if not (self.root / paths.RECORDS).is_dir():
                raise
            yield damage("record", paths.HEADER, f"{error.message}; nothing else can be judged without it")
            return
        yield from self._layouts(known)
        yield from self._tombstones(known)
        yield from self._records(known)
        yield from self._metadata(known)
        for record in known.records.values():
            yield from self._shard(known, record)
        yield from self._coverage(known)
        yield from self._derived(known)
        yield from self._unknown(known)

    def _layouts(self, known: _Known) -> Iterator[Finding]:
        try:
            numbers = paths.numbers_in(self.root / paths.LAYOUTS)
        except FileNotFoundError:
            numbers = []
        for number in numbers or [0]:
            name = f"{paths.LAYOUTS}/{paths.numbered(number)}"
            try:
                layout = manifest.load_layout(self.root, known.header, number)
                if known.layouts_sound and layout.first_shard != sum(len(x.shards) for x in known.layouts):
                    known.layouts_sound = False
                    yield damage(
                        "layout", name, f"begins with shard {layout.first_shard}: a layout before it is missing"
                    )
                known.layouts.append(layout)
            except HsstoreError as error:
                known.layouts_sound = False
                yield damage("layout", name, self._bare(error))

    def _tombstones(self, known: _Known) -> Iterator[Finding]:
        directory = self.root / paths.TOMBSTONES
        names = (paths.tombstone_of(p.name) for p in directory.iterdir()) if directory.is_dir() else ()
        unreadable = set()
        for shard, number in sorted(filter(None, names)):
            try:
                known.tombstones.append(manifest.load_tombstone(self.root, known.header, shard, number))
            except HsstoreError as error:
                unreadable.add(shard)
                name = paths.tombstone(Path(), shard, number).as_posix()
                detail = f"{self._bare(error)}; whether the shard may be used is not known"
                yield damage("tombstone", name, detail, shard)
        known.unreadable |= unreadable
        known.quarantined = manifest.quarantined(known.tombstones)
        for shard, stone in known.quarantined.items():
            name = paths.tombstone(Path(), shard, stone.number).as_posix()
            detail = f"shard {shard} is quarantined: {stone.reason}"
            yield Finding(severity="note", kind="quarantined", file=name, detail=detail, shard=shard)

    def _records(self, known: _Known) -> Iterator[Finding]:
        try:
            numbers = paths.numbers_in(self.root / paths.RECORDS)
        except FileNotFoundError:
            yield damage("record", paths.RECORDS, "the directory is missing")
            return
        for shard in numbers:
            if shard in known.quarantined:
                continue
            try:
                known.records[shard] = manifest.load_record(self.root, known.header, shard)
            except HsstoreError as error:
                known.unreadable.add(shard)
                name = f"{paths.RECORDS}/{paths.numbered(shard)}"
                yield damage("record", name, f"{self._bare(error)}; its rows cannot be judged", shard=shard)
        self.summary.shards = len(known.records)

    def _bare(self, error: HsstoreError) -> str:
        return error.message.removeprefix(f"{self.root}/")

    def _metadata(self, known: _Known) -> Iterator[Finding]:
        n_shards = sum(len(layout.shards) for layout in known.layouts)
        for relative, expected in zarrmeta.documents(known.header, n_shards).items():
            path = self.root / relative
            if not path.is_file():
                yield damage("missing", relative, "the Zarr metadata document is missing")
            elif known.layouts_sound and (found := path.read_bytes()) != expected:
                if any(found == x[relative] for x in self._before_growth(known)):
                    yield stale(relative, "older than the last layout")
                else:
                    yield damage("metadata", relative, "differs from the document that store.json implies")

    def _before_growth(self, known: _Known) -> Iterator[dict[str, bytes]]:
        for layout in known.layouts[1:]:
            yield zarrmeta.documents(known.header, layout.first_shard)

    def _shard(self, known: _Known, record: ShardRecord) -> Iterator[Finding]:
        self.summary.samples += sum(s.ok for s in record.samples)
        for spec in known.header.arrays:
            self.summary.files += 1
            self.on_file()
            yield from self._file(known.header, record, spec)

    def _file(self, header: StoreHeader, record: ShardRecord, spec: ArraySpec) -> Iterator[Finding]:
        relative = zarrmeta.chunk_path(spec, record.shard)
        entry, path = record.files[relative], self.root / relative
        staged = paths.staging(self.root, record.shard, record.attempt) / paths.staged_name(spec.name)
        whole = (0, record.n_rows - 1)
        if not path.is_file():
            if staged.is_file():
                detail = (
                    "committed but not published yet; the next `hsstore extract --resume` or `manifest build` does it"
                )
                yield Finding(severity="note", kind="unpublished", file=relative, detail=detail, shard=record.shard)
                path = staged
            else:
                yield at(record, "missing", relative, "the file is missing", whole)
                return
        size = path.stat().st_size
        if size != entry.bytes:
            kept = size // spec.row_bytes  # rows that are still whole; what follows the last one is no row
            lost = (kept, record.n_rows - 1) if kept < record.n_rows else None
            yield at(record, "size", relative, f"has {size} bytes, its record says {entry.bytes}", lost)
            return
        try:
            yield from self._contents(header, record, spec, path, relative)
        except OSError as error:
            yield at(record, "read", relative, f"cannot be read: {error.strerror}", whole)

    def _contents(
        self, header: StoreHeader, record: ShardRecord, spec: ArraySpec, path: Path, relative: str
    ) -> Iterator[Finding]:
        entry = record.files[relative]
        blocks = decode_blocks(entry.crc32c_blocks)
        block_bytes = header.chunk_rows * spec.row_bytes
        expected_footer = zarrmeta.footer(
            spec, n_rows=record.n_rows, shard_rows=header.shard_rows, chunk_rows=header.chunk_rows
        )
        if self.depth == "full" or entry.bytes <= SMALL_FILE_BYTES:
            digest = digest_file(path, block_bytes=block_bytes, n_blocks=len(blocks))
            self.summary.bytes_read += digest.n_bytes
            bad = np.flatnonzero(np.array(digest.blocks, np.uint32) != blocks).tolist()
            footer, sha256 = digest.footer, digest.sha256
        else:
            bad, footer = _spot_check(path, blocks.tolist(), block_bytes)
            sha256 = entry.sha256
        for first, last in runs(bad):
            rows = (first * header.chunk_rows, min((last + 1) * header.chunk_rows, record.n_rows) - 1)
            yield at(record, "block", relative, f"CRC32C of block {first} to {last} differs from the record", rows)
        if footer != expected_footer:
            yield at(record, "footer", relative, "the Zarr shard index at its end is not the one expected", None)
        if sha256 != entry.sha256 and not bad and footer == expected_footer:
            yield at(record, "digest", relative, "SHA-256 differs from the record", (0, record.n_rows - 1))

    def _coverage(self, known: _Known) -> Iterator[Finding]:
        """Shards the layouts expect against shards that are committed."""
        expected = {n: plan for lay in known.layouts for n, plan in enumerate(lay.shards, start=lay.first_shard)}
        for shard, record in known.records.items():
            plan = expected.get(shard)
            if plan is None:
                if known.layouts_sound:
                    yield damage(
                        "layout", f"{paths.RECORDS}/{paths.numbered(shard)}", "no layout has this shard", shard
                    )
            elif (plan.n_samples, plan.n_rows) != (len(record.samples), record.n_rows):
                has = f"{len(record.samples)} samples in {record.n_rows} rows"
                detail = f"has {has}, its layout says {plan.n_samples} in {plan.n_rows}"
                yield damage("layout", f"{paths.RECORDS}/{paths.numbered(shard)}", detail, shard)
        disk = self._on_disk()
        known_before = {s.shard for s in disk.shards} if disk else set()
        for shard in sorted(set(expected) - set(known.records) - known.unreadable - set(known.quarantined)):
            self.summary.open_shards += 1
            name, plan = f"{paths.RECORDS}/{paths.numbered(shard)}", expected[shard]
            if shard in known_before:
                known.unreadable.add(shard)  # its files are nobody's without it: one cause, one finding
                yield damage("missing", name, "manifest.json has this shard; its record is missing", shard)
                continue
            detail = f"open: {plan.n_samples} samples in {plan.n_rows} rows are not extracted yet"
            yield Finding(severity="note", kind="open", file=name, detail=detail, shard=shard)

    def _on_disk(self) -> Manifest | None:
        """manifest.json as it lies there; None when it cannot be read as one (`_derived` says what is wrong)."""
        try:
            return decode(read_plain(self.root / paths.MANIFEST), Manifest, paths.MANIFEST)
        except HsstoreError:
            return None

    def _derived(self, known: _Known) -> Iterator[Finding]:
        if known.unreadable or not known.layouts_sound:
            return  # what is derived cannot be judged before the records are
        current = manifest.derived(known.header, known.layouts, list(known.records.values()), known.tombstones)
        self.summary.manifest_id = sha256_hex(current[paths.MANIFEST])
        found = {relative: self._bytes(relative) for relative in current}
        interrupted = manifest.build_was_interrupted(self.root)
        if found[paths.MANIFEST] is None and (interrupted or not any(found.values())):
            yield stale(paths.MANIFEST, "not built yet")
            return
        body = found[paths.MANIFEST]
        states = [current] if body == current[paths.MANIFEST] else [self._older(known), current]
        if len(states) > 1 and body == states[0][paths.MANIFEST]:
            yield stale(paths.MANIFEST, "older than the records")
            if not interrupted:
                states = states[:1]  # all of it is of one build
        for relative, data in found.items():
            if data is None:
                yield damage("missing", relative, "missing; `hsstore manifest build` rebuilds it")
            elif all(data != state[relative] for state in states):
                yield damage("derived", relative, "not what it was built as; `hsstore manifest build` rebuilds it")

    def _bytes(self, relative: str) -> bytes | None:
        try:
            return read_plain(self.root / relative)
        except NotFoundError:
            return None
        except DamagedError:
            return b""  # no plain file: equal to nothing that is built

    def _older(self, known: _Known) -> dict[str, bytes]:
        """What was derived from the shards that manifest.json on disk names: new records may have overtaken it."""
        disk = self._on_disk()
        named = {s.shard for s in disk.shards} if disk else set(known.records)
        return manifest.derived(known.header, known.layouts, [r for n, r in known.records.items() if n in named])

    def _unknown(self, known: _Known) -> Iterator[Finding]:
        """Files that nothing commits, and what attempts left behind."""
        expected = _expected_files(known)
        attempts = {paths.staging(self.root, r.shard, r.attempt).name for r in known.records.values()}
        for directory, subdirectories, files in os.walk(self.root):
            here = Path(directory).relative_to(self.root)
            subdirectories.sort()
            if here.parts == (paths.STAGING,):
                for name in sorted(set(subdirectories) - attempts):
                    detail = "an attempt that is not committed: a running writer's, or garbage"
                    yield Finding(severity="note", kind="staging", file=f"{paths.STAGING}/{name}", detail=detail)
                subdirectories.clear()
                for name in filter(paths.is_lease, files):
                    detail = "a lease: a writer has that shard, or had it when it was killed"
                    yield Finding(severity="note", kind="staging", file=f"{paths.STAGING}/{name}", detail=detail)
                files = [name for name in files if not paths.is_lease(name)]
            if here.parts == (paths.MANIFESTS,):
                yield from self._kept(filter(None, map(paths.kept_id, files)))
                files = [name for name in files if not paths.kept_id(name)]
            links = [name for name in subdirectories if (self.root / here / name).is_symlink()]
            for name in sorted(files + links):
                relative = (here / name).as_posix()
                if durable.is_temporary(name):
                    detail = "a file that was being written: a running writer's, or garbage of a killed one"
                    yield Finding(severity="note", kind="staging", file=relative, detail=detail)
                elif relative not in expected and not _of_shards(relative, known.unreadable | set(known.quarantined)):
                    yield damage("unknown", printable(relative), "no record names this file")

    def _kept(self, ids: Iterator[str]) -> Iterator[Finding]:
        for manifest_id in sorted(ids):
            relative = paths.kept_manifest(Path(), manifest_id).as_posix()
            body = self._bytes(relative)
            if body is None or sha256_hex(body) != manifest_id:
                yield damage("manifest", relative, "does not have the SHA-256 that is its name")


def _expected_files(known: _Known) -> set[str]:
    out = {paths.HEADER, paths.MANIFEST, paths.MANIFEST_SUMS}
    out |= {f"{paths.INDEX}/{name}.npy" for name in index.COLUMNS}
    out |= {f"{paths.LAYOUTS}/{paths.numbered(n)}" for n in range(max(1, len(known.layouts)))}
    out |= {f"{paths.RECORDS}/{paths.numbered(n)}" for n in (*known.records, *known.unreadable)}
    out |= {f"{paths.RECORDS}/{paths.numbered(n)}" for n in known.quarantined}
    out |= {paths.tombstone(Path(), s.shard, s.number).as_posix() for s in known.tombstones}
    out |= set(zarrmeta.documents(known.header, 0))
    for record in known.records.values():
        out |= set(record.files)
    return out


def _of_shards(relative: str, shards: set[int]) -> bool:
    """Whether a path is a chunk of one of these shards (whose record cannot say what belongs to it)."""
    parts = relative.split("/")
    return "c" in parts and any(str(n) in parts[parts.index("c") :] for n in shards)


def _spot_check(path: Path, blocks: Sequence[int], block_bytes: int) -> tuple[list[int], bytes]:
    """CRC of the first, middle and last block, and the footer: finds exchanged files without reading them whole."""
    bad = []
    with open(path, "rb", buffering=0) as file:
        for block in sorted({0, len(blocks) // 2, len(blocks) - 1}):
            file.seek(block * block_bytes)
            if crc32c(file.read(block_bytes)) != blocks[block]:
                bad.append(block)
        file.seek(len(blocks) * block_bytes)
        return bad, file.read()
