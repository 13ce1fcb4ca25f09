"""Publication: the files of a committed shard get their final names, by whoever comes by.

Step 4 of the commit protocol (docs/design/002-commit.md). Idempotent, and never in the place of another file.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

from hsstore import durable, owner, paths, zarrmeta
from hsstore.digest import sha256_file
from hsstore.errors import DamagedError
from hsstore.records import FileEntry, ShardRecord, StoreHeader


def publish(root: Path, header: StoreHeader, record: ShardRecord) -> None:
    """Every staged file gets its final name, then staging goes.

    Raises `DamagedError` when another file has a final name already; staging is kept then.
    """
    directory = paths.staging(root, record.shard, record.attempt)
    for spec in header.arrays:
        relative = zarrmeta.chunk_path(spec, record.shard)
        _publish_file(root, directory / paths.staged_name(spec.name), relative, record.files[relative])
    with contextlib.suppress(OSError):  # whoever opens the store for writing next takes what is left
        owner.remove(directory)


def roll_forward(root: Path, header: StoreHeader, records: Iterable[ShardRecord]) -> None:
    """Finish what crashed between record and publication: what still has its staging directory."""
    for record in records:
        if paths.staging(root, record.shard, record.attempt).is_dir():
            publish(root, header, record)


def _publish_file(root: Path, staged: Path, relative: str, entry: FileEntry) -> None:
    final = root / relative
    durable.make_dirs(final.parent, root)
    try:
        done = durable.link_new(staged, final) or durable.same_file(staged, final)
    except FileNotFoundError:
        done = final.exists()  # another one has published it and removed the staged name
    if not done and not (final.stat().st_size == entry.bytes and sha256_file(final) == entry.sha256):
        raise DamagedError(
            f"{relative} is not the file that its record commits", hint=f"run `hsstore verify manifest {root}`"
        )
    durable.fsync_dir(final.parent)
