"""The calls whose failure once did harm: each of them fails again here, whatever the sample of the suite draws."""

from __future__ import annotations

import errno
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.harness import Harness, in_memory
from tests.faults.scenarios import SCENARIOS
from tests.faults.shim import Fault

FOUND = [
    # (scenario, call, path, error, from there on): what happened
    ("manifest build", "os.rename", r"store/\.manifest\.json\..*", errno.ENOSPC, False),  # verify: index damaged
    ("read", "os.fstat", r"store/arrays\.zarr/.*", errno.EIO, False),  # a descriptor stayed open
    ("copy", "os.fstat", r"store/arrays\.zarr/.*", errno.EACCES, True),  # the same, of a place
    ("repair", "os.fstat", r"store/arrays\.zarr/.*", errno.EACCES, True),  # the same, of blocks
    ("follow", "os.close", r"store/arrays\.zarr/.*", errno.EIO, True),  # a traceback out of __del__
    ("copy", "os.unlink", r"copy/staging/\..*lease.*", errno.EACCES, False),  # waited two minutes for its own lease
    ("copy", "os.posix_fadvise", r"store/arrays\.zarr/.*", errno.EINVAL, False),  # failed where no advice is taken
    ("repair", "os.posix_fadvise", r"store/staging/.*", errno.EINVAL, True),  # the same
    ("gc", "os.unlink", r"store/staging/.*/hidden\.after_2", errno.EACCES, True),  # the rest was nobody's garbage
    ("follow", "open", r"store/manifests/.*", errno.EIO, False),  # said to be not kept
    ("verify quick", "os.scandir", r"store", errno.EIO, False),  # raised, or passed over in silence
    ("verify full", "os.scandir", r"store/arrays\.zarr/hidden", errno.EIO, True),
    ("verify full", "os.stat", r"store/store\.json", errno.EIO, True),
    ("verify quick", "os.stat", r"store/manifests", errno.EIO, True),  # the end of it instead of a finding
]


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="hsstore-faults-", dir=in_memory(tmp_path)) as directory:
        yield Path(directory)


@pytest.mark.parametrize(("name", "call", "path", "code", "lasting"), FOUND)
def test_it_does_no_harm_any_more(box: Path, name: str, call: str, path: str, code: int, lasting: bool) -> None:
    harness = Harness(next(s for s in SCENARIOS if s.name == name), box)
    calls = [c for c in harness.calls if c.name == call and re.fullmatch(path, c.path)]
    assert calls, "this call is not made any more: name the one that took its place"
    for at in {calls[0].number, calls[-1].number}:
        harness.inject(Fault(at=at, code=code, lasting=lasting))
    assert not harness.tally.broken, "\n".join(map(str, harness.tally.broken))
