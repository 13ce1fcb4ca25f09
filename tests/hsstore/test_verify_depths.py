"""What each depth reads and what it can therefore see; parts add up; a drawn sample can be drawn again."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from hsstore import units, zarrmeta
from hsstore.depth import Budget, Extent, Part, Sample, choose, part_of
from hsstore.errors import UsageError
from hsstore.store import Store
from hsstore.verify import Depth, Verifier
from tests.stores import make_samples, make_store

ROWS, WIDTH, CHUNK = 512, 1024, 64


def extents(n: int) -> list[Extent]:
    """As at the origin: six files a shard, four of them large."""
    kinds = [(1 << 29, 3_670_016, 146)] * 4 + [(1 << 20, 4096, 256), (1 << 16, 256, 256)]
    return [
        Extent(name=f"a{k}/c/{shard}", n_bytes=size, block_bytes=block, n_blocks=blocks)
        for shard in range(n)
        for k, (size, block, blocks) in enumerate(kinds)
    ]


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store whose hidden files are read neither whole nor in spots by quick: blocks of 128 KiB."""
    samples = make_samples([200, 300, 150, 170], hidden_size=WIDTH, layers=("after_2", "final"))
    path = tmp_path_factory.mktemp("large") / "store"
    make_store(path, samples, shard_rows=ROWS, chunk_rows=CHUNK).close()
    return path


def flip(path: Path, at: int) -> None:
    path.chmod(0o644)
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def damaged(root: Path, depth: Depth) -> list[str]:
    return [f.file for f in Verifier(root, depth).findings() if f.severity == "damage"]


@pytest.mark.parametrize("total", [1, 2, 3, 7, 100])
def test_the_parts_are_all_files_once(total: int) -> None:
    files = extents(50)
    choices = [choose(Part(n=n, total=total), files) for n in range(1, total + 1)]
    for i, extent in enumerate(files):
        whole = sum(choice[i].whole for choice in choices)
        assert whole == (total if extent.n_bytes <= 1 << 17 else 1)


def test_a_file_stays_in_its_part_and_parts_are_even() -> None:
    counts = [sum(part_of(e.name, 7) == n for e in extents(1341)) for n in range(1, 8)]
    assert sum(counts) == 8046
    assert max(counts) < 1.15 * min(counts)
    assert part_of("arrays.zarr/hidden/final/c/0/0", 7) == 7, "the same in every release, or parts would not add up"


@pytest.mark.parametrize("fraction", [0.0001, 0.05, 1.0])
def test_a_sample_is_its_share_of_the_blocks(fraction: float) -> None:
    files = extents(20)
    drawn = choose(Sample(fraction=fraction, seed=5), files)
    assert drawn == choose(Sample(fraction=fraction, seed=5), files)
    total = sum(e.n_blocks for e in files if e.n_bytes > 1 << 17)
    spots = {(i, b) for i, c in enumerate(choose("quick", files)) for b in c.blocks}
    found = {(i, b) for i, c in enumerate(drawn) for b in c.blocks}
    assert spots <= found
    expected = max(1, round(fraction * total))
    assert expected <= len(found) <= expected + len(spots)
    for extent, choice in zip(files, drawn, strict=True):
        assert list(choice.blocks) == sorted(set(choice.blocks))
        assert all(0 <= b < extent.n_blocks for b in choice.blocks)
    if fraction < 1:
        assert drawn != choose(Sample(fraction=fraction, seed=6), files)


def test_a_sample_falls_on_all_files_alike() -> None:
    drawn = choose(Sample(fraction=0.2, seed=0), extents(100))
    counts = [len(c.blocks) for c, e in zip(drawn, extents(100), strict=True) if e.block_bytes > 1 << 17]
    assert min(counts) > 8
    assert max(counts) < 60


@pytest.mark.parametrize("n_bytes", [1, 10_000_000, 10**9, 10**15])
def test_a_budget_is_kept_and_used(n_bytes: int) -> None:
    files = extents(20)
    spots = [set(c.blocks) for c in choose("quick", files)]
    drawn = choose(Budget(n_bytes=n_bytes, seed=3), files)
    n = sum(e.block_bytes * len(set(c.blocks) - s) for e, c, s in zip(files, drawn, spots, strict=True))
    largest = max(e.block_bytes for e in files)
    everything = sum(e.block_bytes * e.n_blocks for e in files if e.n_bytes > 1 << 17)
    assert min(n_bytes, everything) - 4 * largest < n <= max(n_bytes, largest)


def test_what_is_drawn_is_the_same_on_every_machine() -> None:
    drawn = choose(Sample(fraction=0.003, seed=1), extents(2))
    large = [(i, c.blocks) for i, c in enumerate(drawn) if c.blocks and i % 6 < 4]
    assert large == [(3, (59,)), (6, (47, 144)), (8, (58,)), (9, (129,))]


def test_quick_reads_no_block_of_a_large_file(large: Path) -> None:
    verifier = Verifier(large, "quick")
    assert list(verifier.findings()) == []
    with Store.open(large) as store:
        header, expected = store.header, 0
        for shard in store.manifest.shards:
            for spec in header.arrays:
                size, _ = shard.files[zarrmeta.chunk_path(spec, shard.shard)]
                expected += 16 * (ROWS // CHUNK) + 4 + (0 if spec.row_shape else size)
    assert verifier.summary.bytes_read == verifier.summary.bytes_to_read == expected


def test_each_depth_sees_what_it_reads(large: Path, tmp_path: Path) -> None:
    """A flipped bit in a large file: not by quick, by full, by exactly one part, by a sample of everything."""

    root = Path(shutil.copytree(large, tmp_path / "s"))
    name = "arrays.zarr/hidden/after_2/c/0/0"
    flip(root / name, 5 * CHUNK * WIDTH * 2 + 77)
    assert damaged(root, "quick") == []
    assert damaged(root, "full") == [name]
    assert [damaged(root, Part(n=n, total=5)) for n in range(1, 6)].count([name]) == 1
    (finding,) = [f for f in Verifier(root, Sample(fraction=1.0, seed=0)).findings() if f.severity == "damage"]
    assert (finding.kind, finding.file, finding.rows) == ("block", name, (5 * CHUNK, 6 * CHUNK - 1))
    found = [bool(damaged(root, Sample(fraction=0.3, seed=seed))) for seed in range(40)]
    assert 0 < sum(found) < 40, "a sample sees a single bad block as often as its share says"


@pytest.mark.parametrize("depth", [Part(n=1, total=2), Sample(fraction=0.5, seed=1), Budget(n_bytes=1 << 20, seed=1)])
def test_progress_ends_where_it_was_said_to(large: Path, depth: Depth) -> None:
    verifier, planned = Verifier(large, depth), []
    verifier.on_plan = lambda: planned.append(verifier.summary.bytes_to_read)
    assert list(verifier.findings()) == []
    assert planned == [verifier.summary.bytes_read]
    assert verifier.summary.depth == str(depth)


def test_quick_finds_a_wrong_footer_of_a_large_file(large: Path, tmp_path: Path) -> None:

    root = Path(shutil.copytree(large, tmp_path / "s"))
    name = "arrays.zarr/hidden/final/c/1/0"
    flip(root / name, (root / name).stat().st_size - 9)
    assert damaged(root, "quick") == [name]


def test_units() -> None:
    assert [units.n_bytes(t) for t in ("1", "64GiB", "1.5 kB", "2G")] == [1, 64 << 30, 1500, 2 * 10**9]
    assert units.bytes_per_second("200MB/s") == units.bytes_per_second("200MB") == 200_000_000
    assert [units.seconds(t) for t in ("90min", "7d", "1.5h")] == [5400, 604800, 5400]
    assert units.fraction("2.5%") == 0.025
    assert units.part("3/10") == (3, 10)


@pytest.mark.parametrize(
    ("parse", "texts"),
    [
        (units.n_bytes, ["", "0", "0.5", "-1", "5 parsecs", "1e9", "GiB", "٣GB"]),
        (units.bytes_per_second, ["", "0MB/s", "fast", "5/s/s"]),
        (units.seconds, ["", "7", "d", "7y", "-1d"]),
        (units.fraction, ["0%", "101%", "5", "%", "nan%", "-1%"]),
        (units.part, ["0/5", "6/5", "1", "1/0", "a/b", "-1/2", "1/2/3"]),
    ],
)
def test_what_is_no_amount_is_a_usage_error(parse: object, texts: list[str]) -> None:
    for text in texts:
        with pytest.raises(UsageError, match="found"):
            parse(text)  # type: ignore[operator]


def test_files_of_no_interest_do_not_change_a_draw() -> None:
    """Small files take no part, so whether they are there does not move what is drawn from the others."""
    files = extents(4)
    without = [e for e in files if e.n_bytes > 1 << 17]
    drawn = [c for c, e in zip(choose(Sample(fraction=0.1, seed=2), files), files, strict=True) if e in without]
    assert drawn == choose(Sample(fraction=0.1, seed=2), without)
