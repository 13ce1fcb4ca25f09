"""Every name in a store's directory: what nothing commits is damage, what attempts left behind a note.

Never raises on damage. Leaves the contents of files that have a place to the other checks.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from hsstore import durable, index, paths, zarrmeta
from hsstore.findings import Finding, damage, note, printable
from hsstore.known import Known, bare, small_file
from hsstore.reading import raise_if_ours
from hsstore.records import sha256_hex


def names(known: Known) -> Iterator[Finding]:
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
        if sha256_hex(small_file(known, relative) or b"") != kept:
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
        yield damage("read", paths.STAGING, f"its names cannot be read: {bare(known, error)}")
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
