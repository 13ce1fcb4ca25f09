"""The files of a run: whole lines only, whatever ends it, and the order of the input at the end."""

from __future__ import annotations

import errno
import json
import os
import random
from pathlib import Path
from typing import Any

import pytest

from extractor.generate import journal
from extractor.generate.journal import AppendFile
from hsstore.errors import LockedError, NoSpaceError, UsageError


def answer(line: int, text: str = "yes") -> bytes:
    """A written line."""
    turn = {"message": 1, "finish_reason": "stop", "seed": 1, "prompt_tokens": 3, "completion_tokens": 2}
    document = {
        "messages": [{"role": "user", "content": text}],
        "finish_reason": "stop",
        "generate": {"line": line, "turns": [turn]},
    }
    return json.dumps(document).encode()


def write(path: Path, *lines: bytes) -> Path:
    with AppendFile(path) as file:
        for line in lines:
            file.append(line)
    return path


def line_numbers(path: Path) -> list[int]:
    return [json.loads(line)["generate"]["line"] for line in path.read_bytes().splitlines()]


def test_a_file_cut_anywhere_keeps_all_whole_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A kill tears at most the last line: every byte at which it may happen is tried."""
    whole = write(tmp_path / "whole", answer(1), answer(2), answer(3)).read_bytes()
    part = tmp_path / "part"
    for size in range(len(whole) + 1):
        part.write_bytes(whole[:size])
        kept = whole[:size].count(b"\n")
        assert list(journal.recover(part).lines) == [1, 2, 3][:kept]
        assert part.read_bytes() == whole[: size if not kept and not size else len(answer(1) + b"\n") * kept]
    assert "torn" in capsys.readouterr().err


def test_rubbish_in_the_middle_is_cut_out(tmp_path: Path) -> None:
    """After a power cut blocks of a file may be zeros; what lies behind them is still good."""
    part = write(tmp_path / "part", answer(1), b"\0" * 50, answer(2), b"{}", answer(1, "again"), answer(3))
    found = journal.recover(part)
    assert list(found.lines) == [1, 2, 3]
    assert part.read_bytes() == b"".join(answer(n) + b"\n" for n in (1, 2, 3))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["part"]


def test_answers_end_in_the_order_of_the_input(tmp_path: Path) -> None:
    numbers = list(range(1, 400))
    random.Random(1).shuffle(numbers)
    one = journal.recover(write(tmp_path / "one", *(answer(n) for n in numbers[:250])))
    two = journal.recover(write(tmp_path / "two", *(answer(n, "other") for n in numbers[200:])))
    journal.ordered(tmp_path / "out", [one, two])
    assert line_numbers(tmp_path / "out") == sorted(numbers)
    assert (tmp_path / "out").read_bytes().count(b"other") == len(numbers) - 250  # of two for one line the first


def test_nothing_at_all_makes_an_empty_file(tmp_path: Path) -> None:
    journal.ordered(tmp_path / "out", [journal.recover(tmp_path / "none")])
    assert (tmp_path / "out").read_bytes() == b""


def test_a_finished_file_of_somebody_else_is_not_touched(tmp_path: Path) -> None:
    other = tmp_path / "out"
    other.write_text('{"messages": []}\n')
    with pytest.raises(UsageError, match="no run of this command wrote"):
        journal.read_finished(other)
    assert other.read_text() == '{"messages": []}\n'


def test_a_full_disk_leaves_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The half of a line that still had room is taken back: the file can be read as it is."""
    real, calls = os.write, 0

    def half(fd: int, data: Any) -> int:
        nonlocal calls
        calls += 1
        if calls > 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, bytes(data[:20]))

    path = write(tmp_path / "part", answer(1))
    with AppendFile(path) as file:
        monkeypatch.setattr(os, "write", half)
        with pytest.raises(NoSpaceError, match="--resume"):
            file.append(answer(2))
        monkeypatch.undo()
        file.append(answer(3))
    assert calls == 2
    assert line_numbers(path) == [1, 3]


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    """Two runs of one command would write every line twice."""
    with AppendFile(tmp_path / "part"), pytest.raises(LockedError, match="another process"):
        AppendFile(tmp_path / "part")
    AppendFile(tmp_path / "part").close()


def test_leftovers_of_a_killed_ordering_go(tmp_path: Path) -> None:
    (tmp_path / ".out.jsonl.0123456789abcdef.tmp").write_text("half")
    (tmp_path / ".other.jsonl.0123456789abcdef.tmp").write_text("not ours")
    journal.remove_leftovers(tmp_path / "out.jsonl")
    assert [p.name for p in tmp_path.iterdir()] == [".other.jsonl.0123456789abcdef.tmp"]
