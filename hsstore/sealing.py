"""The files of an attempt become what a record can name: footer, digests, statistics, durable, read-only.

Each file is read once, the files in parallel (hashing and numpy release the GIL), while the disk already writes: with
a fast disk and one file after the other, sealing took two to three times as long (benchmarks/seal.py). Leaves to
`staged` what happens when any of it fails: the whole attempt is dropped.

Letters: S rows of a shard, C rows of a block.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hsstore import durable, zarrmeta
from hsstore.digest import digest_file, encode_blocks
from hsstore.errors import DamagedError
from hsstore.parallel import cores
from hsstore.records import ArraySpec, ArrayStatistics, FileEntry, StoreHeader
from hsstore.statistics import Accumulator

Sealed = tuple[FileEntry, ArrayStatistics | None]


def seal(files: Mapping[str, Path], header: StoreHeader, n_rows: int) -> dict[str, Sealed]:
    """Entry and statistics of each file, by array name. The bytes are durable on return, their names are not.

    Raises `DamagedError` for a file that has not the size it was made with, else the first `OSError` met: no fsync is
    tried a second time.
    """
    specs = [header.array(name) for name in files]
    for spec in specs:
        _append_footer(files[spec.name], spec, header, n_rows)
    with (
        ThreadPoolExecutor(len(specs), thread_name_prefix="sync") as disk,
        ThreadPoolExecutor(min(len(specs), cores()), thread_name_prefix="digest") as processors,
    ):
        synced = [disk.submit(durable.fsync_file, files[spec.name]) for spec in specs]
        digested = [processors.submit(_digest, files[spec.name], spec, header, n_rows) for spec in specs]
        try:
            for future in synced:
                future.result()
            out = {spec.name: future.result() for spec, future in zip(specs, digested, strict=True)}
        except BaseException:
            processors.shutdown(wait=False, cancel_futures=True)
            raise
    for path in files.values():
        os.chmod(path, 0o444)
    return out


def _append_footer(path: Path, spec: ArraySpec, header: StoreHeader, n_rows: int) -> None:
    size = zarrmeta.data_bytes(spec, n_rows, header.chunk_rows)
    found = path.stat().st_size
    if found != size:
        raise DamagedError(f"{path} has {found} bytes, expected {size}")
    footer = zarrmeta.footer(spec, n_rows=n_rows, shard_rows=header.shard_rows, chunk_rows=header.chunk_rows)
    with open(path, "ab") as file:
        file.write(footer)


def _digest(path: Path, spec: ArraySpec, header: StoreHeader, n_rows: int) -> Sealed:
    accumulator = Accumulator(n_rows, header.chunk_rows, spec) if spec.row_shape else None
    digest = digest_file(
        path,
        block_bytes=header.chunk_rows * spec.row_bytes,
        n_blocks=zarrmeta.used_blocks(n_rows, header.chunk_rows),
        visit=accumulator.add if accumulator else None,
    )
    entry = FileEntry(bytes=digest.n_bytes, sha256=digest.sha256, crc32c_blocks=encode_blocks(digest.blocks))
    return entry, accumulator.result() if accumulator else None
