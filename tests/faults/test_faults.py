"""No call to the operating system fails without hsstore saying so and staying whole (all: python -m tests.faults)."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.harness import EXIT_CODES, Harness, Scenario, called, in_memory, run_all
from tests.faults.scenarios import SCENARIOS, is_committed, new_store, scenario, staged, store_of
from tests.faults.shim import ERRNOS, SHORT, Fault, Shim

PER_SCENARIO = 20


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Path]:
    """A directory in memory where there is one: nothing here is about the disk, and hundreds of stores are made."""
    with tempfile.TemporaryDirectory(prefix="hsstore-faults-", dir=in_memory(tmp_path)) as directory:
        yield Path(directory)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.name)
def test_a_failing_call_is_said_and_nothing_is_torn(scenario: Scenario, box: Path) -> None:
    """Without it a full disk could commit a hole, a bad one pass for a sound store, a failure leak descriptors."""
    harness = Harness(scenario, box)
    faults = harness.sample(PER_SCENARIO, seed=0)
    tally = run_all(harness, faults)
    assert not tally.broken, "\n".join(map(str, tally.broken[:3]))
    assert sum(tally.injected.values()) == len(faults) == PER_SCENARIO
    assert len(tally.places) >= 8
    assert len({fault for _, _, fault in tally.injected}) >= 4, "several errors, not one"


def test_every_error_of_the_table_has_an_exit_code() -> None:
    assert {code for codes in ERRNOS.values() for code in codes} - {SHORT} <= set(EXIT_CODES)


def listed(path: Path) -> list[str]:
    with os.scandir(path) as entries:
        return [e.name for e in entries]


@pytest.mark.parametrize(
    ("kind", "step"),
    [
        ("create", lambda path: os.close(os.open(path / "f", os.O_CREAT | os.O_WRONLY))),
        ("write", lambda path: (path / "f").write_bytes(b"two bytes or more")),
        ("read", lambda path: (path / "there").read_text()),
        ("stat", lambda path: os.path.getsize(path / "there")),
        ("list", lambda path: list(path.iterdir())),
        ("readdir", listed),
        ("unlink", lambda path: (path / "there").unlink()),
        ("mkdir", lambda path: (path / "d").mkdir()),
        ("rename", lambda path: (path / "there").rename(path / "f")),
    ],
)
def test_the_shim_sees_and_fails_each_kind_of_call(tmp_path: Path, kind: str, step: object) -> None:
    """A call that went past the shim would never be tested and never be missed."""
    assert callable(step)
    (tmp_path / "there").write_text("text")
    with Shim(tmp_path) as shim:
        step(tmp_path)
    call = next(c for c in shim.calls if c.kind == kind)
    for path in tmp_path.iterdir():
        path.unlink() if path.is_file() else path.rmdir()
    (tmp_path / "there").write_text("text")
    with Shim(tmp_path, Fault(at=call.number, code=call.faults[0])) as shim:
        outcome = called(lambda: step(tmp_path))
    assert outcome.code != 0
    assert [c.number for c in shim.raised] == [call.number]
    assert os.stat is not shim._wrapped("stat", "stat", False), "everything is put back"
    assert (tmp_path / "there").parent.exists()


def test_outside_of_its_directory_nothing_fails(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    with Shim(tmp_path / "in", Fault(at=0, code=errno.EIO, lasting=True)) as shim:
        (tmp_path / "out").write_text("x")
        assert called(lambda: (tmp_path / "in" / "f").write_text("x")).code == 1
    assert len(shim.raised) >= 1


def test_a_writer_that_swallows_an_error_is_found(tmp_path: Path) -> None:
    """The judge itself: a commit whose failed writes are ignored must not pass."""

    def careless(box: Path) -> None:
        attempt = staged(new_store(box), 0)
        path = next(iter(attempt.files.values()))
        with open(path, "r+b", buffering=0) as file:
            data = file.read()
            file.seek(0)
            file.write(bytes(len(data)))  # the rows are on their way …
            file.seek(0)
            with contextlib.suppress(OSError):  # … and nobody looks
                file.write(data)
        attempt.commit()

    harness = Harness(scenario("careless", lambda box: None, careless, is_committed), tmp_path)
    writes = [c for c in harness.calls if c.name == "file.write" and c.place == "outside"]
    assert len(writes) == 2
    harness.inject(Fault(at=writes[1].number, code=errno.ENOSPC))
    assert len(harness.tally.broken) == 1
    assert "not equal" in harness.tally.broken[0].why
    harness.inject(Fault(at=writes[1].number, code=SHORT))
    assert len(harness.tally.broken) == 2, "a short write that nobody continues"


def test_a_descriptor_that_stays_open_is_found(tmp_path: Path) -> None:
    kept: list[int] = []

    def leaky(box: Path) -> None:
        new_store(box)
        kept.append(os.open(store_of(box) / "store.json", os.O_RDONLY))
        os.fstat(kept[-1])
        os.close(kept.pop())

    harness = Harness(scenario("leaky", lambda box: None, leaky, lambda box, _: None), tmp_path)
    call = next(c for c in harness.calls if c.name == "os.fstat" and c.place == "outside")
    harness.inject(Fault(at=call.number, code=errno.EIO))
    os.close(kept.pop())
    assert "descriptors left open" in harness.tally.broken[0].why


def test_a_wrong_exit_code_is_found(tmp_path: Path) -> None:
    wrong = dataclasses.replace(SCENARIOS[0], codes=lambda fault, call: {99})
    harness = Harness(wrong, tmp_path)
    harness.inject(next(f for f in harness.faults() if f.code == errno.ENOSPC))
    assert "exit code 4, expected {99}" in harness.tally.broken[0].why
