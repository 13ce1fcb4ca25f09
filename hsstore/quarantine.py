"""Shards that must not be used: a tombstone with a reason, and the way back.

A quarantined shard leaves the manifest; readers, plans and services opened later do not see it. What it held is
extracted again under a new shard number (`growth`). Nothing is removed here; `garbage` may remove its files.
"""

from __future__ import annotations

from pathlib import Path

from hsstore import durable, manifest, paths
from hsstore.errors import ConflictError, HsstoreError, NotFoundError, UsageError
from hsstore.records import FORMAT, StoreHeader, Tombstone, canonical, sealed
from hsstore.staged import now, this_writer


def quarantine(root: Path, shard: int, reason: str) -> Tombstone:
    """Take a shard out of use. Returns its tombstone, also when it was quarantined before.

    Raises `NotFoundError` for a shard that no layout has, `UsageError` without a reason.
    """
    if not reason.strip():
        raise UsageError("expected a reason, found none", hint="give --reason")
    header = manifest.load_header(root)
    _require(root, header, shard)
    before = manifest.quarantined(manifest.load_tombstones(root, header)).get(shard)
    return before or _bury(root, header, shard, "quarantine", reason.strip())


def release(root: Path, shard: int, reason: str) -> Tombstone:
    """Take a shard back into use.

    Raises `ConflictError` when its samples were placed again meanwhile, `UsageError` when it is not quarantined.
    """
    header = manifest.load_header(root)
    _require(root, header, shard)
    if shard not in manifest.quarantined(manifest.load_tombstones(root, header)):
        raise UsageError(f"shard {shard} of {root} is not quarantined")
    held = {s.source_index for s in manifest.load_record(root, header, shard).samples}
    for number, layout in enumerate(manifest.load_layouts(root, header)):
        if layout.samples and held.intersection(layout.samples):
            raise ConflictError(
                f"the samples of shard {shard} were placed again by {paths.layout(root, number)}",
                hint="extract those with `hsstore extract … --resume`; the old rows are not needed any more",
            )
    return _bury(root, header, shard, "release", reason.strip())


def shard_of(root: Path, source_index: int) -> int:
    """The shard in use that holds a sample. Raises `NotFoundError`."""
    header = manifest.load_header(root)
    dead = manifest.quarantined(manifest.load_tombstones(root, header))
    for shard in paths.numbers_in(root / paths.RECORDS):
        if shard in dead:
            continue
        try:
            record = manifest.load_record(root, header, shard)
        except HsstoreError:
            continue  # it cannot say what it holds; it is quarantined by its number
        if any(s.source_index == source_index for s in record.samples):
            return shard
    raise NotFoundError(f"no committed shard of {root} holds sample {source_index}", hint=f"run `hsstore ls {root}`")


def _require(root: Path, header: StoreHeader, shard: int) -> None:
    last = manifest.load_layouts(root, header)[-1].numbers.stop - 1
    if not 0 <= shard <= last:
        raise NotFoundError(f"{root} has no shard {shard}; its shards are 0 to {last}")


def _bury(root: Path, header: StoreHeader, shard: int, action: str, reason: str) -> Tombstone:
    durable.make_dirs(root / paths.TOMBSTONES, root)
    while True:
        before = [stone for stone in manifest.load_tombstones(root, header) if stone.shard == shard]
        if before and before[-1].action == action:
            return before[-1]  # another process was faster with the same
        number = len(before)
        stone = sealed(
            Tombstone(
                format=FORMAT,
                store_uuid=header.uuid,
                shard=shard,
                number=number,
                action="quarantine" if action == "quarantine" else "release",
                reason=reason,
                created=now(),
                writer=this_writer(),
            )
        )
        if durable.write_new(paths.tombstone(root, shard, number), canonical(stone)):
            return stone
