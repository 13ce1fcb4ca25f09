"""info and ls on stores that grow, shrink and are being written."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hsstore import cli
from hsstore.quarantine import quarantine
from hsstore.store import Store
from hsstore.writer import StoreWriter
from tests.hsstore import test_growth
from tests.stores import Sample, create, make_samples, stage

grown = test_growth.root


def invoke(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.run(list(arguments))
    out, err = capsys.readouterr()
    return code, out, err


def document(capsys: pytest.CaptureFixture[str], root: Path, *options: str) -> dict[str, object]:
    code, out, _ = invoke(capsys, "info", str(root), "--json", *options)
    assert code == 0
    found = json.loads(out)
    assert isinstance(found, dict)
    return found


@pytest.fixture
def unfinished(tmp_path: Path, samples: list[Sample]) -> StoreWriter:
    """A store of which the first shard is committed."""
    writer = create(tmp_path / "s", samples, shard_rows=256)
    assert len(writer.todo()) == 2
    stage(writer, 0, samples).commit()
    return writer


def test_info_counts_trained_tokens_only_when_asked(
    shared_store: Store, samples: list[Sample], capsys: pytest.CaptureFixture[str]
) -> None:
    """It reads every loss mask: 88 MB of a store of the origin's size, and a file for each shard."""
    assert document(capsys, shared_store.root)["n_trained_tokens"] is None
    expected = sum(int(s.loss_mask.sum()) for s in samples)
    assert document(capsys, shared_store.root, "--tokens")["n_trained_tokens"] == expected
    _, out, _ = invoke(capsys, "info", str(shared_store.root), "--tokens")
    assert f"({expected:,} trained)" in out
    _, out, _ = invoke(capsys, "info", str(shared_store.root))
    assert "trained" not in out


def test_info_reads_no_array(unfinished: StoreWriter, capsys: pytest.CaptureFixture[str]) -> None:
    before = document(capsys, unfinished.root)
    for path in (unfinished.root / "arrays.zarr").rglob("c/*"):
        if path.is_file():
            path.unlink()
    assert document(capsys, unfinished.root) == before


def test_info_of_a_store_with_open_and_quarantined_shards(
    unfinished: StoreWriter, capsys: pytest.CaptureFixture[str]
) -> None:
    found = document(capsys, unfinished.root)
    assert (found["committed_shards"], found["planned_shards"], found["open_shards"]) == (1, 2, 1)
    assert (found["layouts"], found["quarantined_shards"], found["opened_from"]) == (1, 0, "records")
    quarantine(unfinished.root, 0, "a test")
    found = document(capsys, unfinished.root)
    assert (found["committed_shards"], found["planned_shards"], found["open_shards"]) == (0, 1, 1)
    assert found["quarantined_shards"] == 1
    code, out, err = invoke(capsys, "info", str(unfinished.root))
    assert code == 0
    assert "0 of 1 × 256 rows, blocks of 16, 1 quarantined" in out
    assert "1 shard is open" in err


def test_info_shows_every_input_of_a_store_that_grew(grown: Path, capsys: pytest.CaptureFixture[str]) -> None:
    test_growth.fill(grown, "more", append=True)
    found = document(capsys, grown)
    assert found["layouts"] == 2
    assert [given["name"] for given in found["inputs"]] == ["first", "more"]  # type: ignore[attr-defined]
    assert found["n_samples"] == found["planned_samples"] == 8
    _, out, _ = invoke(capsys, "info", str(grown))
    assert ", 2 layouts" in out
    assert out.count("\ninput") == 2


@contextmanager
def follow(root: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "hsstore.cli", "ls", str(root), "--follow", "--json", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()  # a test that failed does not wait for it


def read_rows(process: subprocess.Popen[str], n: int) -> list[int]:
    assert process.stdout is not None
    return [json.loads(process.stdout.readline())["source_index"] for _ in range(n)]


def test_follow_prints_each_sample_once_as_it_is_committed(tmp_path: Path, samples: list[Sample]) -> None:
    writer = create(tmp_path / "s", samples, shard_rows=128)
    todo = writer.todo()
    assert len(todo) == 5
    with follow(writer.root) as process:
        seen: list[int] = []
        for shard in todo[::-1]:
            record = stage(writer, shard, samples).commit()
            assert record is not None
            rows = read_rows(process, len(record.samples))
            assert set(rows) == {s.source_index for s in record.samples}
            seen += rows
        out, err = process.communicate(timeout=240)
    assert (process.returncode, out, err) == (0, "", "")
    assert sorted(seen) == list(range(len(samples)))


def test_follow_of_a_whole_store_ends_at_once(shared_store: Store) -> None:
    with follow(shared_store.root) as process:
        out, _ = process.communicate(timeout=240)
    assert process.returncode == 0
    assert len(out.splitlines()) == len(shared_store.index)


def test_follow_does_not_wait_for_what_is_quarantined(unfinished: StoreWriter) -> None:
    quarantine(unfinished.root, 1, "a test")
    with follow(unfinished.root) as process:
        out, _ = process.communicate(timeout=240)
    assert process.returncode == 0
    assert out


def test_follow_ends_with_ctrl_c_and_with_the_limit(unfinished: StoreWriter) -> None:
    with follow(unfinished.root, "--limit", "1") as process:
        out, _ = process.communicate(timeout=240)
    assert (process.returncode, len(out.splitlines())) == (0, 1)
    with follow(unfinished.root) as process:
        read_rows(process, 1)
        os.kill(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=240)
    assert process.returncode == 130
    assert err.strip() == "interrupted"


def test_follow_refuses_an_offset(shared_store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = invoke(capsys, "ls", str(shared_store.root), "--follow", "--offset", "1")
    assert code == 2
    assert "--offset" in err


def test_a_store_that_is_gone_while_it_is_followed_is_an_error(unfinished: StoreWriter) -> None:
    with follow(unfinished.root) as process:
        read_rows(process, 1)
        (unfinished.root / "records").rename(unfinished.root / "elsewhere")
        _, err = process.communicate(timeout=240)
    assert process.returncode == 3
    assert "records is missing" in err
    assert "Traceback" not in err


def test_ls_is_in_the_order_of_the_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    samples = make_samples([60, 5, 60, 5, 60, 5])
    writer = create(tmp_path / "s", samples, shard_rows=64)
    for shard in writer.todo():
        stage(writer, shard, samples).commit()
    _, out, _ = invoke(capsys, "ls", str(tmp_path / "s"), "--json")
    assert [json.loads(line)["source_index"] for line in out.splitlines()] == list(range(6))
