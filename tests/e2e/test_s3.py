"""Copies to and from a real S3 server process on loopback, over connections that are cut, silent or dead."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hsstore import console, manifest, paths, places, zarrmeta
from hsstore.cli import run
from hsstore.copying import Copy, Event
from hsstore.errors import HsstoreError, NotFoundError, ServiceError
from hsstore.objectplace import Patience, open_object_place
from hsstore.places import Place, open_place
from hsstore.store import Store
from hsstore.verify import Verifier
from tests.e2e.s3server import Proxy, make_bucket, s3_server, uploads
from tests.hsstore.test_copy import contents
from tests.stores import make_samples, make_store

QUICK = Patience(
    total_seconds=60, retries=2, retry_seconds=30, first_wait_seconds=0.01, longest_wait_seconds=0.1, read_seconds=30
)


@pytest.fixture(scope="module")
def server() -> Iterator[int]:
    with s3_server() as port:
        yield port


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """3 shards of two files of 10 MB, which take two parts each, and two small ones."""
    samples = make_samples([1000] * 12, hidden_size=1280, layers=("after_2", "final"))
    root = tmp_path_factory.mktemp("s3") / "source"
    make_store(root, samples, shard_rows=4096).close()
    sizes = sorted(p.stat().st_size for p in root.glob("arrays.zarr/hidden/*/c/*/*"))
    assert len(sizes) == 6
    assert sizes[0] > 8 << 20  # more than one part
    return root


@pytest.fixture
def proxy(server: int) -> Iterator[Proxy]:
    with Proxy(server) as proxy:
        yield proxy


@pytest.fixture
def bucket(server: int, proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> str:
    """A bucket of its own, reached through the proxy by what the environment says."""
    name = f"b{uuid.uuid4().hex[:16]}"
    make_bucket(server, name)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    return f"s3://{name}/a/store"


@pytest.fixture(autouse=True)
def loud() -> Iterator[None]:
    yield
    console.set_quiet(False)


def at(spec: object, patience: Patience = QUICK) -> Place:
    return open_object_place(str(spec), patience) if str(spec).startswith("s3:") else open_place(str(spec))


def copy(source: object, destination: object, **options: Any) -> Copy:
    work = Copy(at(source), at(destination), **options)
    assert [e for e in work.events() if e.kind == "damaged"] == []
    return work


def committed_whole(place: Place) -> list[int]:
    """The shards of a place; every file of each is there and is what the record says."""
    try:
        header = places.load_header(place)
    except NotFoundError:
        return []
    records = places.load_records(place, header)
    for record in records.values():
        assert not isinstance(record, HsstoreError), record
        for path, entry in record.files.items():
            assert place.size(path) == entry.bytes
    return list(records)


def test_out_and_back_and_from_bucket_to_bucket(source: Path, bucket: str, server: int, tmp_path: Path) -> None:
    """Every byte and the manifest_id; nothing is left over in the bucket."""
    out = copy(source, bucket)
    assert out.summary.copied == 3
    other = copy(bucket, f"{bucket}-2", jobs=3)
    back = copy(f"{bucket}-2", tmp_path / "back")
    assert {w.summary.manifest_id for w in (out, other, back)} == {manifest.manifest_id(manifest.load(source))}
    assert contents(tmp_path / "back") == contents(source)
    assert [f for f in Verifier(tmp_path / "back", "full").findings() if f.severity == "damage"] == []
    with Store.open(tmp_path / "back") as store, Store.open(source) as original:
        assert (store.hidden(7, "final") == original.hidden(7, "final")).all()
    assert at(bucket).names(paths.STAGING) == []
    assert "<Upload>" not in uploads(server, bucket.split("/")[2])
    again = copy(source, bucket)
    assert (again.summary.copied, again.summary.already_there) == (0, 3)


def test_the_server_honours_conditional_puts(bucket: str) -> None:
    """What makes the record a commit: of many at once exactly one wins, and its bytes stay."""
    place = at(bucket)
    assert place.honours_conditions()  # type: ignore[attr-defined]
    won: list[int] = []
    threads = [
        threading.Thread(target=lambda i=i: place.write_new("records/1", b"%d" % i) and won.append(i)) for i in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert place.read("records/1") == b"%d" % won[0]


def test_a_copy_killed_while_it_found_that_out(source: Path, bucket: str, tmp_path: Path) -> None:
    """Its one object is no reason to take the place for something else's."""
    at(bucket).put(f"{paths.STAGING}/conditional-put", lambda: [b"hsstore\n"], 8)
    assert copy(source, bucket).summary.copied == 3


def test_a_server_without_conditional_puts(source: Path, bucket: str, proxy: Proxy, tmp_path: Path) -> None:
    """It is found out and said; by look, then put, a record that is there is still not replaced."""
    proxy.manners.deaf_to_conditions = True
    work = Copy(at(source), at(bucket))
    notes = [e.detail for e in work.events() if e.kind == "note"]
    assert len(notes) == 1
    assert "ignores conditional puts" in notes[0]
    assert proxy.manners.stripped > 0
    assert not at(bucket).write_new("records/000000.json", b"mine")
    assert copy(bucket, tmp_path / "back").summary.manifest_id == work.summary.source_manifest_id
    proxy.manners.deaf_to_conditions = False


def test_connections_that_are_cut_in_the_midst(
    source: Path, bucket: str, server: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a random number of bytes, in either direction, again and again: the bytes are right all the same."""
    with Proxy(server, seed=1) as bad:
        bad.manners.cut = (100, 4 << 20)
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{bad.port}")
        out = copy(source, bucket, jobs=2)
        first = dict(bad.manners.cuts)
        back = copy(bucket, tmp_path / "back", jobs=2)
        cuts = bad.manners.cuts
        print(f"cut while copying out: {first}, in all: {cuts}")
        assert min(cuts.values()) >= 1
        assert sum(cuts.values()) >= 4
    assert out.summary.manifest_id == back.summary.manifest_id == out.summary.source_manifest_id
    assert contents(tmp_path / "back") == contents(source)


def events_until(work: Copy, n: int) -> tuple[list[Event], Any]:
    events = work.events()
    return [next(events) for _ in range(n)], events


@pytest.mark.parametrize("way", ["out", "back"])
def test_a_server_that_goes_away_and_comes_back(
    source: Path, bucket: str, proxy: Proxy, tmp_path: Path, way: str
) -> None:
    """A clear error after the patience; no half of a shard is committed; the same copy completes later."""
    impatient = Patience(total_seconds=1, retries=1, retry_seconds=1, first_wait_seconds=0.05, longest_wait_seconds=0.2)
    if way == "back":
        copy(source, bucket)
    ends = (source, bucket) if way == "out" else (bucket, tmp_path / "back")
    work = Copy(at(ends[0], impatient), at(ends[1], impatient), jobs=1)
    _, events = events_until(work, 1)
    proxy.manners.dead = True
    proxy.reset_all()
    with pytest.raises(ServiceError, match=r"tried \d+ times") as caught:
        list(events)
    assert "s3://" in caught.value.message
    assert caught.value.hint
    proxy.manners.dead = False
    done = committed_whole(at(ends[1]))
    assert 1 <= len(done) < 3
    again = copy(*ends)
    assert again.summary.already_there == len(done)
    assert again.summary.manifest_id == again.summary.source_manifest_id
    if way == "out":
        ends = (bucket, tmp_path / "back")
        copy(*ends)
    assert contents(tmp_path / "back") == contents(source) | contents_kept(tmp_path / "back")


def contents_kept(root: Path) -> dict[str, bytes]:
    return {path: data for path, data in contents(root).items() if path.startswith(f"{paths.MANIFESTS}/")}


def test_a_server_that_says_nothing(source: Path, bucket: str, proxy: Proxy, tmp_path: Path) -> None:
    """It takes the connection and never answers: an error after the patience, no hang."""
    proxy.manners.silent = True
    deaf = Patience(
        total_seconds=1,
        retries=1,
        retry_seconds=0.5,
        first_wait_seconds=0.05,
        longest_wait_seconds=0.1,
        read_seconds=0.3,
    )
    begun = time.monotonic()
    for ends in ((source, bucket), (bucket, tmp_path / "back")):
        with pytest.raises(ServiceError, match="tried"):
            list(Copy(at(ends[0], deaf), at(ends[1], deaf)).events())
    assert time.monotonic() - begun < 300
    assert not (tmp_path / "back").exists()


def test_no_such_bucket_and_no_such_server(
    source: Path, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for ends in ((f"{bucket}/none", tmp_path / "x"), ("s3://no-such-bucket/x", tmp_path / "x")):
        assert run(["copy", *map(str, ends)]) == 10
    assert run(["copy", str(source), "s3://no-such-bucket/x"]) == 10
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    assert run(["copy", str(source), bucket, "--patience", "1s"]) == ServiceError.exit_code


def test_a_bucket_of_something_else(source: Path, bucket: str) -> None:
    at(bucket).put("notes.txt", lambda: [b"mine"], 4)
    assert run(["copy", str(source), bucket]) == 2
    assert at(bucket).names("") == ["notes.txt"]


def test_two_copies_at_once_to_one_bucket(source: Path, bucket: str, tmp_path: Path) -> None:
    """Without leases there: both do the work, both end well, what is committed is whole."""
    done: list[Copy | BaseException] = []

    def one() -> None:
        try:
            done.append(copy(source, bucket))
        except BaseException as error:
            done.append(error)

    threads = [threading.Thread(target=one) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [type(d) for d in done] == [Copy, Copy], done
    assert committed_whole(at(bucket)) == [0, 1, 2]
    assert copy(bucket, tmp_path / "back").summary.manifest_id == manifest.manifest_id(manifest.load(source))


def test_a_killed_upload_commits_nothing_half(source: Path, bucket: str, proxy: Proxy, tmp_path: Path) -> None:
    """SIGKILL in the midst of an upload, several times: whole shards or none, and the last run completes."""
    states = []
    for after in (2, 5, 7):
        proxy.hold_after(after)
        process = subprocess.Popen(
            [sys.executable, "-m", "hsstore.cli", "copy", str(source), bucket, "--jobs", "1", "--quiet"],
            stdout=subprocess.DEVNULL,
        )
        assert proxy.holding.wait(240)
        process.send_signal(signal.SIGKILL)
        process.wait()
        proxy.hold_after(None)
        states.append(committed_whole(at(bucket)))
    assert states[-1] != [0, 1, 2], "the kills fell into the uploads"
    copy(source, bucket)
    back = copy(bucket, tmp_path / "back")
    assert back.summary.manifest_id == manifest.manifest_id(manifest.load(source))
    assert contents(tmp_path / "back") == contents(source) | contents_kept(tmp_path / "back")


def test_a_damaged_object_is_named(
    source: Path, bucket: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bit rot, or someone else's object: its shard is left out, the others arrive."""
    copy(source, bucket)
    place = at(bucket)
    victim = zarrmeta.chunk_path(places.load_header(place).arrays[0], 2)
    data = bytearray(place.read(victim))
    data[1000] ^= 1
    place.put(victim, lambda: [bytes(data)], len(data))
    assert run(["copy", bucket, str(tmp_path / "back")]) == 3
    assert f"damaged: shard 2: {victim}: SHA-256 differs" in capsys.readouterr().out
    assert committed_whole(at(tmp_path / "back")) == [0, 1]
    whole = bytes(data[:1000]) + bytes([data[1000] ^ 1]) + bytes(data[1001:])
    assert place.read_range(victim, 996, 8) == bytes(data[996:1004])
    place.put(victim, lambda: [whole], len(whole))
    assert run(["copy", bucket, str(tmp_path / "back")]) == 0
