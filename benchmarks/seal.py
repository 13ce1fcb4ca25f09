"""Sealing and committing a shard, as a share of `dd conv=fsync` of the same bytes to the same disk, interleaved.

    python benchmarks/seal.py [--gib 1] [--turns 5] [--hidden 2048] [--directory .]

Each turn fills a staged shard (its bytes are in the page cache then, dirty, as an engine leaves them) and times
`StagedShard.commit`: SHA-256, CRC32C and statistics of every byte, fsync, record, publication. `dd` writes as many new
files of the same size from the page cache and fsyncs them. Which goes first alternates. The share must be 0.8 or more.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from hsstore.layout import assign  # noqa: E402
from hsstore.records import SampleEntry, Split  # noqa: E402
from hsstore.staged import StagedShard  # noqa: E402
from hsstore.writer import StoreWriter  # noqa: E402
from tests.stores import capture, input_summary  # noqa: E402

STATES = ("after_2", "after_8", "after_13", "final")
SAMPLE_TOKENS = 2048
TARGET = 0.8


def entries_of(n_samples: int) -> list[SampleEntry]:
    return [SampleEntry(f"{i:032x}", i, 0, SAMPLE_TOKENS) for i in range(n_samples)]


def make_writer(root: Path, entries: list[SampleEntry], hidden: int, rows: int) -> StoreWriter:
    return StoreWriter.create(
        root,
        capture=capture(hidden, STATES),
        split=Split(salt="hsstore", validation_fraction=0.1),
        samples=entries,
        input_summary=input_summary(len(entries)),
        shard_rows=rows,
    )


def stage(writer: StoreWriter, shard: int, entries: list[SampleEntry], rows: np.ndarray) -> StagedShard:
    """A staged shard of real-looking states: `rows` [T, H], rotated by the sample so that no two are equal."""
    placed = assign(entries, writer.header.shard_rows)[shard]
    ids, mask = np.arange(SAMPLE_TOKENS, dtype=np.int32), np.ones(SAMPLE_TOKENS, np.uint8)
    staged = writer.stage(shard, placed, {e.source_index: (ids, mask) for e in placed})
    for number, path in enumerate(staged.files.values()):
        with open(path, "r+b", buffering=0) as file:
            for e in placed:
                turned = np.roll(rows, e.source_index * 7 + number, axis=0)
                os.pwrite(file.fileno(), turned.data, e.row * rows.strides[0])
    return staged


def dd(sources: list[Path], directory: Path) -> float:
    """Seconds to write copies of the files, one after the other, each with an fsync at its end."""
    copies = [directory / f"{n}.dd" for n in range(len(sources))]
    for source in sources:  # from the page cache, not from the disk
        subprocess.run(["dd", f"if={source}", "of=/dev/null", "bs=8M", "status=none"], check=True)
    start = time.perf_counter()
    for source, copy in zip(sources, copies, strict=True):
        arguments = ["dd", f"if={source}", f"of={copy}", "bs=8M", "conv=fsync", "status=none"]
        subprocess.run(arguments, check=True)
    seconds = time.perf_counter() - start
    for copy in copies:
        copy.unlink()
    return seconds


def turn(
    writer: StoreWriter, shard: int, entries: list[SampleEntry], rows: np.ndarray, sources: list[Path]
) -> tuple[float, float]:
    """(GB/s of commit, GB/s of dd) of one shard."""

    def committed() -> float:
        staged = stage(writer, shard, entries, rows)
        start = time.perf_counter()
        record = staged.commit()
        seconds = time.perf_counter() - start
        assert record is not None
        return seconds

    def written() -> float:
        return dd(sources, writer.root.parent)

    n_bytes, seconds = sum(p.stat().st_size for p in sources), {}
    for call in (committed, written) if shard % 2 else (written, committed):
        os.sync()  # nothing of what went before is left to either
        seconds[call] = call()
    return n_bytes / seconds[committed] / 1e9, n_bytes / seconds[written] / 1e9


def make_sources(directory: Path, n_bytes: int, rows: np.ndarray) -> list[Path]:
    """As many files of as many bytes as a shard has, for dd to read from the page cache."""
    directory.mkdir()
    paths = [directory / state for state in STATES]
    for number, path in enumerate(paths):
        with open(path, "wb") as file:
            for k in range(n_bytes // rows.nbytes):
                file.write(np.roll(rows, k * 7 + number, axis=0).data)
    return paths


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0, help="bytes of a shard")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to measure")
    options = parser.parse_args()
    per_shard = max(1, int(options.gib * 2**30) // (SAMPLE_TOKENS * options.hidden * 2 * len(STATES)))
    rows_per_shard = 1 << (per_shard * SAMPLE_TOKENS - 1).bit_length()
    per_shard = rows_per_shard // SAMPLE_TOKENS
    rng = np.random.default_rng(0)
    rows = (rng.standard_normal((SAMPLE_TOKENS, options.hidden), np.float32).view(np.uint32) >> 16).astype(np.uint16)
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        entries = entries_of(per_shard * options.turns)
        writer = make_writer(Path(directory) / "store", entries, options.hidden, rows_per_shard)
        sources = make_sources(Path(directory) / "sources", rows_per_shard * options.hidden * 2, rows)
        rates = [turn(writer, n, entries, rows, sources) for n in range(options.turns)]
    for n, (seal, copy) in enumerate(rates):
        print(f"turn {n + 1}: commit {seal:.2f} GB/s, dd conv=fsync {copy:.2f} GB/s, share {seal / copy:.2f}")
    seal, copy = (statistics.harmonic_mean(column) for column in zip(*rates, strict=True))
    size = per_shard * SAMPLE_TOKENS * options.hidden * 2 * len(STATES)
    print(f"{len(rates)} turns of {size / 1e9:.2f} GB: commit {seal:.2f} GB/s, dd {copy:.2f} GB/s,", end=" ")
    print(f"share of all bytes over all seconds {seal / copy:.2f} (must be {TARGET} or more)")
    return 0 if seal / copy >= TARGET else 1


if __name__ == "__main__":
    sys.exit(main())
