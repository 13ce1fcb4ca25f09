"""What was built from the records, checked: index, manifest.json, manifest.sha256.

A build may be older than the records, or cut short by a kill: a note. What no build would have written is damage. Never
raises on damage.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from hsstore import index, manifest, paths
from hsstore.errors import HsstoreError
from hsstore.findings import Finding, damage, stale
from hsstore.known import Known, manifest_on_disk, small_file
from hsstore.reading import raise_if_ours
from hsstore.records import ShardRecord, canonical, sha256_hex

_REBUILD = "{}; `hsstore manifest build` rebuilds it"


def listed(known: Known) -> Iterator[Finding]:
    """Layouts and tombstones that the last build knew: without its tombstone a shard would come back unseen."""
    lines = (small_file(known, paths.MANIFEST_SUMS) or b"").decode("utf-8", "replace").splitlines()
    for name in sorted({line[66:] for line in lines}):
        directory, _, file = name.partition("/")
        is_layout = directory == paths.LAYOUTS and paths.number_of(file) is not None
        is_tombstone = directory == paths.TOMBSTONES and paths.tombstone_of(file) is not None
        if (is_layout or is_tombstone) and not os.path.lexists(known.root / name):
            yield damage("missing", name, f"{paths.MANIFEST_SUMS} lists it")


def derived(known: Known) -> Iterator[Finding]:
    if known.unreadable or not known.layouts_sound:
        yield from _agreement(known)  # what should be derived is not known before all records are
        return
    current = _built_from(known, known.records.values())
    known.manifest_id = sha256_hex(current[paths.MANIFEST])
    found = {relative: small_file(known, relative) for relative in current}
    if found == current:
        yield from _unkept(known, paths.kept_manifest(Path(), known.manifest_id))
        return
    interrupted = _was_interrupted(known)
    if found[paths.MANIFEST] is None and (interrupted or not any(found.values())):
        yield stale(paths.MANIFEST, "not built yet")
        return
    body, older = found[paths.MANIFEST], _older(known)
    if body not in (current[paths.MANIFEST], older[paths.MANIFEST]) and _is_of_one_build(known, found):
        yield stale(paths.MANIFEST, "older than a quarantine")
        return
    states = [current, older]
    if not interrupted:  # all of it is of one build: the one that explains most of it
        states = [min(states, key=lambda state: sum(state[name] != data for name, data in found.items()))]
    if older in states and older != current and body == older[paths.MANIFEST]:
        yield stale(paths.MANIFEST, "older than the records")
    for relative, data in found.items():
        if data is None:
            yield damage("missing", relative, _REBUILD.format("missing"))
        elif all(data != state[relative] for state in states):
            yield damage("derived", relative, _REBUILD.format("not what it was built as"))


def _unkept(known: Known, kept: Path) -> Iterator[Finding]:
    """The note that the current manifest is not kept, in a store that keeps them."""
    try:
        if not stat.S_ISDIR(os.stat(known.root / paths.MANIFESTS).st_mode):
            return
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise_if_ours(error)
        yield damage("read", paths.MANIFESTS, f"cannot be read: {error.strerror}")
        return
    try:
        os.lstat(known.root / kept)
    except FileNotFoundError:
        yield stale(kept.as_posix(), "missing, so that no reader can pin this state")
    except OSError as error:
        raise_if_ours(error)
        yield damage("read", kept.as_posix(), f"cannot be read: {error.strerror}")


def _agreement(known: Known) -> Iterator[Finding]:
    """Whether what was built agrees with itself and with what is known: manifest.sha256 lists the others."""
    if _was_interrupted(known):
        return  # files of two builds
    names = [*(f"{paths.INDEX}/{name}.npy" for name in index.COLUMNS), paths.MANIFEST]
    found = {name: small_file(known, name) for name in (paths.MANIFEST_SUMS, *names)}
    if not any(found.values()):
        return  # not built yet
    sums = found.pop(paths.MANIFEST_SUMS)
    lines = (sums or b"").decode("utf-8", "replace").splitlines()
    listed = {line[66:]: line[:64] for line in lines}
    expected = {paths.HEADER: sha256_hex(canonical(known.header))}
    for record in known.records.values():
        expected |= {name: entry.sha256 for name, entry in record.files.items()}
    if sums is None:
        yield damage("missing", paths.MANIFEST_SUMS, _REBUILD.format("missing"))
    elif paths.HEADER not in listed or any(listed.get(n, sha256) != sha256 for n, sha256 in expected.items()):
        yield damage("derived", paths.MANIFEST_SUMS, _REBUILD.format("not a list of what this store holds"))
        listed = {}
    for name, data in found.items():
        if data is None:
            yield damage("missing", name, _REBUILD.format("missing"))
        elif name in listed and listed[name] != sha256_hex(data):
            yield damage("derived", name, _REBUILD.format("does not have the SHA-256 that manifest.sha256 lists"))


def _was_interrupted(known: Known) -> bool:
    try:
        return manifest.build_was_interrupted(known.root)
    except OSError as error:
        raise_if_ours(error)
        return False  # that the names cannot be listed `namecheck` says


def _built_from(known: Known, records: Iterable[ShardRecord]) -> dict[str, bytes]:
    return manifest.derived(known.header, known.layouts, list(records), known.tombstones)


def _is_of_one_build(known: Known, found: Mapping[str, bytes | None]) -> bool:
    """Whether a build that names a quarantined shard, whose record may be lost, agrees with its own list of SHA-256."""
    disk = manifest_on_disk(known)
    if disk is None or not {s.shard for s in disk.shards} & set(known.quarantined):
        return False
    lines = set((found[paths.MANIFEST_SUMS] or b"").decode("utf-8", "replace").splitlines())
    built = {name: data for name, data in found.items() if name != paths.MANIFEST_SUMS}
    return all(data is not None and f"{sha256_hex(data)}  {name}" in lines for name, data in built.items())


def _older(known: Known) -> dict[str, bytes]:
    """What was built from the shards that manifest.json on disk names and what manifest.sha256 lists beside them.

    Commits, growth and quarantine may have overtaken it; what is quarantined now was a shard like others then.
    """
    lines = (small_file(known, paths.MANIFEST_SUMS) or b"").decode("utf-8", "replace").splitlines()
    listed = {line[66:] for line in lines}
    n_layouts = sum(name.startswith(f"{paths.LAYOUTS}/") for name in listed)
    tombstones = [s for s in known.tombstones if paths.tombstone(Path(), s.shard, s.number).as_posix() in listed]
    disk = manifest_on_disk(known)
    named = {s.shard for s in disk.shards} if disk else set(known.records)
    records = [r for n, r in known.records.items() if n in named]
    for shard in named & set(known.quarantined):
        try:
            records.append(manifest.load_record(known.root, known.header, shard))
        except HsstoreError:
            continue  # it need not be readable; what names it is then judged as a build of its own
    return manifest.derived(known.header, known.layouts[: n_layouts or None], records, tombstones)
