"""A store is a plain directory: moved or copied by the ordinary tools it is the same store where it arrives."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hsstore import index, manifest
from hsstore.records import Split
from hsstore.store import Store
from hsstore.verify import Verifier
from hsstore.writer import StoreWriter
from tests.stores import Sample, create, make_store, stage


def tool(*command: object, cwd: Path | None = None) -> None:
    """Run the real program. Skips where it is not installed, and says so."""
    if shutil.which(str(command[0])) is None:
        pytest.skip(f"{command[0]} is not installed")
    subprocess.run([*map(str, command)], check=True, cwd=cwd, capture_output=True, timeout=300)


def by_tar(a: Path, b: Path) -> None:
    archive = b.with_name("store.tar")
    tool("tar", "-cf", archive, "-C", a.parent, a.name)
    tool("tar", "-xf", archive, "-C", b.parent)
    (b.parent / a.name).rename(b)


def by_cut_off_rsync(a: Path, b: Path) -> None:
    """A first run that brought a part, then the whole one."""
    tool("rsync", "-a", "--exclude", "records", "--exclude", "hidden", f"{a}/", f"{b}/")
    tool("rsync", "-a", f"{a}/", f"{b}/")


WAYS: dict[str, Callable[[Path, Path], None]] = {
    "mv": lambda a, b: tool("mv", a, b),
    "cp -r": lambda a, b: tool("cp", "-r", a, b),
    "cp -a": lambda a, b: tool("cp", "-a", a, b),
    "cp --reflink": lambda a, b: tool("cp", "-r", "--reflink=auto", "--sparse=always", a, b),
    "rsync -a": lambda a, b: tool("rsync", "-a", f"{a}/", f"{b}/"),
    "rsync -a, cut off": by_cut_off_rsync,
    "rsync -rc, no empty directories": lambda a, b: tool("rsync", "-rcm", f"{a}/", f"{b}/"),
    "tar": by_tar,
}


@pytest.fixture(params=["same disk", "other disk"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """Where the store shall be; on another file system `mv` copies and inode numbers change."""
    if request.param == "same disk":
        yield tmp_path / "elsewhere" / "deeper" / "moved"
        return
    if not os.path.isdir("/dev/shm") or os.stat("/dev/shm").st_dev == os.stat(tmp_path).st_dev:
        pytest.skip("there is no second file system")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as other:
        yield Path(other) / "moved"


def split_of(root: Path) -> dict[str, bool]:
    with Store.open(root) as store:
        sides = index.in_validation(store.index, store.header.split)
        return {store.index.uid_hex(i): bool(side) for i, side in enumerate(sides)}


@pytest.mark.parametrize("way", WAYS)
def test_a_moved_store_is_the_same_store(samples: list[Sample], tmp_path: Path, target: Path, way: str) -> None:
    """It opens as it is, with the same manifest_id and split; the stock checksum tool and verify find it whole, and it
    opens for writing."""
    root = tmp_path / "store"
    make_store(root, samples, shard_rows=64, split=Split(salt="s", validation_fraction=0.3)).close()
    before, sides = manifest.manifest_id(manifest.load(root)), split_of(root)
    assert set(sides.values()) == {True, False}
    target.parent.mkdir(parents=True, exist_ok=True)
    WAYS[way](root, target)
    if way != "mv":
        shutil.rmtree(root)
    assert not root.exists()
    with Store.open(target) as store:
        assert store.manifest_id == before
        for i, sample in enumerate(samples):
            assert (store.hidden(i, "final") == sample.states["final"]).all()
    assert split_of(target) == sides
    checked = subprocess.run(
        ["sha256sum", "--strict", "-c", "manifest.sha256"], cwd=target, capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stdout
    assert checked.stdout.count(": OK") > 40
    assert [str(f) for f in Verifier(target, "full").findings()] == []
    assert StoreWriter.open(target).finish() == before


@pytest.mark.parametrize("way", WAYS)
def test_a_part_of_a_store_goes_on_where_it_arrives(samples: list[Sample], tmp_path: Path, way: str) -> None:
    """Moved between two runs of an extraction, with half an attempt in staging/: the next run finishes it there."""
    root, target = tmp_path / "store", tmp_path / "moved"
    writer = create(root, samples, shard_rows=64)
    todo = writer.todo()
    for shard in todo[: len(todo) // 2]:
        assert stage(writer, shard, samples).commit()
    stage(writer, todo[-1], samples)
    writer.finish()
    WAYS[way](root, target)
    moved = StoreWriter.open(target)
    assert moved.todo() == todo[len(todo) // 2 :]
    for shard in moved.todo():
        assert stage(moved, shard, samples).commit()
    moved.finish()
    assert [f for f in Verifier(target, "full").findings() if f.severity == "damage"] == []
    with Store.open(target) as store:
        assert len(store.index) == len(samples)
