"""Rows of a server on their way to clients: bounded, dropped on demand, never into files that nobody has staged."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from extractor.sglang_plugin.capture import Capture
from extractor.sglang_plugin.delivery import Delivery, refuse_unstaged
from extractor.sglang_plugin.protocol import FINAL, Target, WriteError
from extractor.sglang_plugin.spool import Spool, make_spool
from extractor.sglang_plugin.writer import NoRoomYetError, OpenFiles, Rows, RowWriter
from hsstore import owner

TICKET = "0" * 31 + "1"
OTHER = "0" * 31 + "2"
THIRD = "0" * 31 + "3"


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    (tmp_path / "spool").mkdir()
    return Spool(tmp_path / "spool", 1000)


@pytest.fixture
def files() -> Iterator[OpenFiles]:
    files = OpenFiles()
    yield files
    files.close()


@pytest.fixture
def staged(tmp_path: Path) -> Path:
    directory = tmp_path / "store" / "staging" / "000003.00ff00ff"
    directory.mkdir(parents=True)
    owner.mark(directory)
    path = directory / "hidden.final"
    path.write_bytes(bytes(100))
    return path


def rows(path: str = "", ticket: str = TICKET, **more: object) -> Rows:
    values: dict[str, object] = {"first": True, "last": True, "total_bytes": 8, **more}
    data = np.arange(1, 9, dtype=np.uint8)
    return Rows(request=1, path=path, offset=0, data=data, ticket=ticket, **values)  # type: ignore[arg-type]


def test_rows_in_chunks_are_complete_with_the_last_one(spool: Spool, files: OpenFiles) -> None:
    """A client must never read a part of a sample for all of it."""
    puts: list[Rows] = []
    capture = Capture(Target(1, 5, 77, {"after_2": "", "final": ""}, {"after_2": 0, "final": FINAL}, TICKET))
    states = torch.arange(40, dtype=torch.float32).reshape(5, 8)
    for start, end in ((0, 3), (3, 5)):
        capture.add(states[start:end, :4], states[start:end, 4:], puts.append)
    delivery = Delivery(spool)
    for part in puts:
        assert not spool.rows(TICKET).exists()
        delivery.write(files, part)
    body = np.frombuffer(spool.rows(TICKET).read_bytes(), np.uint16)
    expected = states.to(torch.bfloat16).view(torch.uint16).numpy()
    np.testing.assert_array_equal(body.reshape(2, 5, 4), [expected[:, :4], expected[:, 4:]])
    assert len(files) == 0
    receipt = capture.receipt(prompt_tokens=5, cached_tokens=0, points=(2,))
    assert (receipt.error, set(receipt.crc32c)) == ("", {"after_2", "final"})


def start_writer(spool: Spool, wait_seconds: float = 600) -> RowWriter:
    delivery = Delivery(spool, wait_seconds=wait_seconds)
    return RowWriter(delivery.report, write=delivery.write, sweep=delivery.sweep)


def wait_until(condition: Callable[[], object]) -> None:
    while not condition():  # the time limit of the suite ends a test that waits for ever
        time.sleep(0.005)


def test_a_full_spool_waits_for_room_and_says_so_when_none_comes(spool: Spool) -> None:
    """Back-pressure: the memory of the server's machine is not the client's to fill."""
    spool.begin(OTHER, 996)
    hasty = start_writer(spool, wait_seconds=0.05)
    hasty.put(rows(ticket=THIRD))
    hasty.close()
    failed = spool.failure(THIRD)
    assert failed is not None
    assert (failed.errno, "was full" in failed.reason) == (errno.ENOBUFS, True)
    patient = start_writer(spool)
    patient.put(rows(last=False))
    patient.put(rows(first=False))  # the rest of a request keeps its place behind its first rows
    spool.drop(OTHER)
    patient.close()
    assert spool.rows(TICKET).exists()


def test_rows_that_wait_for_room_hold_up_nobody_else(tmp_path: Path, staged: Path) -> None:
    """One client was killed, and what it left fills the spool: files of other extractions and trial tokens go on."""
    spool = Spool(tmp_path, 100_000)
    spool.begin(OTHER, 95_000)
    writer = start_writer(spool)
    first, second = "a" * 32, "b" * 32
    for ticket in (first, second):
        writer.put(rows(ticket=ticket, total_bytes=5_000 if ticket == first else 200))
    writer.put(rows(str(staged), THIRD))
    writer.put(rows())
    wait_until(lambda: spool.rows(TICKET).exists() and staged.read_bytes()[:8] == bytes(range(1, 9)))
    assert not spool.rows(first).exists()
    spool.drop(OTHER)
    wait_until(lambda: spool.rows(first).exists() and spool.rows(second).exists())
    writer.close()


def test_those_that_wait_come_in_their_order(tmp_path: Path, files: OpenFiles) -> None:
    """Else small samples would pass a long one for ever."""
    spool = Spool(tmp_path, 100_000)
    spool.begin(OTHER, 60_000)
    delivery = Delivery(spool)
    long, short = rows(total_bytes=80_000), rows(ticket=THIRD, total_bytes=5_000)
    for waiting in (long, short):
        with pytest.raises(NoRoomYetError):
            delivery.write(files, waiting)
    spool.drop(OTHER)
    with pytest.raises(NoRoomYetError):
        delivery.write(files, short)
    delivery.write(files, long)
    delivery.write(files, short)
    assert spool.rows(THIRD).exists()


def test_a_client_that_fell_silent_gives_its_room_to_others(tmp_path: Path) -> None:
    """It was killed: what it had, and what waits for room on its behalf, goes long before anybody gives up."""
    spool = Spool(tmp_path, 100_000, lease_seconds=0.2)
    writer = start_writer(spool)
    dead = [f"{i:032x}" for i in range(100, 108)]
    for ticket in dead:
        writer.put(rows(ticket=ticket, total_bytes=60_000))
    writer.put(rows(total_bytes=60_000))

    def delivered() -> bool:
        spool.asked(TICKET)
        return spool.rows(TICKET).exists()

    wait_until(delivered)
    writer.close()
    assert any("nobody asked" in failed.reason for ticket in dead if (failed := spool.failure(ticket)))


def test_rows_are_kept_for_whoever_asks(spool: Spool) -> None:
    for ticket in (TICKET, OTHER):
        spool.begin(ticket, 8)
        spool.finish(ticket)
        os.utime(spool.rows(ticket), (0, 0))
    spool.asked(TICKET)
    spool.asked(THIRD)
    assert spool.silent_seconds(THIRD) < spool.lease_seconds < spool.silent_seconds(OTHER)
    spool.sweep()
    assert sorted(path.name for path in spool.directory.iterdir()) == [f"{TICKET}.rows", f"{THIRD}.asked"]


def test_rows_larger_than_the_spool_pass_alone(spool: Spool) -> None:
    spool.begin(TICKET, 5000)
    assert spool.used_bytes() == 5000


def test_nothing_is_written_for_what_was_dropped(spool: Spool, files: OpenFiles, staged: Path) -> None:
    """A client that gave up has its sample done elsewhere; late rows would lie over those."""
    spool.drop(TICKET)
    for path in ("", str(staged)):
        with pytest.raises(OSError, match="nobody waits"):
            Delivery(spool).write(files, rows(path))
    assert staged.read_bytes() == bytes(100)
    late = rows(str(staged), OTHER, deadline=time.monotonic() - 1)
    with pytest.raises(OSError, match="nobody waits"):
        Delivery(spool).write(files, late)
    assert not spool.rows(TICKET).exists()


def test_dropped_while_it_is_written_goes_when_it_is_complete(spool: Spool, files: OpenFiles) -> None:
    spool.begin(TICKET, 8)
    (spool.directory / f"{TICKET}.dropped").touch()
    spool.finish(TICKET)
    assert not spool.rows(TICKET).exists()


def test_a_failed_write_is_noted_once_and_the_rest_of_its_rows_left_out(spool: Spool, staged: Path) -> None:
    delivery = Delivery(spool)
    writer = RowWriter(delivery.report, write=delivery.write, sweep=delivery.sweep)
    gone = str(staged.with_name("hidden.gone"))
    writer.put(rows(gone, last=False))
    writer.put(rows(str(staged), first=False))
    writer.put(rows(str(staged), OTHER))
    writer.close()
    found = spool.failure(TICKET)
    assert found == WriteError(1, gone, errno.ENOENT, "No such file or directory", TICKET)
    assert spool.failure(OTHER) is None
    assert staged.read_bytes()[:8] == bytes(range(1, 9))


def test_a_spool_that_is_gone_does_not_end_the_writer(spool: Spool, staged: Path) -> None:
    """A dead thread would stop the scheduler at a full queue."""
    delivery = Delivery(spool)
    writer = RowWriter(delivery.report, write=delivery.write, sweep=delivery.sweep)
    spool.directory.rmdir()
    writer.put(rows())
    writer.put(rows(str(staged)))
    writer.close()
    assert staged.read_bytes()[:8] == bytes(range(1, 9))


def test_what_nobody_fetches_goes_by_time(tmp_path: Path) -> None:
    spool = Spool(tmp_path, 1000, keep_seconds=100, lease_seconds=100)
    spool.begin(TICKET, 10)
    spool.finish(TICKET)
    spool.begin(OTHER, 10)
    old = time.time() - 200
    os.utime(spool.rows(TICKET), (old, old))
    spool.sweep()
    assert [path.name for path in tmp_path.iterdir()] == [f"{OTHER}.part"]


def test_files_are_closed_after_each_request(spool: Spool, files: OpenFiles, staged: Path) -> None:
    """A network file system hands on what is closed."""
    Delivery(spool).write(files, rows(str(staged)))
    assert len(files) == 0
    assert staged.read_bytes()[:8] == bytes(range(1, 9))


def test_only_staged_files_are_written(tmp_path: Path, staged: Path) -> None:
    """Whoever reaches the server can name any file of its machine."""
    refuse_unstaged(str(staged))
    home = tmp_path / "authorized_keys"
    home.write_bytes(bytes(100))
    link = staged.with_name("hidden.link")
    link.symlink_to(home)
    second = tmp_path / "published"
    unmarked = tmp_path / "other" / "staging" / "000001.00ff" / "hidden.final"
    unmarked.parent.mkdir(parents=True)
    unmarked.write_bytes(b"x")
    outside = tmp_path / "x" / "staging" / "000001.00ff"
    outside.parent.mkdir(parents=True)
    outside.symlink_to(tmp_path)
    owner.mark(tmp_path)
    bad = [home, link, unmarked, outside / "authorized_keys", staged.parent / ".." / staged.parent.name / staged.name]
    for path in bad:
        with pytest.raises(OSError) as caught:
            refuse_unstaged(str(path))
        assert caught.value.errno == errno.EACCES, path
    with pytest.raises(FileNotFoundError):
        refuse_unstaged(str(staged.with_name("hidden.nowhere")))
    os.link(staged, second)  # its shard is being published: the bytes are committed
    with pytest.raises(PermissionError):
        refuse_unstaged(str(staged))


@pytest.mark.parametrize("ticket", ["", "../../etc/passwd", "0" * 31, "G" * 32, "0" * 33])
def test_a_ticket_names_no_other_file(spool: Spool, ticket: str) -> None:
    with pytest.raises(ValueError, match="no ticket"):
        spool.rows(ticket)


def test_a_spool_travels_by_one_variable(tmp_path: Path) -> None:
    made = make_spool(tmp_path, 12345)
    again = Spool.of(str(made))
    assert (again.directory, again.max_bytes) == (made.directory, 12345)
    assert made.directory.parent == tmp_path
    assert Spool.of(str(tmp_path)).directory == tmp_path
    assert make_spool(tmp_path, 1 << 60).max_bytes < 1 << 60  # never more than there is
