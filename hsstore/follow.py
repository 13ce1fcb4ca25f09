"""Following a store that is being written: its records as they are committed, until none is missing.

Looks at the names in a few directories and reads what is new; needs no word from a writer, on this machine or another.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from hsstore import manifest, snapshot
from hsstore.records import ShardRecord, StoreHeader

POLL_SECONDS = 0.5


def records(root: Path, header: StoreHeader) -> Iterator[ShardRecord]:
    """The record of every committed shard that is not quarantined, then of each as it is committed.

    Ends when every shard that was laid out is committed or quarantined. Raises `DamagedError` for a record that cannot
    be trusted.
    """
    seen: set[int] = set()
    while True:
        waiting = open_shards(root, header)  # asked first: what is committed after this look is seen by the next one
        live = snapshot.live_shards(root, header)
        for shard in live:
            if shard not in seen:
                yield manifest.load_record(root, header, shard)
        seen.update(live)
        if not waiting:
            return
        time.sleep(POLL_SECONDS)


def open_shards(root: Path, header: StoreHeader) -> set[int]:
    """Shards that were laid out, have no record and are not quarantined."""
    laid_out = {shard for layout in manifest.load_layouts(root, header) for shard in layout.numbers}
    dead = manifest.quarantined(manifest.load_tombstones(root, header))
    return laid_out - set(snapshot.committed_shards(root)) - set(dead)
