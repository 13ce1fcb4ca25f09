"""`hsstore extract --shard i/n`: what a part does, says and leaves to the others. Real processes: test_examples.py."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from extractor.engines.base import Job, Ticket
from extractor.engines.transformers import TransformersEngine
from hsstore.cli import run
from hsstore.store import Store
from hsstore.verify import Verifier
from tests.extractor.tiny import conversations, write_jsonl

N_SAMPLES = 40
Extract = Callable[..., tuple[int, str, str]]


@pytest.fixture
def extract(tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Extract:
    """Runs the command on one store; returns exit code, stdout, stderr."""
    prompts = write_jsonl(tmp_path / "chats.jsonl", [*conversations(N_SAMPLES, longest=110), {"no": "sample"}])
    model = ["--model", str(tiny_model), "--engine", "transformers", "--engine-option", "threads=1"]
    arguments = ["extract", *model, "--prompts", str(prompts), "--out", str(tmp_path / "store"), "--shard-rows", "512"]

    def call(*options: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = run([*arguments, *options])
        said = capsys.readouterr()
        return code, said.out, said.err

    return call


def test_parts_one_after_the_other_are_the_whole(extract: Extract, tmp_path: Path) -> None:
    """Each ends with code 0 and says what is left; the last one builds the only manifest; again changes nothing."""
    out = tmp_path / "store"
    for i in (2, 0, 1):
        code, document, said = extract("--shard", f"{i}/3", "--json")
        outcome = json.loads(document)
        assert code == 0, said
        assert outcome["part"]["part"] == f"{i}/3"
        assert outcome["part"]["remaining"] == outcome["part"]["failed"] == 0
        assert outcome["written"] + outcome["skipped"] + outcome["remaining"] == outcome["input"] == N_SAMPLES + 1
        assert outcome["complete"] == (i == 1) == bool(outcome["manifest_id"])
        left = outcome["part"]["shards_elsewhere"]
        assert (left == 0) == (i == 1)
        assert i == 1 or f"part {i}/3 is complete; {left} shard" in said
    assert [path.stem for path in (out / "manifests").iterdir()] == [outcome["manifest_id"]]
    assert [str(f) for f in Verifier(str(out), "full").findings() if f.severity == "damage"] == []
    with Store.open(out) as store:
        assert sorted(store.index.source_index.tolist()) == list(range(N_SAMPLES))
    records = {path: path.stat().st_mtime_ns for path in (out / "records").iterdir()}
    code, document, said = extract("--shard", "1/3")
    assert code == 0
    assert document == f"written {N_SAMPLES} + failed 0 + skipped 1 = input {N_SAMPLES + 1}\n"
    assert {path: path.stat().st_mtime_ns for path in (out / "records").iterdir()} == records


def test_another_number_of_parts_finishes_what_was_begun(extract: Extract, tmp_path: Path) -> None:
    """Nothing of a part is stored: after a lost node the rest may be cut anew."""
    assert extract("--shard", "1/4")[0] == 0
    assert [extract("--shard", f"{i}/2")[0] for i in range(2)] == [0, 0]
    with Store.open(tmp_path / "store") as store:
        assert sorted(store.index.source_index.tolist()) == list(range(N_SAMPLES))


def test_a_part_without_shards_has_nothing_to_do(extract: Extract, tmp_path: Path) -> None:
    """More processes than shards, and this one is there before the store is: that is no error, and makes no store."""
    code, document, said = extract("--shard", "999/1000")
    assert code == 0, said
    assert document == f"written 0 + failed 0 + skipped 1 + remaining {N_SAMPLES} = input {N_SAMPLES + 1}\n"
    assert "part 999/1000: 0 of the " in said
    assert not (tmp_path / "store").exists()


def test_a_part_answers_for_its_own_failures_only(
    extract: Extract, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 4 belongs to the task that can do something about it; the list holds the failures of all."""
    capture = TransformersEngine.capture

    def failing(self: TransformersEngine, jobs: Iterator[Job]) -> Iterator[Ticket]:
        for ticket in capture(self, jobs):
            bad = ticket.source_index == 7
            yield Ticket(source_index=7, n_rows=0, crc32c={}, error="planted") if bad else ticket

    monkeypatch.setattr(TransformersEngine, "capture", failing)
    outcomes = [extract("--shard", f"{i}/2", "--json") for i in range(2)]
    failed = [json.loads(document)["part"]["failed"] for _, document, _ in outcomes]
    assert sorted(failed) == [0, 1]
    assert [code for code, _, _ in outcomes] == [4 if n else 0 for n in failed]
    assert json.loads(outcomes[1][1])["failed"] == 1
    listed = [json.loads(line)["line"] for line in (tmp_path / "store.failed.jsonl").read_text().splitlines()]
    assert listed == [8, N_SAMPLES + 1]


@pytest.mark.parametrize("options", [["--shard", "2/2"], ["--shard", "auto"], ["--shard", "auto", "--dry-run"]])
def test_a_wrong_part_is_refused_before_anything_is_read(
    options: list[str], extract: Extract, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SLURM_ARRAY_TASK_ID", "SLURM_PROCID", "RANK"):
        monkeypatch.delenv(name, raising=False)
    code, document, said = extract(*options)
    assert (code, document) == (2, "")
    assert re.search(r"error: --shard .*\n +hint: give --shard i/n", said)
    assert not (tmp_path / "store").exists()


def test_variables_alone_change_nothing(extract: Extract, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plain run inside a batch job does everything: a part is taken only when it is asked for."""
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "1")
    monkeypatch.setenv("SLURM_ARRAY_TASK_MIN", "0")
    monkeypatch.setenv("SLURM_ARRAY_TASK_COUNT", "4")
    code, document, _ = extract()
    assert (code, document) == (0, f"written {N_SAMPLES} + failed 0 + skipped 1 = input {N_SAMPLES + 1}\n")
