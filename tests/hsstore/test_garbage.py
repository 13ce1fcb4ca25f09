"""Only what certainly belongs to nobody is removed: an error the other way destroys a running writer's work."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hsstore import garbage, owner, paths
from hsstore.cli import run
from hsstore.leases import Leases
from hsstore.quarantine import quarantine
from hsstore.staged import StagedShard
from hsstore.store import Store
from hsstore.writer import StoreWriter
from tests.stores import Sample, create, make_samples, make_store, stage

FUTURE = time.time() + 3600


@pytest.fixture
def samples() -> list[Sample]:
    return make_samples([300, 300, 300])


@pytest.fixture
def writer(tmp_path: Path, samples: list[Sample]) -> StoreWriter:
    return create(tmp_path / "store", samples, shard_rows=512)


@pytest.fixture
def staged(writer: StoreWriter, samples: list[Sample]) -> StagedShard:
    return stage(writer, 0, samples)


def sweep(staged: StagedShard, **options: float) -> int:
    return garbage.remove(garbage.find(staged.root, now=FUTURE, **options))


def mark_of_a_dead_process(directory: Path) -> None:
    code = f"from pathlib import Path; from hsstore import owner; owner.mark(Path({str(directory)!r}))"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


def test_a_living_writer_keeps_its_shard(staged: StagedShard) -> None:
    assert sweep(staged, abandoned_seconds=1) == 0
    assert staged.commit() is not None


@pytest.mark.parametrize("mark", [None, "elsewhere/boot/pid:[1] 1 2", "nonsense"])
def test_what_nothing_is_known_of_stays_unless_an_age_is_given(staged: StagedShard, mark: str | None) -> None:
    if mark is None:
        (staged.directory / owner.MARK).unlink()
    else:
        (staged.directory / owner.MARK).write_text(mark)
    assert sweep(staged) == 0
    assert sweep(staged, abandoned_seconds=7200) == 0
    assert staged.directory.exists()
    assert sweep(staged, abandoned_seconds=1800) > 0
    assert not staged.directory.exists()


def test_a_dead_writers_shard_goes(staged: StagedShard) -> None:
    mark_of_a_dead_process(staged.directory)
    assert sweep(staged) > 0
    assert not staged.directory.exists()


def test_a_recycled_process_id_is_no_life_sign(staged: StagedShard) -> None:
    mark = (staged.directory / owner.MARK).read_text().rsplit(" ", 1)[0]
    (staged.directory / owner.MARK).write_text(f"{mark} 12345")
    sweep(staged)
    assert not staged.directory.exists()


def test_other_attempts_at_a_committed_shard_go(writer: StoreWriter, samples: list[Sample]) -> None:
    """Also those of another machine: their record can no more be linked. A living writer notices it itself."""
    alive, elsewhere, winner = (stage(writer, 0, samples) for _ in range(3))
    (elsewhere.directory / owner.MARK).write_text("elsewhere/boot/pid:[1] 1 2")
    assert winner.commit() is not None
    assert garbage.find(writer.root) == [], "young ones are left alone"
    assert [g.path for g in garbage.find(writer.root, now=FUTURE)] == [elsewhere.directory]
    sweep(winner)
    assert alive.commit() is None


def test_a_committed_unpublished_attempt_is_no_garbage(staged: StagedShard, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its staging is all that the committed shard has; its writer may well be dead."""
    monkeypatch.setattr("hsstore.staged.publish", lambda *_: None)
    assert staged.commit() is not None
    mark_of_a_dead_process(staged.directory)
    assert sweep(staged, abandoned_seconds=1) == 0
    with Store.open(staged.root) as store:
        assert len(store.input_ids(0)) == 300


def test_what_is_committed_between_finding_and_removing_stays(
    staged: StagedShard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy takes over a dead one's directory and commits what lies there: these are the only files of that shard."""
    mark_of_a_dead_process(staged.directory)
    found = garbage.find(staged.root)
    assert [g.path for g in found] == [staged.directory]
    monkeypatch.setattr("hsstore.staged.publish", lambda *_: None)
    assert staged.commit() is not None
    assert garbage.remove(found) == 0
    assert list((staged.root / paths.STAGING).iterdir()) == [], "published"
    with Store.open(staged.root) as store:
        assert len(store.input_ids(0)) == 300


def test_what_a_living_one_took_over_since_it_was_found_stays(staged: StagedShard) -> None:
    mark_of_a_dead_process(staged.directory)
    found = garbage.find(staged.root)
    owner.mark(staged.directory)
    assert garbage.remove(found) == 0
    assert staged.commit() is not None


def test_old_temporaries_go_and_young_ones_stay(staged: StagedShard) -> None:
    root = staged.root
    old = [
        root / "records" / ".000001.json.0123456789abcdef.tmp",
        root / "arrays.zarr/hidden/final" / ".zarr.json.0123456789abcdef.tmp",
    ]
    creating = root.with_name(f".{root.name}.0123456789abcdef.creating")
    strangers = [root / "records" / ".notes.tmp", root.with_name(".other.0123456789abcdef.creating")]
    young = root / ".manifest.json.0123456789abcdef.tmp"
    for file in (*old, young, strangers[0]):
        file.write_text("x")
    for directory in (creating, strangers[1]):
        directory.mkdir()
    for place in (*old, creating, *strangers):
        os.utime(place, (1, 1))
    garbage.remove(garbage.find(root))
    assert not any(p.exists() for p in (*old, creating))
    assert young.exists()
    assert all(p.exists() for p in strangers)


def test_leases_go_when_their_holder_is_gone(writer: StoreWriter) -> None:
    with Leases(writer.root) as leases:
        assert leases.take(0)
        assert garbage.find(writer.root) == []
    code = f"from pathlib import Path; from hsstore.leases import Leases; Leases(Path({str(writer.root)!r})).take(1)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
    assert [g.path for g in garbage.find(writer.root)] == [paths.lease(writer.root, 1)]


def test_files_of_a_quarantined_shard_go_only_when_asked_for(tmp_path: Path, samples: list[Sample]) -> None:
    make_store(tmp_path / "s", samples, shard_rows=512).close()
    quarantine(tmp_path / "s", 1, "bad disk")
    assert garbage.find(tmp_path / "s", now=FUTURE) == []
    found = garbage.find(tmp_path / "s", quarantined=True)
    assert {g.path.parts[-2:] for g in found} >= {("c", "1")}
    assert len(found) == 4
    garbage.remove(found)
    with Store.open(tmp_path / "s") as store:
        assert sorted(store.index.source_index.tolist()) == [0, 2]


def test_gc_says_what_it_would_remove_first(staged: StagedShard, capsys: pytest.CaptureFixture[str]) -> None:
    mark_of_a_dead_process(staged.directory)
    assert run(["gc", str(staged.root)]) == 0
    out, err = capsys.readouterr()
    assert staged.directory.name in out
    assert "its writer is dead" in out
    assert "--yes" in err
    assert staged.directory.exists()
    assert run(["gc", str(staged.root), "--yes"]) == 0
    assert "removed 1" in capsys.readouterr().out
    assert not staged.directory.exists()
    assert run(["gc", str(staged.root)]) == 0
    assert "nothing to remove" in capsys.readouterr().out


@pytest.mark.timeout(60)
def test_what_is_no_lease_is_listed_or_named(
    staged: StagedShard, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A FIFO goes, by age; a directory stays, whatever is in it; neither ends the listing nor is waited for."""
    staging = staged.root / "staging"
    os.mkfifo(staging / "000004.lease")
    (staging / "000005.lease").mkdir()
    (staging / "000006.lease").write_text("nonsense")
    (staged.directory / owner.MARK).unlink()
    os.mkfifo(staged.directory / owner.MARK)
    for path in staging.glob("*.lease"):
        os.utime(path, (1, 1))
    assert run(["gc", str(staged.root), "--yes"]) == 0
    shown = capsys.readouterr()
    listed = [line.partition(":")[0] for line in shown.out.splitlines() if ": " in line]
    assert listed == ["staging/000004.lease", "staging/000006.lease"]
    assert "000005.lease is a directory where a lease belongs" in shown.err
    assert sorted(p.name for p in staging.glob("*.lease")) == ["000005.lease"]
