"""The commit protocol: what is visible when, and what a crash or a fault at any step leaves behind."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hsstore import durable, paths
from hsstore.errors import ConflictError, DamagedError, NotFoundError, UsageError
from hsstore.layout import assign
from hsstore.store import Store
from hsstore.verify import Verifier
from hsstore.writer import StoreWriter
from tests.stores import Sample, create, make_samples, make_store, stage


def damage(root: Path) -> list[str]:
    return [str(f) for f in Verifier(root, "full").findings() if f.severity == "damage"]


def test_every_sample_reads_back(shared_store: Store, samples: list[Sample]) -> None:
    assert len(shared_store.index) == len(samples)
    for s in samples:
        i = shared_store.index.find(str(s.entry.source_index))
        assert shared_store.index.find(s.entry.uid) == i
        np.testing.assert_array_equal(shared_store.input_ids(i), s.input_ids)
        np.testing.assert_array_equal(shared_store.loss_mask(i), s.loss_mask)
        for state, rows in s.states.items():
            np.testing.assert_array_equal(shared_store.hidden(i, state), rows)


def test_stock_sha256sum_accepts_the_manifest(shared_store: Store) -> None:
    done = subprocess.run(
        ["sha256sum", "--strict", "-c", "manifest.sha256"], cwd=shared_store.root, capture_output=True
    )
    listed = (shared_store.root / "manifest.sha256").read_text().count("\n")
    kept = len(os.listdir(shared_store.root / "manifests"))  # their names are their SHA-256
    on_disk = sum(len(files) for _, _, files in os.walk(shared_store.root)) - kept
    assert done.returncode == 0
    assert listed == on_disk - 1, "every file but manifest.sha256 itself"


def test_nothing_shows_before_the_record(tmp_path: Path, samples: list[Sample]) -> None:
    writer = create(tmp_path / "s", samples)
    staged = stage(writer, 0, samples)
    assert len(Store.open(tmp_path / "s").index) == 0
    staged.commit()
    assert len(Store.open(tmp_path / "s").index) == len(staged.entries)
    assert list((tmp_path / "s" / "staging").iterdir()) == []


def test_the_second_attempt_loses(tmp_path: Path, samples: list[Sample]) -> None:
    writer = create(tmp_path / "s", samples)
    first, second = stage(writer, 0, samples), stage(writer, 0, samples)
    assert second.commit() is not None
    before = {p: p.read_bytes() for p in (tmp_path / "s").rglob("*") if p.is_file() and first.attempt not in str(p)}
    assert first.commit() is None
    after = {p: p.read_bytes() for p in (tmp_path / "s").rglob("*") if p.is_file()}
    assert after == before


def test_a_crash_between_record_and_publish_is_rolled_forward(
    tmp_path: Path, samples: list[Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = create(tmp_path / "s", samples)
    staged = stage(writer, 0, samples)
    monkeypatch.setattr("hsstore.staged.publish", lambda *_: None)
    record = staged.commit()
    monkeypatch.undo()
    assert record is not None
    reader = Store.open(tmp_path / "s")  # a reader needs no roll-forward
    np.testing.assert_array_equal(reader.input_ids(0), samples[int(reader.index.source_index[0])].input_ids)
    assert not damage(tmp_path / "s")
    StoreWriter.open(tmp_path / "s")
    assert list((tmp_path / "s" / "staging").iterdir()) == []
    assert all((tmp_path / "s" / name).is_file() for name in record.files)
    assert not damage(tmp_path / "s")


@pytest.mark.parametrize("step", range(40))
@pytest.mark.parametrize("name", ["fsync", "link"])
def test_an_error_at_any_step_commits_nothing_torn_and_resume_completes(
    tmp_path: Path, samples: list[Sample], monkeypatch: pytest.MonkeyPatch, name: str, step: int
) -> None:
    """Without abandoning on the first failed fsync, a page the kernel dropped could be committed by the second."""
    writer = create(tmp_path / "s", samples)
    staged = stage(writer, 0, samples)
    fail_at(monkeypatch, name, step)
    try:
        staged.commit()
        reached = False
    except OSError:
        reached = True
    monkeypatch.undo()
    assert reached or step > 5
    assert not damage(tmp_path / "s")
    writer = StoreWriter.open(tmp_path / "s")
    for shard in writer.todo():
        assert stage(writer, shard, samples).commit() is not None
    writer.finish()
    assert not damage(tmp_path / "s")
    assert len(Store.open(tmp_path / "s").index) == len(samples)


def fail_at(monkeypatch: pytest.MonkeyPatch, name: str, step: int) -> None:
    real: Callable[..., Any] = getattr(os, name)
    calls = iter(range(10**6))

    def faulty(*arguments: Any, **options: Any) -> Any:
        if next(calls) == step:
            raise OSError(errno.EIO, "injected")
        return real(*arguments, **options)

    monkeypatch.setattr(os, name, faulty)


def test_failed_samples_are_flagged_zeroed_and_left_out(tmp_path: Path, samples: list[Sample]) -> None:
    writer = create(tmp_path / "s", samples)
    for shard in writer.todo():
        staged = stage(writer, shard, samples)
        for e in staged.entries:
            if e.source_index == 4:
                staged.fail(4, "the verifier ran out of memory")
        assert staged.commit() is not None
    store = Store.open(tmp_path / "s")
    i = store.index.find("4")
    assert store.index.flags[i] == 1
    assert not store.hidden(i, "final").any()
    assert store.manifest.n_failed == 1
    assert store.record(int(store.index.shard[i])).failures == {"4": "the verifier ran out of memory"}
    assert not damage(tmp_path / "s")


def test_two_runs_of_equal_content_have_one_manifest_id(tmp_path: Path, samples: list[Sample]) -> None:
    a, b = make_store(tmp_path / "a", samples), make_store(tmp_path / "b", samples)
    assert a.header.uuid != b.header.uuid
    assert a.manifest_id == b.manifest_id


def test_statistics_are_those_of_the_rows_in_use(shared_store: Store, samples: list[Sample]) -> None:
    from hsstore.statistics import to_float32

    record = shared_store.record(0)
    rows = np.concatenate([to_float32(samples[e.source_index].states["final"]) for e in record.samples])
    found = record.statistics["hidden/final"]
    assert found.rms == pytest.approx(float(np.sqrt(np.mean(rows.astype(np.float64) ** 2))), rel=1e-6)
    assert found.absmax == float(np.abs(rows).max())
    assert (found.nan, found.inf) == (0, 0)


def test_create_refuses_what_is_there(tmp_path: Path, samples: list[Sample]) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    with pytest.raises(ConflictError, match="exists already"):
        create(tmp_path / "full", samples)
    (tmp_path / "empty").mkdir()
    create(tmp_path / "empty", samples)
    with pytest.raises(ConflictError):
        create(tmp_path / "empty", samples)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["empty", "full"], "no half-made directory stays"


def test_of_two_who_create_one_store_the_second_is_told(
    tmp_path: Path, samples: list[Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = durable.rename_new
    monkeypatch.setattr(durable, "rename_new", lambda *_: create_first(tmp_path, samples, monkeypatch, real))
    with pytest.raises(ConflictError, match="meanwhile"):
        create(tmp_path / "s", samples)
    assert [p.name for p in tmp_path.iterdir()] == ["s"]
    assert not damage(tmp_path / "s")


def create_first(
    tmp_path: Path, samples: list[Sample], monkeypatch: pytest.MonkeyPatch, real: Callable[[Path, Path], bool]
) -> bool:
    """Another process is faster by a moment; then the slower one goes on."""
    monkeypatch.setattr(durable, "rename_new", real)
    create(tmp_path / "s", samples)
    return real(next(tmp_path.glob(".s.*")), tmp_path / "s")


def test_open_refuses_what_is_no_store(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        StoreWriter.open(tmp_path)
    with pytest.raises(NotFoundError):
        Store.open(tmp_path / "missing")


def test_another_input_is_refused(tmp_path: Path, samples: list[Sample]) -> None:
    writer = create(tmp_path / "s", samples)
    writer.check_layout(assign([s.entry for s in samples], writer.header.shard_rows))
    others = make_samples([5, 6, 7])
    with pytest.raises(ConflictError, match="laid out for"):
        writer.check_layout(assign([s.entry for s in others], writer.header.shard_rows))


def test_bad_arguments_are_usage_errors(tmp_path: Path, samples: list[Sample]) -> None:
    with pytest.raises(UsageError, match="power of two"):
        create(tmp_path / "s", samples, shard_rows=100)
    with pytest.raises(UsageError, match="source_index 0"):
        create(tmp_path / "s", [samples[0], samples[0]])
    assert not (tmp_path / "s").exists()


def test_files_without_a_record_are_neither_used_nor_replaced(tmp_path: Path, samples: list[Sample]) -> None:
    """A record that was lost leaves files of its attempt; another attempt's record must not name them."""
    writer = create(tmp_path / "s", samples)
    final = tmp_path / "s" / "arrays.zarr/hidden/final/c/0/0"
    final.parent.mkdir(parents=True)
    final.write_bytes(b"something else")
    with pytest.raises(DamagedError, match=r"hidden/final/c/0/0\) but no record.*hsstore quarantine"):
        stage(writer, 0, samples)
    assert final.read_bytes() == b"something else"
    assert writer.abandoned() == []


def test_a_foreign_file_under_a_final_name_is_not_taken_for_ours(tmp_path: Path, samples: list[Sample]) -> None:
    writer = create(tmp_path / "s", samples)
    staged = stage(writer, 0, samples)
    final = tmp_path / "s" / "arrays.zarr/hidden/final/c/0/0"
    final.parent.mkdir(parents=True)
    final.write_bytes(b"something else")
    with pytest.raises(DamagedError, match="not the file that its record commits"):
        staged.commit()
    assert final.read_bytes() == b"something else"


def test_a_copied_half_published_store_is_rolled_forward(
    tmp_path: Path, samples: list[Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`cp -r` turns one inode into two: equal bytes count as published."""
    import shutil

    writer = create(tmp_path / "s", samples)
    monkeypatch.setattr("hsstore.publishing.owner.remove", lambda *_, **__: None)
    record = stage(writer, 0, samples).commit()
    monkeypatch.undo()
    assert record is not None
    shutil.copytree(tmp_path / "s", tmp_path / "copy")
    StoreWriter.open(tmp_path / "copy")
    assert not paths.staging(tmp_path / "copy", 0, record.attempt).exists()
    assert not damage(tmp_path / "copy")
