from __future__ import annotations

import errno
import http.server
import os
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hsstore import paths, places
from hsstore.errors import (
    DamagedError,
    FormatError,
    HsstoreError,
    MissingExtraError,
    NotFoundError,
    ServiceError,
    UsageError,
)
from hsstore.places import LocalPlace, Place, open_place
from hsstore.records import ShardRecord, canonical


@pytest.fixture(params=["local", "file", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """An empty place of each kind."""
    match request.param:
        case "local":
            return open_place(tmp_path / "at")
        case "file":
            return open_place(f"file://{tmp_path}/with%20space/at")
    return open_place(f"memory://{uuid.uuid4()}/a/prefix")


def _put(place: Place, path: str, data: bytes) -> None:
    place.put(path, lambda: [data[:3], data[3:]], len(data))


def test_what_is_put_is_read(place: Place) -> None:
    """Whole, in ranges, in pieces; a range ends where the file ends."""
    data = os.urandom(3 << 20)
    _put(place, "a/b/file", data)
    assert place.read("a/b/file") == data
    assert place.size("a/b/file") == len(data)
    assert place.exists("a/b/file")
    assert place.read_range("a/b/file", 5, 100) == data[5:105]
    assert place.read_range("a/b/file", len(data) - 3, 100) == data[-3:]
    assert place.read_range("a/b/file", len(data), 100) == b""
    for fresh in (False, True):
        pieces = [bytes(p) for p in place.stream("a/b/file", 1 << 20, fresh=fresh)]
        assert b"".join(pieces) == data
        assert len(pieces) > 1 or place.local is None


def test_put_replaces_and_write_new_does_not(place: Place) -> None:
    _put(place, "f", b"first")
    _put(place, "f", b"second")
    assert place.read("f") == b"second"
    assert not place.write_new("f", b"third")
    assert place.write_new("d/g", b"new")
    assert not place.write_new("d/g", b"newer")
    assert (place.read("f"), place.read("d/g")) == (b"second", b"new")
    assert place.names("d") == ["g"]


def test_names_are_those_of_files_directly_in_a_directory(place: Place) -> None:
    assert place.is_empty()
    assert place.names("") == place.names("x") == []
    for path in ("x/b", "x/a", "x/y/c", "top"):
        _put(place, path, b"data")
    assert place.names("x") == ["a", "b"]
    assert place.names("") == ["top"]
    assert not place.is_empty()


def test_what_is_not_there(place: Place) -> None:
    _put(place, "file", b"data")
    for path in ("nothing", "file/below", "no/thing"):
        assert place.size(path) is None
        assert not place.exists(path)
        for read in (place.read, lambda p: place.read_range(p, 0, 1), lambda p: list(place.stream(p))):
            with pytest.raises(NotFoundError, match=path):
                read(path)


@pytest.mark.parametrize("n_bytes", [10, 20 << 20])
def test_a_put_that_breaks_off_leaves_what_was_there(place: Place, n_bytes: int) -> None:
    """The error of the pieces passes through as it is, or a wrong number of bytes is refused: nothing is replaced."""
    _put(place, "f", b"first")

    def broken() -> Iterator[bytes]:
        yield bytes(n_bytes // 2)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        place.put("f", broken, n_bytes)
    for wrong in (n_bytes - 1, n_bytes + 1):
        with pytest.raises(DamagedError, match=f"has {wrong} bytes, expected {n_bytes}"):
            place.put("f", lambda wrong=wrong: [bytes(wrong)], n_bytes)
    assert place.read("f") == b"first"
    assert place.names("") == ["f"]


def test_a_store_reads_the_same_from_any_place(place: Place, store_path: Path) -> None:
    local = open_place(store_path)
    _copy_plainly(local, place)
    header = places.load_header(place)
    assert canonical(header) == (store_path / paths.HEADER).read_bytes()
    assert places.load_layouts(place, header) == places.load_layouts(local, header)
    records = places.load_records(place, header)
    assert [type(r) for r in records.values()] == [ShardRecord] * 2
    assert records == places.load_records(local, header)
    assert places.load_tombstones(place, header) == []


def _copy_plainly(source: Place, to: Place) -> None:
    for directory in ("", paths.LAYOUTS, paths.RECORDS):
        for name in source.names(directory):
            path = f"{directory}/{name}".lstrip("/")
            _put(to, path, source.read(path))


def test_damaged_records_are_results_and_foreign_ones_are_named(place: Place, store_path: Path) -> None:
    """One bad record must not hide the others; whatever is wrong with it, it is damage with its file's name."""
    _copy_plainly(open_place(store_path), place)
    header = places.load_header(place)
    good = place.read("records/000000.json")
    for bad in (good[:-1], good.replace(b'"shard":0', b'"shard":1'), b"", b"[]", good + b"\n", b"\xff"):
        _put(place, "records/000000.json", bad)
        found = places.load_records(place, header)
        assert isinstance(found[0], DamagedError)
        assert "records/000000.json" in found[0].message
        assert isinstance(found[1], ShardRecord)
    _put(place, "records/000000.json", place.read("records/000001.json"))
    assert "record of shard 1" in str(places.load_records(place, header)[0])
    _put(place, paths.HEADER, place.read(paths.HEADER).replace(b'"format":1', b'"format":2'))
    with pytest.raises((DamagedError, FormatError)):
        places.load_header(place)


def test_no_store_there(place: Place) -> None:
    with pytest.raises(NotFoundError, match="is not a store"):
        places.load_header(place)


def test_a_fifo_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    place = LocalPlace(tmp_path)
    for read in (place.read, lambda p: list(place.stream(p)), lambda p: place.read_range(p, 0, 1)):
        with pytest.raises(DamagedError, match="no plain file"):
            read("pipe")
    assert place.size("pipe") is None


def test_a_medium_that_gives_an_error_is_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "f").write_bytes(b"data")

    def broken(*_: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "readv", broken)
    monkeypatch.setattr(os, "pread", broken)
    with pytest.raises(DamagedError, match="cannot be read"):
        list(LocalPlace(tmp_path).stream("f"))
    with pytest.raises(DamagedError, match="cannot be read"):
        LocalPlace(tmp_path).read_range("f", 0, 2)


@pytest.mark.parametrize(
    "spec", ["ftp://x/y", "s3://", "http://", "file://elsewhere/x", "https://user:word@x/y", "x://"]
)
def test_urls_that_cannot_be_one(spec: str) -> None:
    with pytest.raises(UsageError):
        open_place(spec)


def test_without_the_library_the_extra_is_named(tmp_path: Path) -> None:
    """And local places work without it."""
    code = (
        "import sys; sys.modules['obstore'] = None\n"
        "from hsstore.places import open_place\n"
        "from hsstore.errors import MissingExtraError\n"
        f"open_place({str(tmp_path)!r}).names('')\n"
        "try: open_place('s3://bucket/x')\n"
        "except MissingExtraError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'hsstore[remote]'" in done.stdout
    assert MissingExtraError.exit_code == 2


class _Files(http.server.SimpleHTTPRequestHandler):
    """A plain file server; `shows_index` decides whether it lists directories."""

    shows_index = True
    directory = ""

    def log_message(self, *_: Any) -> None:
        pass

    def list_directory(self, path: Any) -> Any:
        if self.shows_index:
            return super().list_directory(path)
        self.send_error(403)
        return None


@pytest.fixture
def web(store_path: Path) -> Iterator[str]:
    handler = partial(_Files, directory=str(store_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("shows_index", [True, False])
def test_a_web_server_is_a_place_to_read(
    web: str, store_path: Path, shows_index: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With index pages or, without them, by the names in manifest.sha256."""
    monkeypatch.setattr(_Files, "shows_index", shows_index)
    place, local = open_place(web), open_place(store_path)
    header = places.load_header(place)
    assert places.load_layouts(place, header) == places.load_layouts(local, header)
    assert places.load_records(place, header) == places.load_records(local, header)
    assert places.load_tombstones(place, header) == []
    data = (store_path / "arrays.zarr/hidden/final/c/0/0").read_bytes()
    assert b"".join(place.stream("arrays.zarr/hidden/final/c/0/0")) == data
    with pytest.raises(NotFoundError):
        place.read("nothing")
    with pytest.raises(UsageError, match="can only be read"):
        place.put("x", lambda: [b"x"], 1)


def test_a_web_server_that_ignores_ranges_is_refused(web: str) -> None:
    """Python's own gives the whole file for a part of it: to take that for the part would be damage."""
    with pytest.raises(ServiceError) as caught:
        open_place(web).read_range("arrays.zarr/hidden/final/c/0/0", 100, 10)
    assert isinstance(caught.value, HsstoreError)


def test_a_full_disk_is_the_systems_own_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space left"):
        LocalPlace(tmp_path).put("d/f", lambda: [b"data"], 4)
    assert os.listdir(tmp_path / "d") == []
