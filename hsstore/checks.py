"""What a store says about itself, checked: layouts, tombstones, records, Zarr metadata, and how they fit together.

Never raises on damage: what is wrong is a finding. Leaves what is built from the records to `builtcheck`, names to
`namecheck`, bytes of shard files to `filecheck`.

Letters: S rows of a shard.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from hsstore import builtcheck, manifest, namecheck, paths, plausible, zarrmeta
from hsstore.errors import HsstoreError
from hsstore.findings import Finding, damage, note, stale
from hsstore.known import Known, bare, manifest_on_disk, small_file
from hsstore.reading import raise_if_ours
from hsstore.records import LayoutRecord, ShardRecord, StoreHeader, load_sealed


class _Shape(msgspec.Struct):
    """The one field of an array's zarr.json that the header does not decide."""

    shape: tuple[int, ...] = (0,)


def structure(root: Path, header: StoreHeader) -> tuple[Known, list[Finding]]:
    """All checks but those of shard files. Nothing is called damage because a writer works: then all is done again."""
    for attempt in range(5):
        before = _state(root)
        known = Known(root=root, header=header)
        found = [finding for step in STEPS for finding in step(known)]
        if attempt == 4 or not any(f.severity == "damage" for f in found) or _state(root) == before:
            break
    return known, found


def owner(root: Path, header: StoreHeader) -> str:
    """What is wrong with a store.json that is sound in itself: every layout and record belongs to another store."""
    uuids = set()
    for directory, type_ in ((paths.LAYOUTS, LayoutRecord), (paths.RECORDS, ShardRecord)):
        for path in _numbered_files(root / directory):
            try:
                uuids.add(load_sealed(path, type_).store_uuid)  # type: ignore[attr-defined]
            except (HsstoreError, OSError):
                continue  # is told when it is looked at as a record
            if header.uuid in uuids:
                return ""
    if not uuids:
        return ""
    return f"is of store {header.uuid}, everything else here is of {', '.join(sorted(uuids))}"


def _numbered_files(directory: Path) -> list[Path]:
    try:
        return [directory / paths.numbered(n) for n in paths.numbers_in(directory)]
    except OSError:
        return []


def _state(root: Path) -> list[object]:
    """What a writer changes when it commits a shard, grows a store or builds a manifest."""
    out: list[object] = []
    for name in (paths.LAYOUTS, paths.RECORDS, paths.TOMBSTONES, paths.INDEX, ""):
        try:
            with os.scandir(root / name) as entries:
                out.append(sorted((e.name, e.inode()) for e in entries if not e.is_dir(follow_symlinks=False)))
        except OSError as error:
            out.append(error.errno)
    return out


def _numbers(known: Known, directory: str) -> list[int] | None:
    try:
        return paths.numbers_in(known.root / directory)
    except OSError as error:
        raise_if_ours(error)
        return None


def _layouts(known: Known) -> Iterator[Finding]:
    expected: int | None = 0  # first shard of the next layout, while that is known
    for number in _numbers(known, paths.LAYOUTS) or [0]:
        name = f"{paths.LAYOUTS}/{paths.numbered(number)}"
        try:
            layout = manifest.load_layout(known.root, known.header, number)
            wrong = plausible.layout_record(layout)
            if not wrong and expected not in (None, layout.first_shard):
                wrong = f"begins with shard {layout.first_shard}, expected {expected}: a layout is missing or misplaced"
            expected = layout.numbers.stop
            known.layouts.append(layout)
        except (HsstoreError, OSError) as error:
            wrong, expected = bare(known, error), None
        if wrong:
            known.layouts_sound = False
            yield damage("layout", name, wrong)


def _tombstones(known: Known) -> Iterator[Finding]:
    directory = known.root / paths.TOMBSTONES
    try:
        names = os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return  # a store without any; something else under that name is found by `_names`
    except OSError as error:
        yield damage("tombstone", paths.TOMBSTONES, bare(known, error))
        return
    for shard, number in sorted(filter(None, map(paths.tombstone_of, names))):
        try:
            known.tombstones.append(manifest.load_tombstone(known.root, known.header, shard, number))
        except (HsstoreError, OSError) as error:
            known.unreadable.add(shard)
            detail = f"{bare(known, error)}; whether the shard may be used is not known"
            yield damage("tombstone", paths.tombstone(Path(), shard, number).as_posix(), detail, shard)
    known.quarantined = manifest.quarantined(known.tombstones)
    for shard, stone in known.quarantined.items():
        name = paths.tombstone(Path(), shard, stone.number).as_posix()
        detail = f"shard {shard} is quarantined, its files are not judged: {stone.reason}"
        yield note("quarantined", name, detail, shard)


def _records(known: Known) -> Iterator[Finding]:
    numbers = _numbers(known, paths.RECORDS)
    if numbers is None:
        yield damage("record", paths.RECORDS, "is no directory that can be read")
        return
    for shard in numbers:
        if shard in known.quarantined:
            continue
        try:
            record = manifest.load_record(known.root, known.header, shard)
            wrong = plausible.record(record, known.header)
        except (HsstoreError, OSError) as error:
            wrong = bare(known, error)
        if wrong:
            known.unreadable.add(shard)
            name = f"{paths.RECORDS}/{paths.numbered(shard)}"
            yield damage("record", name, f"{wrong}; its rows cannot be judged", shard)
        elif shard not in known.unreadable:
            known.records[shard] = record


def _metadata(known: Known) -> Iterator[Finding]:
    """zarr.json fits all layouts; one that fits the first of them only was overtaken by growth."""
    stops = [layout.numbers.stop for layout in known.layouts] if known.layouts_sound else []
    states = [zarrmeta.documents(known.header, stop) for stop in stops]
    for relative in zarrmeta.documents(known.header, 0):
        found = small_file(known, relative)
        if found is None:
            yield damage("missing", relative, "the Zarr metadata document is missing")
        elif not states and found == zarrmeta.documents(known.header, _n_shards(known, found))[relative]:
            continue  # how many shards there are only the layouts could say
        elif states and found == states[-1][relative]:
            continue
        elif any(found == state[relative] for state in states):
            yield stale(relative, "older than the last layout")
        else:
            yield damage("metadata", relative, "differs from the document that store.json implies")


def _n_shards(known: Known, document: bytes) -> int:
    """How many shards a zarr.json says there are; 0 when it says nothing that could be."""
    try:
        rows = msgspec.json.decode(document, type=_Shape).shape[0]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, IndexError):
        return 0
    return max(rows, 0) // known.header.shard_rows


def _coverage(known: Known) -> Iterator[Finding]:
    """Shards the layouts expect against shards that are committed."""
    expected = {n: plan for x in known.layouts for n, plan in zip(x.numbers, x.shards, strict=True)}
    for shard, record in known.records.items():
        plan, name = expected.get(shard), f"{paths.RECORDS}/{paths.numbered(shard)}"
        if plan is None:
            if known.layouts_sound:
                yield damage("layout", name, "no layout has this shard", shard)
        elif (plan.n_samples, plan.n_rows) != (len(record.samples), record.n_rows):
            has = f"{len(record.samples)} samples in {record.n_rows} rows"
            detail = f"has {has}, its layout says {plan.n_samples} in {plan.n_rows}"
            yield damage("layout", name, detail, shard)
    disk = manifest_on_disk(known)
    known_before = {s.shard for s in disk.shards} if disk else set()
    for shard in sorted(set(expected) - set(known.records) - known.not_judged):
        known.open_shards += 1
        name, plan = f"{paths.RECORDS}/{paths.numbered(shard)}", expected[shard]
        if shard in known_before:
            known.unreadable.add(shard)  # its files are nobody's without it: one cause, one finding
            yield damage("missing", name, "manifest.json has this shard; its record is missing", shard)
            continue
        detail = f"open: {plan.n_samples} samples in {plan.n_rows} rows are not extracted yet"
        yield note("open", name, detail, shard)


STEPS = (
    _layouts,
    _tombstones,
    _records,
    _metadata,
    _coverage,
    builtcheck.listed,
    builtcheck.derived,
    namecheck.names,
)
"""In this order: each rests on what those before it could trust."""
