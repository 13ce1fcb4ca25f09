"""`hsstore verify manifest --full` as a share of `sha256sum` on all cores, over the same files, interleaved in one run.

    python benchmarks/verify.py [--gib 2] [--repeats 3] [--directory DIR]

A synthetic store of random states is written with the real writer. Warm: the files lie in the page cache, verify is
told to use it (`--cached`). Cold: the page cache is asked to forget the files before each run, of both; verify reads
past it as it does by default. Whole processes are timed, start included. `openssl dgst -sha256`, which uses the SHA
instructions of the processor where the system's `sha256sum` may not, is there as a harder yardstick. Exit code 1 below
0.9 × sha256sum.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from hsstore.digest import sample_uid  # noqa: E402
from hsstore.layout import assign  # noqa: E402
from hsstore.parallel import cores  # noqa: E402
from hsstore.records import SampleEntry, Split  # noqa: E402
from hsstore.writer import StoreWriter  # noqa: E402
from tests.stores import capture, input_summary  # noqa: E402

HIDDEN, SAMPLE_ROWS, SHARD_ROWS = 4096, 2048, 16384  # hidden files of 128 MiB
LAYERS = ("after_2", "after_16", "after_29", "final")


def build(root: Path, gib: float) -> list[Path]:
    """A store of about that size. Returns its shard files."""
    n_samples = max(1, round(gib * 2**30 / (SAMPLE_ROWS * HIDDEN * 2 * len(LAYERS))))
    ids, mask = np.zeros(SAMPLE_ROWS, np.int32), np.ones(SAMPLE_ROWS, np.uint8)
    entries = [SampleEntry(sample_uid(ids + i, mask), i, 0, SAMPLE_ROWS) for i in range(n_samples)]
    writer = StoreWriter.create(
        root,
        capture=capture(HIDDEN, LAYERS),
        split=Split(salt="hsstore", validation_fraction=0.1),
        samples=entries,
        input_summary=input_summary(n_samples),
        shard_rows=SHARD_ROWS,
    )
    shards = assign(entries, SHARD_ROWS)
    for shard in writer.todo():
        staged = writer.stage(shard, shards[shard], {e.source_index: (ids, mask) for e in shards[shard]})
        for path in staged.files.values():
            with open(path, "r+b") as file:
                for _ in range(os.path.getsize(path) >> 20):
                    file.write(os.urandom(1 << 20))
        staged.commit()
    writer.finish()
    return sorted(p for p in (root / "arrays.zarr").rglob("c/**/*") if p.is_file())


def forget(files: list[Path]) -> None:
    """Ask the page cache to drop the files."""
    for path in files:
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def on_all_cores(files: list[Path], *command: str) -> Callable[[], None]:
    names = b"\0".join(os.fsencode(p) for p in files)
    line = ["xargs", "-0", "-P", str(cores()), "-n", "1", *command]
    return lambda: subprocess.run(line, input=names, stdout=subprocess.DEVNULL, check=True)  # type: ignore[return-value]


def verify(root: Path, state: Path, *options: str) -> Callable[[], None]:
    line = [sys.executable, "-m", "hsstore.cli", "verify", "manifest", str(root), "--full", "--quiet", *options]
    environment = os.environ | {"HSSTORE_STATE_DIR": str(state)}
    return lambda: subprocess.run(line, cwd=ROOT, env=environment, check=True)  # type: ignore[return-value]


def measure(runs: dict[str, Callable[[], None]], before: Callable[[], None], repeats: int) -> dict[str, list[float]]:
    """Seconds of each, taken in turn so that what else the machine does falls on all alike."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(repeats + 1):
        for name, run in runs.items():
            before()
            start = time.perf_counter()
            run()
            if turn:  # the first turn fills caches
                seconds[name].append(time.perf_counter() - start)
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=2.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--directory", help="where the store is written; the system's temporary directory without it")
    options = parser.parse_args()
    worst = 10.0
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        files, state = build(Path(directory, "store"), options.gib), Path(directory, "state")
        size = sum(p.stat().st_size for p in files)
        print(f"{len(files)} shard files, {size / 1e9:.2f} GB, {cores()} cores, {options.repeats} repeats, medians")
        for name, flags in (("warm", ["--cached"]), ("cold", [])):
            runs = {
                "sha256sum": on_all_cores(files, "sha256sum"),
                "verify --full": verify(Path(directory, "store"), state, *flags),
            }
            if shutil.which("openssl"):
                runs["openssl sha256"] = on_all_cores(files, "openssl", "dgst", "-sha256")
            taken = measure(runs, (lambda: None) if name == "warm" else (lambda: forget(files)), options.repeats)
            median = {run: statistics.median(seconds) for run, seconds in taken.items()}
            for run, seconds in median.items():
                share = f"verify is {seconds / median['verify --full']:.2f} of it" if run != "verify --full" else ""
                spread = ", ".join(f"{s:.2f}" for s in taken[run])
                print(f"{name}  {run:<15} {size / seconds / 1e9:6.2f} GB/s  ({spread} s)  {share}".rstrip())
            worst = min(worst, median["sha256sum"] / median["verify --full"])
    print(f"verify --full is at least {worst:.2f} × sha256sum on all cores")
    return 0 if worst >= 0.9 else 1


if __name__ == "__main__":
    sys.exit(main())
