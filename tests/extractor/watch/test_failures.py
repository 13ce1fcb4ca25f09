"""The list of failed samples: there at once, whole lines, and at the end what the records say."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from extractor.prompts import PromptOptions, Sample, read_prompts
from extractor.report import Failure, write_failures
from extractor.watch.failures import NO_REASON, FailureList, committed_failures, remember
from hsstore.records import FLAG_FAILED, SampleEntry
from tests.models import ROOT

WHEN = "2026-12-01T08:00:00+00:00"


def sample(line: int, name: str = "") -> Sample:
    ids, mask = np.arange(line + 2, dtype=np.int32), np.ones(line + 2, np.uint8)
    return Sample(source_index=line, uid=f"{line:032x}", input_ids=ids, loss_mask=mask, n_cut=0, id=name)


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def record(shard: int, outcomes: dict[int, str]) -> Any:
    """A record of those samples: "" for one that has states."""
    entries = tuple(
        SampleEntry(f"{i:032x}", i, 0, i + 2, FLAG_FAILED if reason else 0) for i, reason in outcomes.items()
    )
    return SimpleNamespace(shard=shard, samples=entries, failures={str(i): r for i, r in outcomes.items() if r})


def test_a_failure_is_listed_when_it_happens(tmp_path: Path) -> None:
    """In a grown store the line is that of its own prompts file, the source_index that of the store."""
    path = tmp_path / "failed.jsonl"
    listed = FailureList(path, {103: sample(3, "chat-77"), 104: sample(4)}, offset=100, now=lambda: WHEN)
    assert not path.exists()
    listed.sample_failed(103, "out of memory", 2)
    assert rows(path) == [
        {
            "line": 4,
            "status": "failed",
            "reason": "engine",
            "detail": "out of memory",
            "source_index": 103,
            "id": "chat-77",
            "uid": f"{3:032x}",
            "n_tokens": 5,
            "tries": 2,
            "time": WHEN,
        }
    ]
    listed.sample_failed(104, "rows differ", 1)
    assert "id" not in rows(path)[1]
    listed.run_finished(1, 2, 0, 0)


def test_what_counts_is_in_the_records(tmp_path: Path) -> None:
    """A sample whose shard was dropped is off the list, one that came through when it was tried again too; of those
    that stay, tries and time are kept where the list knew them."""
    path = tmp_path / "failed.jsonl"
    samples = {i: sample(i) for i in range(6)}
    listed = FailureList(path, samples, now=lambda: WHEN)
    for i in (0, 1, 2):
        listed.sample_failed(i, "out of memory", 2)
    listed.close()
    records = [record(1, {0: "", 3: ""}), record(0, {0: "out of memory", 1: "out of memory", 4: "lost rows"})]
    found = committed_failures(records, samples, 0, path)
    assert [(f.source_index, f.detail, f.tries, f.time) for f in found] == [
        (1, "out of memory", 2, WHEN),
        (4, "lost rows", None, ""),
    ]
    assert write_failures(path, [Failure(line=9, status="skipped", reason="not_json", detail=""), *found]) == str(path)
    assert [row["line"] for row in rows(path)] == [2, 5, 9]
    assert rows(path)[2] == {"line": 9, "status": "skipped", "reason": "not_json", "detail": ""}
    assert "tries" not in rows(path)[1]
    assert committed_failures(records, samples, 0, path) == found


def test_the_last_reason_counts(tmp_path: Path) -> None:
    """Of a sample that failed in its first shard and again in that of its redo; one without a reason is listed too."""
    samples = {0: sample(0), 1: sample(1)}
    bare = record(0, {0: "first", 1: "x"})
    bare.failures = {"0": "first"}
    found = committed_failures([record(7, {0: "second"}), bare], samples, 0, tmp_path / "none")
    assert [(f.source_index, f.detail) for f in found] == [(0, "second"), (1, NO_REASON)]


@pytest.mark.parametrize("junk", [b"", b"\xff\xfe\n", b'{"line": 1}\n[]\n7\n', b"[" * 9_999, b'{"status": "failed"'])
def test_a_list_that_was_spoilt_is_made_anew(tmp_path: Path, junk: bytes) -> None:
    path = tmp_path / "failed.jsonl"
    path.write_bytes(junk)
    assert remember(path) == {}
    listed = FailureList(path, {0: sample(0)}, now=lambda: WHEN)
    listed.sample_failed(0, "r", 1)
    listed.close()
    assert remember(path) == {(0, "r"): {"tries": 1, "time": WHEN}}
    write_failures(path, committed_failures([record(0, {0: "r"})], {0: sample(0)}, 0, path))
    assert [row["tries"] for row in rows(path)] == [1]


def test_a_list_that_takes_no_line_does_not_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Said once, counted, and the rest of the list is whole."""
    path, said = tmp_path / "failed.jsonl", []
    listed = FailureList(path, {i: sample(i) for i in range(3)}, say=said.append)
    with monkeypatch.context() as patch:

        def full(_fd: int, _data: bytes) -> int:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

        patch.setattr("extractor.watch.lines.os.write", full)
        listed.sample_failed(0, "a", 1)
        listed.sample_failed(1, "a", 1)
    listed.sample_failed(2, "a", 1)
    assert listed.unlisted == 2
    assert [row["source_index"] for row in rows(path)] == [2]
    listed.run_failed("no_space", "quota")
    assert len(said) == 2
    assert "quota exceeded" in said[0].lower()
    assert "2 failed samples" in said[1]


def test_a_place_that_cannot_be_written_is_said_not_raised(tmp_path: Path) -> None:
    said: list[str] = []
    listed = FailureList(tmp_path / "missing" / "failed.jsonl", {0: sample(0)}, say=said.append)
    listed.sample_failed(0, "a", 1)
    assert len(said) == 1
    listed.close()


_ENDLESS = """
import collections, itertools, sys
from tests.extractor.watch.test_failures import sample
from extractor.watch.failures import FailureList
from pathlib import Path
listed = FailureList(Path(sys.argv[1]), collections.defaultdict(lambda: sample(5)))
for i in itertools.count():
    listed.sample_failed(i, "x" * (i % 700), 1)
    if i == 200:
        print("going", flush=True)
"""


def test_a_killed_run_leaves_whole_lines(tmp_path: Path) -> None:
    """Only where the kill met the write itself may the last one be cut; the next run's list is whole in any case."""
    path = tmp_path / "failed.jsonl"
    child = subprocess.Popen([sys.executable, "-c", _ENDLESS, str(path)], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == "going\n"
        child.send_signal(signal.SIGKILL)
    whole = path.read_text().rpartition("\n")[0].splitlines()
    assert len(whole) > 200
    assert [json.loads(line)["source_index"] for line in whole] == list(range(len(whole)))
    samples = {i: sample(5) for i in range(9)}
    write_failures(path, committed_failures([record(0, dict.fromkeys(range(9), "x"))], samples, 0, path))
    assert [row["source_index"] for row in rows(path)] == list(range(9))


@pytest.mark.parametrize(
    ("value", "name"), [('"chat-7"', "chat-7"), ("7", "7"), ("true", ""), ("[1]", ""), ("null", ""), (None, "")]
)
def test_a_sample_keeps_its_own_name(tmp_path: Path, value: str | None, name: str) -> None:
    prompts = tmp_path / "p.jsonl"
    own = f'"id": {value}, ' if value is not None else ""
    prompts.write_text(f'{{{own}"input_ids": [1, 2, 3], "loss_mask": [false, 1, true]}}\n')
    options = PromptOptions(vocab_size=9, max_length=9)
    (found,) = read_prompts(prompts, options, lambda: pytest.fail("ids need no tokenizer")).samples
    assert found.id == name
    assert found.loss_mask.tolist() == [0, 1, 1]


@pytest.mark.parametrize(
    ("ids", "mask", "reason"),
    [
        ("[1, 2.0, 3]", "[0, 1, 1]", "bad_ids"),
        ("[1, true, 3]", "[0, 1, 1]", "bad_ids"),
        ("[1, 2147483648, 3]", "[0, 1, 1]", "bad_ids"),
        ("[1, -2147483648, 3]", "[0, 1, 1]", "bad_ids"),
        ("[1, 99999999999999999999, 3]", "[0, 1, 1]", "bad_ids"),
        ('"123"', "[0, 1, 1]", "bad_ids"),
        ("[1, 2147483647, 3]", "[0, 1, 1]", "ids_outside_vocabulary"),
        ("[1, -1, 3]", "[0, 1, 1]", "ids_outside_vocabulary"),
        ("[1, 2, 3]", "[0, 1, 2]", "bad_mask"),
        ("[1, 2, 3]", "[0, 1, -1]", "bad_mask"),
        ("[1, 2, 3]", "[0, 1, 1.0]", "bad_mask"),
        ("[1, 2, 3]", "[0, 1, 999999999999]", "bad_mask"),
        ("[1, 2, 3]", "null", "bad_mask"),
        ("[1, 2, 3]", "[0, 1]", "mask_length"),
        ("[]", "[]", "too_short"),
    ],
)
def test_ids_that_are_none(tmp_path: Path, ids: str, mask: str, reason: str) -> None:
    """Judging whole arrays at once lets nothing pass that judging one by one would not."""
    prompts = tmp_path / "p.jsonl"
    good = '{"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}'
    prompts.write_text(f'{good}\n{{"input_ids": {ids}, "loss_mask": {mask}}}\n')
    options = PromptOptions(vocab_size=9, max_length=9)
    found = read_prompts(prompts, options, lambda: pytest.fail("ids need no tokenizer"))
    assert [r.reason for r in found.rejections] == [reason]
