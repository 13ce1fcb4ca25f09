"""Files that others change while a run is on: the account comes from what the process knows, and ends in words."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from extractor.generate.journal import AppendFile
from extractor.generate.run import generate
from extractor.generate.scan import lines_of, scan
from extractor.generate.settings import Settings
from hsstore.errors import ConflictError, IncompleteError, LockedError
from tests.extractor.generate.test_servers import N_LINES, FakeServer, rows, settings, short_pauses
from tests.extractor.tiny import conversations, write_jsonl

__all__ = ["short_pauses"]  # a fixture of every test here


@pytest.fixture
def server() -> Iterator[FakeServer]:
    """Refuses one line, so that there is a list."""
    found = FakeServer("sglang")
    found.bad = {3: (400, '{"error": "no"}')}
    yield found
    found.stop()


@pytest.fixture
def meddle(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Any]], None]:
    """Has something done when the fifth line of a file was appended."""

    def arm(action: Callable[[], Any]) -> None:
        real, calls = AppendFile.append, 0

        def append(self: AppendFile, line: bytes) -> None:
            nonlocal calls
            real(self, line)
            calls += 1
            if calls == 5:
                action()

        monkeypatch.setattr(AppendFile, "append", append)

    return arm


def asked(tmp_path: Path, model: Path, server: FakeServer, **options: Any) -> Settings:
    return settings(tmp_path, model, server.url, in_flight=1, **options)


@pytest.mark.parametrize("how", ["removed", "emptied", "overwritten"])
def test_a_lost_list_of_failures_is_made_again(
    tmp_path: Path, tiny_model: Path, server: FakeServer, meddle: Callable[..., None], how: str
) -> None:
    run = asked(tmp_path, tiny_model, server)
    foreign = b'{"line": 9, "status": "skipped", "reason": "truncated"}\n'
    actions: dict[str, Callable[[], Any]] = {
        "removed": run.failures.unlink,
        "emptied": lambda: run.failures.write_bytes(b""),
        "overwritten": lambda: run.failures.write_bytes(foreign),
    }
    meddle(actions[how])
    outcome = generate(run)
    assert (outcome.written, outcome.failed, outcome.skipped) == (N_LINES - 1, 1, 0)
    assert [row["line"] for row in rows(run.failures)] == [4]


def test_two_runs_do_not_share_a_list(tmp_path: Path, tiny_model: Path, server: FakeServer) -> None:
    """The second is refused before it changes anything; the lock holds from the first line to the last."""
    shared = tmp_path / "shared.jsonl"
    with AppendFile(shared) as held:
        held.replace([b'{"line": 1}'])
        with pytest.raises(LockedError, match=r"writing .*shared\.jsonl"):
            generate(asked(tmp_path, tiny_model, server, failed_out=shared))
    assert shared.read_bytes() == b'{"line": 1}\n'
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.jsonl", "shared.jsonl"]
    assert generate(asked(tmp_path, tiny_model, server, failed_out=shared)).failed == 1


def test_a_list_of_another_run_decides_nothing_here(tmp_path: Path, tiny_model: Path, server: FakeServer) -> None:
    """Lines beyond the input, and lines that have an answer."""
    run = asked(tmp_path, tiny_model, server)
    generate(run)
    foreign = b"".join(b'{"line": %d, "status": "skipped", "reason": "truncated"}\n' % n for n in (-1, 0, 2, 99))
    run.failures.write_bytes(foreign)
    outcome = generate(asked(tmp_path, tiny_model, server, resume=True))
    assert (outcome.written, outcome.failed, outcome.skipped) == (N_LINES, 0, 0)
    assert not run.failures.exists()


def test_lost_answers_end_resumable(
    tmp_path: Path, tiny_model: Path, server: FakeServer, meddle: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = asked(tmp_path, tiny_model, server)
    meddle(run.part.unlink)
    with pytest.raises(IncompleteError, match="was changed by somebody else"):
        generate(run)
    assert not run.out.exists()
    monkeypatch.undo()
    assert generate(asked(tmp_path, tiny_model, server, resume=True)).written == N_LINES


@pytest.mark.parametrize("how", ["in place", "replaced"])
def test_prompts_that_change_while_they_are_answered(
    tmp_path: Path, tiny_model: Path, server: FakeServer, meddle: Callable[..., None], how: str
) -> None:
    """Nothing is put in place; with the old file back the run goes on."""
    run = asked(tmp_path, tiny_model, server)
    before = run.prompts.read_bytes()

    def change() -> None:
        if how == "replaced":
            run.prompts.unlink()
        run.prompts.write_bytes(before.swapcase() if how != "in place" else before + before)

    meddle(change)
    with pytest.raises(ConflictError, match="was changed while this ran"):
        generate(run)
    assert not run.out.exists()
    run.prompts.write_bytes(before)
    assert generate(asked(tmp_path, tiny_model, server, resume=True)).written == N_LINES


def test_a_change_that_no_time_shows_is_found_at_the_end(tmp_path: Path) -> None:
    """The same size, the time put back: the digest of the second reading is another one."""
    path = write_jsonl(tmp_path / "in.jsonl", conversations(3))
    first, old = scan(path, "all"), path.stat()
    assert [line.number for line in lines_of(path, "all", first)] == [1, 2, 3]
    path.write_bytes(path.read_bytes()[:-4] + b"  }\n")
    path.write_bytes(path.read_bytes().ljust(old.st_size)[: old.st_size])
    os.utime(path, ns=(old.st_atime_ns, old.st_mtime_ns))
    with pytest.raises(ConflictError, match="was changed while this ran"):
        list(lines_of(path, "all", first))
