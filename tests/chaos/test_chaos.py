"""Writers that are killed at any instant, or stopped beyond their lease and woken, lose, double and mix nothing.

Short form of `python -m tests.chaos --kills 1000 --stops 100 --writers 8`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hsstore import garbage, owner, paths
from hsstore.store import Store
from hsstore.writer import StoreWriter
from tests.crash.recorder import Died
from tests.stores import create, make_samples, stage

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> tuple[int, dict[str, Any]]:
    """Exit code and report. A process of its own: it forks, and a suite has threads."""
    command = [sys.executable, "-m", "tests.chaos", "--json", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=540)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def test_killed_and_stopped_writers_lose_double_and_mix_nothing() -> None:
    code, report = run("--kills", "60", "--stops", "10", "--writers", "4", "--seed", "3")
    assert report["violations"] == []
    assert code == 0
    assert report["kills"] >= 60
    assert report["stops"] >= 10
    totals = report["totals"]
    assert (
        min(totals["commits"], totals["rolled_forward"], totals["taken_over"], totals["removed"], totals["read"]) > 0
    ), totals
    assert totals["layouts_added"] >= report["rounds"], "every store grew meanwhile"
    assert report["compared"] > 0
    assert len(report["killed_in"]) >= 8, report["killed_in"]


def test_renaming_over_what_is_there_is_found_out() -> None:
    """The same chaos with the one protocol that everybody uses must fail, or it proves nothing about ours."""
    code, report = run("--broken", "rename-overwrite", "--kills", "600", "--stops", "100", "--seed", "1")
    assert code == 1
    assert any(v.startswith("lost commit: ") for v in report["violations"]), report["violations"]


def test_what_is_committed_between_two_looks_of_gc_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer may commit and die while gc looks: seen as dead, its shard must not be seen as open any more."""
    samples = make_samples([30, 30], layers=("final",))
    writer = create(tmp_path / "s", samples, shard_rows=64)
    staged = stage(writer, 0, samples)
    mark = (staged.directory / owner.MARK).read_text()
    pid = mark.split()[-2]
    real, committed = owner.state_of, []

    def die_behind_the_record(*_: object) -> None:
        raise Died

    def state_of(directory: Path) -> owner.State:
        if not committed:
            committed.append(directory)
            with monkeypatch.context() as patch:
                patch.setattr("hsstore.staged.publish", die_behind_the_record)
                with pytest.raises(Died):
                    staged.commit()
            (directory / owner.MARK).write_text(mark.replace(f" {pid} ", " 4194304 "))  # no process has that number
        return real(directory)

    monkeypatch.setattr(owner, "state_of", state_of)
    garbage.remove(garbage.find(tmp_path / "s"))
    assert committed
    assert paths.record(tmp_path / "s", 0).exists()
    StoreWriter.open(tmp_path / "s").finish()
    store = Store.open(tmp_path / "s")
    assert bytes(store.sample(0, "hidden/final")) == samples[0].states["final"].tobytes()


def test_what_is_published_between_two_looks_of_a_reader_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The final name is not there yet, then the staged one is not there any more: neither says that it is lost."""
    samples = make_samples([30], layers=("final",))
    writer = create(tmp_path / "s", samples, shard_rows=64)
    staged = stage(writer, 0, samples)
    with monkeypatch.context() as patch:
        patch.setattr("hsstore.staged.publish", lambda *_: None)
        assert staged.commit() is not None
    store, real = Store.open(tmp_path / "s"), os.open

    def publish_behind_the_first_look(path: Any, *arguments: Any, **options: Any) -> int:
        try:
            return real(path, *arguments, **options)
        except FileNotFoundError:
            monkeypatch.undo()
            StoreWriter.open(tmp_path / "s")
            raise

    monkeypatch.setattr(os, "open", publish_behind_the_first_look)
    assert bytes(store.sample(0, "hidden/final")) == samples[0].states["final"].tobytes()
    assert os.open is real, "the final name was looked for before it was there"
    assert not staged.directory.exists()
