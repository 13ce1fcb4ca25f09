"""The log: a line an event, whole lines only, through rotation, kills and a full disk."""

from __future__ import annotations

import datetime
import errno
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from extractor.engines.base import EngineInfo
from extractor.watch.events import Many, Pace, Watcher
from extractor.watch.jsonlog import JsonLog
from extractor.watch.lines import LineFile
from hsstore.errors import UsageError
from tests.extractor.watch.test_pace import committed, facts

WHEN = datetime.datetime(2026, 12, 1, 10, 0, 0, 123456, tzinfo=datetime.timezone(datetime.timedelta(hours=2)))
INFO = EngineInfo(
    engine="sglang", version="0.5", norm="post", compute_dtype="bfloat16", longest_tokens=9, flags={"tp": "8"}
)
PACE = Pace(
    samples_left=1,
    tokens_left=2,
    bytes_left=3,
    tokens_done=4,
    seconds=5.04,
    tokens_per_second=6.0,
    tokens_per_second_all=7.0,
    eta_seconds=None,
)


def rows(path: Path) -> list[dict[str, Any]]:
    data = path.read_bytes()
    assert data.endswith(b"\n")
    return [json.loads(line) for line in data.splitlines()]


def tell_everything(watcher: Watcher) -> None:
    watcher.run_started(facts())
    watcher.engine_starting("sglang")
    watcher.engine_started(INFO, 12.3456)
    watcher.shard_staged(0, 2, 20)
    watcher.sample_sent(0)
    watcher.sample_retried(0, "rows differ")
    watcher.sample_sent(0)
    watcher.sample_failed(0, "außer Speicher \ud800", 2)
    watcher.sample_done(0, 10, False)
    watcher.sample_sent(1)
    watcher.engine_lost("signal 9")
    watcher.backoff(1.5, "signal 9")
    watcher.engine_started(INFO, 3.0)
    watcher.sample_sent(1)
    watcher.sample_done(1, 10, True)
    watcher.shard_filled(0)
    watcher.shard_sealed(0, 0.5, 4_096)
    record = committed(0)
    record.samples, record.n_rows, record.attempt, record.failures = (1, 2), 20, "ab", {"0": "x"}
    watcher.shard_done(record)
    watcher.shard_staged(1, 1, 5)
    watcher.shard_dropped(1, 0, 0, "the run ended")
    watcher.shard_sealed(2, 0.1, 0)
    watcher.shard_done(None)
    watcher.shard_elsewhere(3, 2, 30)
    watcher.waiting(2)
    watcher.waiting(2)
    watcher.disk_low(10, 20)
    watcher.paced(PACE)
    watcher.engine_stopped()
    watcher.run_failed("no_space", "full")
    watcher.run_finished(1, 1, 0, 0)


def test_every_event_is_a_line(tmp_path: Path) -> None:
    """ISO time in UTC with milliseconds, level, event, run, fields; good samples one by one are left out."""
    path = tmp_path / "log.jsonl"
    log = JsonLog(str(path), now=lambda: WHEN)
    tell_everything(Many([log]))
    log.close()
    found = rows(path)
    assert all(list(row)[:4] == ["time", "level", "event", "run"] for row in found)
    assert {row["time"] for row in found} == {"2026-12-01T08:00:00.123Z"}
    assert {row["run"] for row in found} == {log.run}
    events = [row["event"] for row in found]
    assert events == [
        *("run_started", "engine_starting", "engine_started", "shard_staged", "sample_retried", "sample_failed"),
        *("engine_lost", "backoff", "engine_started", "shard_filled", "shard_sealed", "shard_committed"),
        *("shard_staged", "shard_dropped", "shard_sealed", "shard_lost_race", "shard_elsewhere"),
        *("waiting_for_others", "disk_low", "progress", "engine_stopped", "run_failed", "run_finished"),
    ]
    by_event = {row["event"]: row for row in found}
    assert by_event["run_started"]["tokens"] == 10_000
    assert by_event["run_started"]["pid"] == os.getpid()
    assert by_event["engine_started"]["flags"] == {"tp": "8"}
    assert by_event["sample_failed"]["reason"].startswith("außer Speicher")
    assert by_event["sample_failed"]["tries"] == 2
    assert (by_event["shard_committed"]["failed"], by_event["shard_committed"]["shard"]) == (1, 0)
    assert by_event["progress"]["eta_seconds"] is None
    assert {by_event[e]["level"] for e in ("run_failed", "engine_lost", "disk_low")} == {"error"}
    assert by_event["run_finished"]["level"] == "warning"


def test_a_new_run_appends_under_another_id(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    for _ in range(2):
        log = JsonLog(str(path))
        log.run_started(facts())
        log.close()
    first, second = rows(path)
    assert first["run"] != second["run"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", second["time"])


def test_logrotate_renames_it(tmp_path: Path) -> None:
    """The next line goes to a new file of that name, whether the old one was renamed or removed; nothing is lost."""
    path = tmp_path / "log.jsonl"
    log = JsonLog(str(path))
    log.engine_lost("one")
    path.rename(tmp_path / "log.jsonl.1")
    log.engine_lost("two")
    path.unlink()
    log.engine_lost("three")
    log.close()
    assert [row["reason"] for row in rows(tmp_path / "log.jsonl.1")] == ["one"]
    assert [row["reason"] for row in rows(path)] == ["three"]


def test_copytruncate(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    log = JsonLog(str(path))
    log.engine_lost("one")
    os.truncate(path, 0)
    log.engine_lost("two")
    log.close()
    assert [row["reason"] for row in rows(path)] == ["two"]


def test_half_a_line_of_a_killed_run_spoils_no_other(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"event": "whole"}\n{"event": "ha')
    log = JsonLog(str(path))
    log.engine_lost("one")
    log.close()
    lines = path.read_bytes().split(b"\n")
    assert lines[1] == b'{"event": "ha'
    assert json.loads(lines[2])["reason"] == "one"


class FullDisk:
    """`os.write` that takes `room` bytes, then meets ENOSPC."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
        self.room = room
        self._write = os.write
        monkeypatch.setattr("extractor.watch.lines.os.write", self)

    def __call__(self, fd: int, data: bytes) -> int:
        if self.room == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken = min(self.room, len(data))
        self.room -= taken
        return self._write(fd, data[:taken])


def test_a_full_disk_costs_lines_never_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a line is taken back; the loss is said once, counted, and stands in the log where it happened."""
    path, said = tmp_path / "log.jsonl", []
    log = JsonLog(str(path), say=said.append)
    log.engine_lost("one")
    with monkeypatch.context() as patch:
        FullDisk(patch, room=30)
        for word in ("two", "three", "four"):
            log.engine_lost(word)
    log.engine_lost("five")
    log.engine_lost("six")
    log.close()
    found = rows(path)
    assert [row.get("reason") for row in found] == ["one", None, "five", "six"]
    assert (found[1]["event"], found[1]["lines"]) == ("log_lines_lost", 3)
    assert log.lost == 3
    assert len(said) == 2
    assert "no space left" in said[0].lower()
    assert "3 lines" in said[1]


def test_lines_of_several_processes_do_not_mix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a line behind which another process has written stays, and is ended: nobody's bytes are cut off."""
    path = tmp_path / "lines"
    ours, theirs = LineFile(str(path)), LineFile(str(path))
    assert theirs.write("before") is None
    write = os.write

    def half(fd: int, data: bytes) -> int:
        taken = write(fd, data[:3])
        with open(path, "ab") as file:
            file.write(b"\nbetween\n")
        return taken

    with monkeypatch.context() as patch:
        patch.setattr("extractor.watch.lines.os.write", half)
        assert ours.write("ours") is not None
    assert ours.write("again") is None
    ours.close()
    theirs.close()
    assert path.read_text().split("\n") == ["before", "our", "between", "", "again", ""]


@pytest.mark.parametrize("where", ["", "missing/log.jsonl", "file/log.jsonl"])
def test_a_log_that_cannot_be_is_refused_at_once(tmp_path: Path, where: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="--log-json"):
        JsonLog(str(tmp_path / where))


def test_a_dash_is_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    log = JsonLog("-")
    log.engine_lost("one")
    log.close()
    out, err = capfd.readouterr()
    assert out == ""
    assert json.loads(err)["reason"] == "one"
    os.fstat(2)  # still open
