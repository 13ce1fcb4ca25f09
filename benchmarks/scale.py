"""How long opening, looking at, verifying and planning take at the origin run's size, and how planning grows.

    python benchmarks/scale.py [--dir DIR] [--keep] [--samples 100000 1000000 10000000]

Makes a store of 37,312 samples and 87.8 M tokens in 4 states of 7,168: some 1,340 shards of 65,536 rows, 5 TB in all.
Its layout, records, footers, manifest and index are written by the code that writes every store; its rows are holes,
which read as zeros and take no disk, and their digests are true. Every line is measured in a process of its own: the
best time of several and the time on a CPU (which other work on the machine does not change), the greatest resident set.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from hsstore import index, layout, zarrmeta  # noqa: E402
from hsstore.console import human_bytes  # noqa: E402
from hsstore.digest import crc32c, encode_blocks  # noqa: E402
from hsstore.plan import Plan, PlanParameters  # noqa: E402
from hsstore.records import (  # noqa: E402
    FORMAT,
    ArraySpec,
    ArrayStatistics,
    FileEntry,
    ManifestShard,
    SampleEntry,
    ShardRecord,
    Split,
    StoreHeader,
    canonical,
    sealed,
)
from hsstore.store import Store  # noqa: E402
from hsstore.writer import StoreWriter  # noqa: E402
from tests.stores import capture, input_summary  # noqa: E402

N_SAMPLES, N_TOKENS, HIDDEN, ROWS, CHUNK = 37_312, 87_800_000, 7_168, 65_536, 256
STATES = ("after_2", "after_30", "after_57", "final")


def lengths_like_the_origin() -> list[int]:
    """Log-normal lengths with the origin's number of samples and of tokens."""
    drawn = np.random.default_rng(0).lognormal(0.0, 0.75, N_SAMPLES)
    lengths = np.clip(drawn * (N_TOKENS / drawn.sum()), 32, ROWS // 4).astype(int)
    each, rest = divmod(N_TOKENS - int(lengths.sum()), N_SAMPLES)
    lengths += each
    lengths[:rest] += 1
    return [int(n) for n in lengths]


class ZeroDigests:
    """SHA-256 of as many zero bytes as a file has blocks, then its footer: one pass over the largest one."""

    def __init__(self, spec: ArraySpec, block_counts: Sequence[int]) -> None:
        block = bytes(CHUNK * spec.row_bytes)
        self.block_crc = crc32c(block)
        self._states: dict[int, Any] = {}
        sha, done = hashlib.sha256(), 0
        for wanted in sorted(set(block_counts)):
            for _ in range(wanted - done):
                sha.update(block)
            done = wanted
            self._states[wanted] = sha.copy()

    def of(self, n_blocks: int, footer: bytes) -> str:
        sha = self._states[n_blocks].copy()
        sha.update(footer)
        return str(sha.hexdigest())


def make_store(root: Path) -> None:
    rng = np.random.default_rng(1)
    uids = rng.bytes(16 * N_SAMPLES).hex()
    lengths = lengths_like_the_origin()
    samples = [SampleEntry(uids[32 * i : 32 * i + 32], i, 0, n) for i, n in enumerate(lengths)]
    writer = StoreWriter.create(
        root,
        capture=capture(HIDDEN, STATES),
        split=Split(salt="hsstore", validation_fraction=0.02),
        samples=samples,
        input_summary=input_summary(N_SAMPLES),
        shard_rows=ROWS,
        chunk_rows=CHUNK,
    )
    shards = layout.assign(samples, ROWS)
    used = [zarrmeta.used_blocks(layout.rows_in_use(s), CHUNK) for s in shards]
    digests = {spec.name: ZeroDigests(spec, used) for spec in writer.header.arrays}
    for number, entries in enumerate(shards):
        record = make_shard(root, writer.header, number, entries, digests)
        (root / "records" / f"{number:06d}.json").write_bytes(canonical(record))
    writer.finish()


def make_shard(
    root: Path, header: StoreHeader, number: int, entries: Sequence[SampleEntry], digests: dict[str, ZeroDigests]
) -> ShardRecord:
    """The files of a shard, all holes but their footers, and the record that commits them."""
    n_rows = layout.rows_in_use(entries)
    used = zarrmeta.used_blocks(n_rows, CHUNK)
    files = {}
    for spec in header.arrays:
        relative, size = zarrmeta.chunk_path(spec, number), zarrmeta.data_bytes(spec, n_rows, CHUNK)
        footer = zarrmeta.footer(spec, n_rows=n_rows, shard_rows=ROWS, chunk_rows=CHUNK)
        (root / relative).parent.mkdir(parents=True, exist_ok=True)
        with open(root / relative, "xb") as file:
            file.truncate(size)
            file.seek(size)
            file.write(footer)
        known = digests[spec.name]
        blocks = encode_blocks([known.block_crc] * used)
        files[relative] = FileEntry(bytes=size + len(footer), sha256=known.of(used, footer), crc32c_blocks=blocks)
    zero = ArrayStatistics(rms=0.0, absmax=0.0, nan=0, inf=0)
    return sealed(
        ShardRecord(
            format=FORMAT,
            store_uuid=header.uuid,
            shard=number,
            attempt="0" * 16,
            n_rows=n_rows,
            samples=tuple(entries),
            files=files,
            statistics={f"hidden/{state}": zero for state in STATES},
            failures={},
            writer={"hsstore": "benchmark"},
            committed="2026-01-01T00:00:00+00:00",
        )
    )


def part_open(root: str) -> dict[str, float]:
    started = time.perf_counter()
    store = Store.open(root)
    seconds = time.perf_counter() - started
    assert store.state.taken_from == "derived files", store.state.taken_from
    assert len(store.index) == N_SAMPLES
    return {"open": seconds}


def part_records(root: str) -> dict[str, float]:
    """What opening costs when the derived files are not current: the records are read instead."""
    from hsstore import manifest, snapshot

    started = time.perf_counter()
    header = manifest.load_header(Path(root))
    found = snapshot.compile_shards(Path(root), header, snapshot.live_shards(Path(root), header))
    assert len(index.build(found)) == N_SAMPLES
    return {"records": time.perf_counter() - started}


def part_plan(root: str) -> dict[str, float]:
    store = Store.open(root)
    started = time.perf_counter()
    plan = Plan(store.index, store.header.split, store.manifest_id, PlanParameters(max_seq_len=4096, split="all"))
    epoch = plan.epoch(0)
    seconds = time.perf_counter() - started
    assert epoch.n_samples == N_SAMPLES
    return {"plan": seconds, "batches": epoch.n_batches}


def many_shards(n_samples: int) -> Iterator[ManifestShard]:
    """Shards of 1,000 samples of about 300 tokens, one after the other."""
    rng = np.random.default_rng(0)
    for number in range(n_samples // 1000):
        uids = rng.bytes(16_000).hex()
        lengths = np.clip(rng.lognormal(5.4, 0.8, 1000), 2, 8000).astype(int).tolist()
        rows = np.cumsum([0, *lengths]).tolist()
        entries = tuple(
            SampleEntry(uids[32 * i : 32 * i + 32], 1000 * number + i, rows[i], lengths[i]) for i in range(1000)
        )
        yield ManifestShard(shard=number, n_rows=rows[-1], samples=entries, files={})


def part_many(n_samples: str) -> dict[str, float]:
    times = [time.perf_counter()]
    found = index.of_shards(many_shards(int(n_samples)))
    times.append(time.perf_counter())
    plan = Plan(found, Split(salt="s", validation_fraction=0.02), "0" * 64, PlanParameters())
    n_batches = plan.epoch(0).n_batches
    times.append(time.perf_counter())
    return {"index": times[1] - times[0], "plan": times[2] - times[1], "batches": n_batches}


def part_make(root: str) -> dict[str, float]:
    started = time.perf_counter()
    make_store(Path(root))
    totals = Store.open(root).totals
    seconds = time.perf_counter() - started
    return {"bytes": totals.n_bytes, "shards": totals.n_shards, "tokens": totals.n_tokens, "seconds": seconds}


PARTS = {"make": part_make, "open": part_open, "records": part_records, "plan": part_plan, "many": part_many}


@dataclass(frozen=True)
class Child:
    """What a process took."""

    seconds: float
    cpu_seconds: float
    memory: int
    """Greatest resident set in bytes."""
    out: str

    @property
    def found(self) -> dict[str, float]:
        found = json.loads(self.out)
        assert isinstance(found, dict)
        return found


def child(*command: str) -> Child:
    started = time.perf_counter()
    with subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        assert run.stderr is not None
        out, err = run.stdout.read(), run.stderr.read()
        _, status, usage = os.wait4(run.pid, 0)
        run.returncode = os.waitstatus_to_exitcode(status)
    if run.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {run.returncode}: {err}")
    seconds = time.perf_counter() - started
    return Child(seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024, out)


def part(name: str, argument: str) -> Child:
    return child(__file__, "--part", name, argument)


def row(what: str, seconds: float, runs: Sequence[Child], wanted: str = "", *, whole: bool = False) -> None:
    cpu = f"{min(r.cpu_seconds for r in runs):.2g} s" if whole else ""
    print(f"| {what} | {seconds:.3f} s | {cpu} | {max(r.memory for r in runs) / 1e6:.0f} MB | {wanted} |", flush=True)


def measure_store(root: str) -> None:
    print("\n| at the origin's size | time | CPU | memory | wanted |\n|---|---|---|---|---|")
    for name, what, wanted in (
        ("open", "`Store.open`", "0.1 s, 300 MB"),
        ("records", "… from the records, derived files missing", ""),
        ("plan", "plan of an epoch of all samples, 4,096 tokens", ""),
    ):
        runs = [part(name, root) for _ in range(5)]
        row(what, min(r.found[name] for r in runs), runs, wanted)
    for verb, wanted in ((("info",), "0.3 s, 300 MB"), (("ls", "--limit", "1"), ""), (("verify", "manifest"), "2 s")):
        runs = [child("-m", "hsstore.cli", *verb, root) for _ in range(5)]
        row(f"`hsstore {' '.join(verb)}`, whole process", min(r.seconds for r in runs), runs, wanted, whole=True)


def measure_growth(sizes: Sequence[int]) -> None:
    print("\n| samples | index | plan of an epoch | µs a sample | memory | bytes a sample |\n|---|---|---|---|---|---|")
    base = child("-c", f"import sys; sys.path.insert(0, {str(ROOT)!r}); import benchmarks.scale").memory
    for n in sizes:
        run = part("many", str(n))
        found, memory = run.found, run.memory
        micro = (found["index"] + found["plan"]) / n * 1e6
        print(
            f"| {n:,} | {found['index']:.2f} s | {found['plan']:.2f} s | {micro:.2f} | {memory / 1e6:.0f} MB |"
            f" {(memory - base) / n:.0f} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, help="Where to make the store, and to find it the next time with --keep.")
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--samples", type=int, nargs="*", default=[100_000, 1_000_000, 10_000_000])
    parser.add_argument("--part", nargs=2, metavar=("NAME", "ARGUMENT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        print(json.dumps(PARTS[options.part[0]](options.part[1])))
        return
    with tempfile.TemporaryDirectory() as temporary:
        root = (options.dir or Path(temporary)) / "origin"
        if not root.exists():
            made = part("make", str(root)).found
            print(f"{human_bytes(made['bytes'])}, {made['shards']:,} shards, {made['tokens']:,} tokens")
            print(f"made in {made['seconds']:.0f} s")
        measure_store(str(root))
        measure_growth(options.samples)
        if options.dir and not options.keep:
            subprocess.run(["rm", "-r", str(root)], check=True)


if __name__ == "__main__":
    main()
