"""What a store says about itself, checked: layouts, tombstones, records, metadata, what is derived, names of all files.

Everything but the bytes of shard files, which are `filecheck`'s. Never raises on damage: what is wrong is a finding.

Letters: S rows of a shard.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hsstore import durable, index, manifest, paths, plausible, zarrmeta
from hsstore.errors import DamagedError, HsstoreError, NotFoundError
from hsstore.findings import Finding, damage, note, printable, stale
from hsstore.reading import raise_if_ours
from hsstore.records import (
    LayoutRecord,
    Manifest,
    ShardRecord,
    StoreHeader,
    Tombstone,
    decode,
    read_plain,
    sha256_hex,
)


@dataclass(slots=True)
class Known:
    """What could be trusted so far; the later checks rest on it."""

    root: Path
    header: StoreHeader
    layouts: list[LayoutRecord] = field(default_factory=list)
    layouts_sound: bool = True
    tombstones: list[Tombstone] = field(default_factory=list)
    quarantined: dict[int, Tombstone] = field(default_factory=dict)
    records: dict[int, ShardRecord] = field(default_factory=dict)
    unreadable: set[int] = field(default_factory=set)
    """Shards whose files nobody can judge."""
    open_shards: int = 0
    manifest_id: str = ""

    @property
    def not_judged(self) -> set[int]:
        return self.unreadable | set(self.quarantined)


def structure(root: Path, header: StoreHeader) -> tuple[Known, list[Finding]]:
    """All checks of this module. A store that is being written is looked at again before anything is called damage."""
    for attempt in range(5):
        before = _state(root)
        known = Known(root=root, header=header)
        steps = (_layouts, _tombstones, _records, _metadata, _coverage, _derived, _names)
        found = [finding for step in steps for finding in step(known)]
        if attempt == 4 or not any(f.severity == "damage" for f in found) or _state(root) == before:
            break
    return known, found


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


def _bare(known: Known, error: HsstoreError | OSError) -> str:
    """The message without the store's own path."""
    if isinstance(error, HsstoreError):
        return error.message.removeprefix(f"{known.root}/")
    raise_if_ours(error)
    return f"cannot be read: {error.strerror}"


def _numbers(known: Known, directory: str) -> list[int] | None:
    try:
        return paths.numbers_in(known.root / directory)
    except OSError as error:
        raise_if_ours(error)
        return None


def _layouts(known: Known) -> Iterator[Finding]:
    for number in _numbers(known, paths.LAYOUTS) or [0]:
        name = f"{paths.LAYOUTS}/{paths.numbered(number)}"
        try:
            layout = manifest.load_layout(known.root, known.header, number)
            wrong = plausible.layout_record(layout)
            if not wrong and known.layouts_sound and layout.first_shard != sum(len(x.shards) for x in known.layouts):
                wrong = f"begins with shard {layout.first_shard}: a layout before it is missing"
            known.layouts.append(layout)
        except (HsstoreError, OSError) as error:
            wrong = _bare(known, error)
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
        yield damage("tombstone", paths.TOMBSTONES, _bare(known, error))
        return
    for shard, number in sorted(filter(None, map(paths.tombstone_of, names))):
        try:
            known.tombstones.append(manifest.load_tombstone(known.root, known.header, shard, number))
        except (HsstoreError, OSError) as error:
            known.unreadable.add(shard)
            detail = f"{_bare(known, error)}; whether the shard may be used is not known"
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
            wrong = _bare(known, error)
        if wrong:
            known.unreadable.add(shard)
            name = f"{paths.RECORDS}/{paths.numbered(shard)}"
            yield damage("record", name, f"{wrong}; its rows cannot be judged", shard)
        elif shard not in known.unreadable:
            known.records[shard] = record


def _metadata(known: Known) -> Iterator[Finding]:
    """zarr.json fits all layouts; one that fits the first of them only was overtaken by growth."""
    stops = [layout.numbers.stop for layout in known.layouts] if known.layouts_sound else [0]
    states = [zarrmeta.documents(known.header, stop) for stop in stops]
    for relative, expected in states[-1].items():
        found = _bytes(known, relative)
        if found is None:
            yield damage("missing", relative, "the Zarr metadata document is missing")
        elif not known.layouts_sound or found == expected:
            continue
        elif any(found == state[relative] for state in states[:-1]):
            yield stale(relative, "older than the last layout")
        else:
            yield damage("metadata", relative, "differs from the document that store.json implies")


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
    disk = _manifest_on_disk(known)
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


def _manifest_on_disk(known: Known) -> Manifest | None:
    """manifest.json as it lies there; None when it cannot be read as one (`_derived` says what is wrong)."""
    try:
        return decode(_bytes(known, paths.MANIFEST) or b"", Manifest, paths.MANIFEST)
    except HsstoreError:
        return None


def _derived(known: Known) -> Iterator[Finding]:
    if known.unreadable or not known.layouts_sound:
        return  # what is derived cannot be judged before the records are
    current = _built_from(known, known.records.values())
    known.manifest_id = sha256_hex(current[paths.MANIFEST])
    found = {relative: _bytes(known, relative) for relative in current}
    if found == current:
        return
    interrupted = manifest.build_was_interrupted(known.root)
    if found[paths.MANIFEST] is None and (interrupted or not any(found.values())):
        yield stale(paths.MANIFEST, "not built yet")
        return
    body, older = found[paths.MANIFEST], _older(known)
    if body not in (current[paths.MANIFEST], older[paths.MANIFEST]) and _is_of_one_build(known, found):
        yield stale(paths.MANIFEST, "older than a quarantine")
        return
    states = [current]
    if body == older[paths.MANIFEST] and older != current:
        yield stale(paths.MANIFEST, "older than the records")
        states = [older, current] if interrupted else [older]  # else all of it is of one build
    elif body != current[paths.MANIFEST]:
        states.append(older)
    for relative, data in found.items():
        if data is None:
            yield damage("missing", relative, "missing; `hsstore manifest build` rebuilds it")
        elif all(data != state[relative] for state in states):
            yield damage("derived", relative, "not what it was built as; `hsstore manifest build` rebuilds it")


def _built_from(known: Known, records: Iterable[ShardRecord]) -> dict[str, bytes]:
    return manifest.derived(known.header, known.layouts, list(records), known.tombstones)


def _is_of_one_build(known: Known, found: Mapping[str, bytes | None]) -> bool:
    """Whether a build that names a quarantined shard, whose record may be lost, agrees with its own list of SHA-256."""
    disk = _manifest_on_disk(known)
    if disk is None or not {s.shard for s in disk.shards} & set(known.quarantined):
        return False
    lines = set((found[paths.MANIFEST_SUMS] or b"").decode("utf-8", "replace").splitlines())
    built = {name: data for name, data in found.items() if name != paths.MANIFEST_SUMS}
    return all(data is not None and f"{sha256_hex(data)}  {name}" in lines for name, data in built.items())


def _older(known: Known) -> dict[str, bytes]:
    """What was built from the shards that manifest.json on disk names and what manifest.sha256 lists beside them.

    Commits, growth and quarantine may have overtaken it; what is quarantined now was a shard like others then.
    """
    lines = (_bytes(known, paths.MANIFEST_SUMS) or b"").decode("utf-8", "replace").splitlines()
    listed = {line[66:] for line in lines}
    n_layouts = sum(name.startswith(f"{paths.LAYOUTS}/") for name in listed)
    tombstones = [s for s in known.tombstones if paths.tombstone(Path(), s.shard, s.number).as_posix() in listed]
    disk = _manifest_on_disk(known)
    named = {s.shard for s in disk.shards} if disk else set(known.records)
    records = [r for n, r in known.records.items() if n in named]
    for shard in named & set(known.quarantined):
        try:
            records.append(manifest.load_record(known.root, known.header, shard))
        except HsstoreError:
            continue  # it need not be readable; what names it is then judged as a build of its own
    return manifest.derived(known.header, known.layouts[: n_layouts or None], records, tombstones)


def _bytes(known: Known, relative: str) -> bytes | None:
    """A small file whole; None when it is missing, b"" (equal to nothing that is built) when it cannot be read."""
    try:
        return read_plain(known.root / relative)
    except NotFoundError:
        return None
    except DamagedError:
        return b""
    except OSError as error:
        raise_if_ours(error)
        return b""


def _names(known: Known) -> Iterator[Finding]:
    """Files that nothing commits, and what attempts left behind."""
    expected = _expected(known)
    waiting = [""]
    while waiting:
        here = waiting.pop()
        if here == f"{paths.STAGING}/":
            yield from _staging(known)
            continue
        try:
            with os.scandir(known.root / here) as entries:
                listing = sorted((e.name, e.is_dir(follow_symlinks=False)) for e in entries)
        except OSError as error:
            raise_if_ours(error)
            yield damage("read", printable(here) or ".", f"its names cannot be read: {error.strerror}")
            continue
        for name, is_directory in listing:
            relative = here + name
            if is_directory:
                waiting.append(f"{relative}/")
            elif relative not in expected:
                yield from _unexpected(known, here, name)


def _unexpected(known: Known, here: str, name: str) -> Iterator[Finding]:
    relative = here + name
    if durable.is_temporary(name):
        detail = "a file that was being written: a running writer's, or garbage of a killed one"
        yield note("staging", printable(relative), detail)
    elif here == f"{paths.MANIFESTS}/" and (kept := paths.kept_id(name)) is not None:
        if sha256_hex(_bytes(known, relative) or b"") != kept:
            yield damage("manifest", relative, "does not have the SHA-256 that is its name")
    elif not _of_shards(relative, known.not_judged):
        yield damage("unknown", printable(relative), "no record names this file")


def _staging(known: Known) -> Iterator[Finding]:
    """Attempts and leases; what committed shards still have there is told with their files."""
    attempts = {paths.staging(known.root, r.shard, r.attempt).name for r in known.records.values()}
    try:
        names = sorted(os.listdir(known.root / paths.STAGING))
    except FileNotFoundError:
        return
    except OSError as error:
        yield damage("read", paths.STAGING, f"its names cannot be read: {_bare(known, error)}")
        return
    for name in names:
        if name in attempts:
            continue
        detail = "an attempt that is not committed: a running writer's, or garbage"
        if paths.is_lease(name):
            detail = "a lease: a writer has that shard, or had it when it was killed"
        yield note("staging", f"{paths.STAGING}/{printable(name)}", detail)


def _expected(known: Known) -> set[str]:
    out = {paths.HEADER, paths.MANIFEST, paths.MANIFEST_SUMS}
    out |= {f"{paths.INDEX}/{name}.npy" for name in index.COLUMNS}
    out |= {f"{paths.LAYOUTS}/{paths.numbered(n)}" for n in range(max(1, len(known.layouts)))}
    shards = (*known.records, *known.not_judged)
    out |= {f"{paths.RECORDS}/{paths.numbered(n)}" for n in shards}
    out |= {paths.tombstone(Path(), s.shard, s.number).as_posix() for s in known.tombstones}
    out |= set(zarrmeta.documents(known.header, 0))
    for record in known.records.values():
        out |= set(record.files)
    return out


def _of_shards(relative: str, shards: set[int]) -> bool:
    """Whether a path belongs to one of these shards (whose record cannot say so)."""
    directory, _, name = relative.partition("/")
    if directory == paths.TOMBSTONES:
        stone = paths.tombstone_of(name)
        return stone is not None and stone[0] in shards
    _, found, chunk = relative.rpartition("/c/")
    number = chunk.partition("/")[0]
    return bool(found) and number.isascii() and number.isdecimal() and len(number) < 20 and int(number) in shards
