"""Only what certainly belongs to nobody is removed: an error the other way destroys a running writer's work."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from extractor.sweep import mark_owner, sweep
from hsstore.layout import assign
from hsstore.records import InputSummary, SampleEntry, Split
from hsstore.writer import StagedShard, StoreWriter
from tests.stores import capture, make_samples

FUTURE = time.time() + 3600


@pytest.fixture
def staged(tmp_path: Path) -> StagedShard:
    samples = make_samples([300, 300, 300], layers=("after_2", "final"))
    writer = StoreWriter.create(
        tmp_path / "store",
        capture=capture(layers=("after_2", "final")),
        split=Split(salt="s", validation_fraction=0.1),
        samples=[s.entry for s in samples],
        input_summary=InputSummary(name="p", bytes=1, sha256="0" * 64, lines=3, rejected={}, options={}),
        shard_rows=512,
    )
    shards: list[tuple[SampleEntry, ...]] = assign([s.entry for s in samples], 512)
    tokens = {s.entry.source_index: (s.input_ids, s.loss_mask) for s in samples}
    return writer.stage(0, shards[0], tokens)


def dead_process_mark(directory: Path) -> None:
    code = f"from pathlib import Path; from extractor.sweep import mark_owner; mark_owner(Path({str(directory)!r}))"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


def test_a_living_writer_keeps_its_shard(staged: StagedShard) -> None:
    mark_owner(staged.directory)
    assert sweep(staged.writer, FUTURE) == 0
    assert staged.commit() is not None


def test_without_a_mark_or_from_elsewhere_it_stays(staged: StagedShard) -> None:
    assert sweep(staged.writer, FUTURE) == 0
    (staged.directory / "owner").write_text("elsewhere/boot/pid:[1] 1 2")
    assert sweep(staged.writer, FUTURE) == 0
    (staged.directory / "owner").write_text("nonsense")
    assert sweep(staged.writer, FUTURE) == 0
    assert staged.directory.exists()


def test_a_dead_writers_shard_goes(staged: StagedShard) -> None:
    dead_process_mark(staged.directory)
    assert sweep(staged.writer, FUTURE) > 0
    assert not staged.directory.exists()


def test_a_recycled_process_id_is_no_life_sign(staged: StagedShard) -> None:
    mark_owner(staged.directory)
    mark = (staged.directory / "owner").read_text().rsplit(" ", 1)[0]
    (staged.directory / "owner").write_text(f"{mark} 12345")
    sweep(staged.writer, FUTURE)
    assert not staged.directory.exists()


def test_attempts_at_a_committed_shard_go(staged: StagedShard) -> None:
    other = staged.directory.with_name("000000.0123456789abcdef")
    other.mkdir()
    assert staged.commit() is not None
    sweep(staged.writer, FUTURE)
    assert not other.exists()


def test_old_temporaries_go_and_young_ones_stay(staged: StagedShard) -> None:
    root = staged.writer.root
    old = root / "records" / ".000001.json.0123456789abcdef.tmp"
    creating = root.with_name(f".{root.name}.0123456789abcdef.creating")
    strangers = [root / "records" / ".notes.tmp", root.with_name(".other.0123456789abcdef.creating")]
    young = root / ".manifest.json.0123456789abcdef.tmp"
    for file in (old, young, strangers[0]):
        file.write_text("x")
    for directory in (creating, strangers[1]):
        directory.mkdir()
    for place in (old, creating, *strangers):
        os.utime(place, (1, 1))
    sweep(staged.writer, time.time() - 60)
    assert not old.exists()
    assert not creating.exists()
    assert young.exists()
    assert all(p.exists() for p in strangers)
