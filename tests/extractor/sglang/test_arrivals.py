"""A ticket means that the rows lie in the file as they were captured."""

from __future__ import annotations

import errno
import threading
from pathlib import Path

import pytest

from extractor.sglang_plugin.arrivals import Arrivals
from extractor.sglang_plugin.protocol import Receipt, Target, WriteError
from hsstore.digest import crc32c
from hsstore.errors import IncompleteError, NoSpaceError

ROW_BYTES = 8
DATA = bytes(range(1, 1 + 3 * ROW_BYTES))


class Case:
    def __init__(self, directory: Path) -> None:
        self.path = directory / "final"
        self.path.write_bytes(bytes(10 * ROW_BYTES))
        self.target = Target(4, 3, 2, {"final": str(self.path)}, {"final": -1})
        self.receipt = Receipt(3, {"final": crc32c(DATA)}, (1,))
        self.errors: list[WriteError] = []

    def arrivals(self, seconds: float = 10.0) -> Arrivals:
        return Arrivals(self._reported, row_bytes=ROW_BYTES, seconds=seconds)

    def _reported(self) -> list[WriteError]:
        errors, self.errors = self.errors, []
        return errors

    def write(self) -> None:
        with open(self.path, "r+b") as file:
            file.seek(2 * ROW_BYTES)
            file.write(DATA)


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return Case(tmp_path)


def test_rows_that_are_there_are_confirmed(case: Case) -> None:
    case.write()
    case.arrivals(0).confirm(case.target, case.receipt)


def test_late_rows_are_waited_for(case: Case) -> None:
    """The scheduler answers before its writer thread has written."""
    timer = threading.Timer(0.2, case.write)
    timer.start()
    case.arrivals().confirm(case.target, case.receipt)
    timer.join()


def test_rows_that_never_come_are_an_error(case: Case) -> None:
    with pytest.raises(IncompleteError, match=r"rows 2 to 4 of .*final are not what was captured"):
        case.arrivals(0.05).confirm(case.target, case.receipt)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_said_at_once(case: Case, number: int) -> None:
    case.errors = [WriteError(9, "/other", errno.EIO, "x"), WriteError(4, str(case.path), number, "full")]
    with pytest.raises(NoSpaceError, match=r"no space left .*final.*--resume"):
        case.arrivals().confirm(case.target, case.receipt)


def test_another_write_error_is_said_with_its_reason(case: Case) -> None:
    case.errors = [WriteError(4, str(case.path), errno.EIO, "Input/output error")]
    with pytest.raises(IncompleteError, match="Input/output error"):
        case.arrivals().confirm(case.target, case.receipt)


def test_errors_of_other_requests_are_kept_for_them_until_forgotten(case: Case) -> None:
    arrivals = case.arrivals(0.05)
    case.errors = [WriteError(5, str(case.path), errno.EIO, "later")]
    with pytest.raises(IncompleteError, match="not what was captured"):
        arrivals.confirm(case.target, case.receipt)
    other = Target(5, 3, 2, case.target.files, case.target.columns)
    with pytest.raises(IncompleteError, match="later"):
        arrivals.confirm(other, case.receipt)
    case.errors = [WriteError(5, str(case.path), errno.EIO, "later")]
    arrivals.forget()
    with pytest.raises(IncompleteError, match="not what was captured"):
        arrivals.confirm(other, case.receipt)


def test_a_file_that_is_gone_is_an_error(case: Case) -> None:
    case.path.unlink()
    with pytest.raises(IncompleteError, match="cannot read"):
        case.arrivals().confirm(case.target, case.receipt)
