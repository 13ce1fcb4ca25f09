"""Files over HTTP: the bytes on disk, any range of them, only what the records name, and damage as an answer."""

from __future__ import annotations

import hashlib
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hsstore.store import Store
from tests.server.live import Live, fetch, serving
from tests.stores import create, make_samples, make_store, stage

CHUNK = "arrays.zarr/hidden/final/c/0/0"


def url(live: Live, path: str, store: str = "tiny") -> str:
    return f"{live.url}/v1/stores/{store}/files/{path}"


def all_files(root: Path) -> list[str]:
    return sorted(p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file())


def test_every_file_of_the_store_is_there_byte_for_byte(live: Live, store: Store) -> None:
    """Whatever a copy needs can be fetched, and the ETag is the SHA-256 that manifest.sha256 lists."""
    lines = (line.split("  ") for line in (store.root / "manifest.sha256").read_text().splitlines())
    sums = {name: sha for sha, name in lines}
    names = [n for n in all_files(store.root) if not n.startswith("staging/")]
    assert len(names) > 20
    for name in names:
        answer = fetch("GET", url(live, name))
        data = (store.root / name).read_bytes()
        assert (answer.status, answer.body) == (200, data), name
        assert answer.headers["ETag"] == f'"{hashlib.sha256(data).hexdigest()}"'
        assert answer.headers["ETag"] == f'"{sums.get(name, hashlib.sha256(data).hexdigest())}"'
        head = fetch("HEAD", url(live, name))
        assert (head.status, head.headers["Content-Length"], head.body) == (200, str(len(data)), b"")
        assert head.headers["ETag"] == answer.headers["ETag"]
        assert fetch("GET", url(live, name), If_None_Match=answer.headers["ETag"]).status == 304


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), name=st.sampled_from([CHUNK, "records/000000.json"]))
def test_any_range_is_that_slice(live: Live, store: Store, data: st.DataObject, name: str) -> None:
    body = (store.root / name).read_bytes()
    first = data.draw(st.integers(0, len(body) - 1))
    last = data.draw(st.integers(first, len(body) + 5))
    answer = fetch("GET", url(live, name), Range=f"bytes={first}-{last}")
    assert (answer.status, answer.body) == (206, body[first : last + 1])
    assert answer.headers["Content-Range"] == f"bytes {first}-{min(last, len(body) - 1)}/{len(body)}"
    assert fetch("GET", url(live, name), Range=f"bytes={first}-").body == body[first:]
    tail = data.draw(st.integers(1, len(body) + 5))
    assert fetch("GET", url(live, name), Range=f"bytes=-{tail}").body == body[-tail:]


@pytest.mark.parametrize(
    "asked", ["bytes=0-1,4-5", "bytes=5-4", "bytes=-", "rows=0-1", "bytes=x-y", "bytes=" + "9" * 99 + "-"]
)
def test_a_range_that_is_none_is_ignored(live: Live, store: Store, asked: str) -> None:
    answer = fetch("GET", url(live, CHUNK), Range=asked)
    assert (answer.status, answer.body) == (200, (store.root / CHUNK).read_bytes())
    assert "Content-Range" not in answer.headers


@pytest.mark.parametrize("asked", ["bytes=99999999-", "bytes=-0", "bytes=99999999-100000000"])
def test_a_range_behind_the_end_is_refused(live: Live, store: Store, asked: str) -> None:
    answer = fetch("GET", url(live, CHUNK), Range=asked)
    size = (store.root / CHUNK).stat().st_size
    assert (answer.status, answer.json()["kind"], answer.headers["Content-Range"]) == (416, "usage", f"bytes */{size}")


def test_a_range_of_another_state_gives_the_whole_file(live: Live, store: Store) -> None:
    tag = fetch("HEAD", url(live, CHUNK)).headers["ETag"]
    assert fetch("GET", url(live, CHUNK), Range="bytes=0-3", If_Range=tag).status == 206
    assert fetch("GET", url(live, CHUNK), Range="bytes=0-3", If_Range='"older"').status == 200


@pytest.mark.parametrize(
    "path",
    [
        "",
        "../tiny/store.json",
        "..%2Fstore.json",
        "records/../store.json",
        "%2Fetc%2Fpasswd",
        "/etc/passwd",
        "secret.txt",
        "staging/x/hidden.final",
        "records/000099.json",
        "records/0.json",
        "records/000000.json/",
        "arrays.zarr/hidden/final/c/99/0",
        "arrays.zarr/hidden/final/c/0/0/0",
        "arrays.zarr/hidden/final/c/0",
        "arrays.zarr/hidden/final/c/00/0",
        "arrays.zarr/../store.json/c/0/0",
        "arrays.zarr/hidden/%00/c/0/0",
        "store.json%0d%0aX:%20y",
        f"manifests/{'0' * 64}.json",
        "a" * 3000,
    ],
)
def test_nothing_but_what_the_records_name(live: Live, store: Store, path: str) -> None:
    (store.root / "secret.txt").write_text("not for everybody")
    try:
        for method in ("GET", "HEAD"):
            answer = fetch(method, url(live, path))
            assert answer.status == 404
        assert fetch("GET", url(live, path)).json()["kind"] == "not_found"
    finally:
        (store.root / "secret.txt").unlink()


def test_files_are_behind_the_token(store: Store) -> None:
    with serving(store.root, token="open-sesame") as live:
        assert fetch("GET", url(live, "store.json")).status == 401
        answer = fetch("GET", url(live, "store.json"), Authorization="Bearer open-sesame")
        assert (answer.status, answer.headers["Cache-Control"]) == (200, "private, no-cache")


def test_a_truncated_file_is_an_error_and_what_is_left_of_it_can_be_read(tmp_path: Path) -> None:
    """A map would be SIGBUS; and the part that is there may be what another copy lacks."""
    store = make_store(tmp_path / "cut", make_samples([2000, 3000]), chunk_rows=256)
    path = store.root / CHUNK
    data = path.read_bytes()
    with serving(store.root) as live:
        path.chmod(0o644)
        os.truncate(path, 5000)
        for asked in ({}, {"Range": "bytes=4096-5000"}, {"Range": "bytes=-4"}):
            answer = fetch("GET", url(live, CHUNK, "cut"), **asked)
            assert (answer.status, answer.json()["kind"]) == (503, "damaged")
        answer = fetch("GET", url(live, CHUNK, "cut"), Range="bytes=4096-4999")
        assert (answer.status, answer.body) == (206, data[4096:5000])
        path.unlink()
        assert fetch("GET", url(live, CHUNK, "cut")).json()["kind"] == "damaged"
        path.mkdir()
        assert fetch("GET", url(live, CHUNK, "cut")).json()["kind"] == "damaged"
        path.rmdir()
        path.write_bytes(data)
        assert fetch("GET", url(live, CHUNK, "cut")).body == data, "a repaired file is found without a restart"
        metrics = fetch("GET", f"{live.url}/metrics").body.decode()
        assert 'hsstore_file_bodies_total{end="complete"} 2.0' in metrics
        assert f"hsstore_file_bytes_total {float(len(data) + 904)}" in metrics
    store.close()


def test_documents_are_whole_even_when_they_broke_after_the_start(tmp_path: Path) -> None:
    store = make_store(tmp_path / "tiny", make_samples([20, 30]))
    with serving(store.root) as live:
        for name in ("records/000000.json", "store.json", "manifest.json"):
            before = (store.root / name).read_bytes()
            (store.root / name).chmod(0o644)
            (store.root / name).write_bytes(b"{}")
            assert fetch("GET", url(live, name)).body == before
            (store.root / name).write_bytes(before)
    store.close()


def test_a_committed_shard_is_served_before_it_is_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = make_samples([20, 30])
    writer = create(tmp_path / "tiny", samples)
    staged = stage(writer, 0, samples)
    monkeypatch.setattr("hsstore.staged.publish", lambda *_: None)
    assert staged.commit() is not None
    with serving(tmp_path / "tiny") as live:
        answer = fetch("GET", url(live, CHUNK))
        assert (answer.status, answer.body) == (200, (staged.directory / "hidden.final").read_bytes())


def test_a_large_body_is_whole(big: Store) -> None:
    """More than sockets buffer and windows hold: 37 MiB through 4 MiB windows, checked by the stock tool's digest."""
    path = big.root / CHUNK
    with serving(big.root) as live:
        answer = fetch("GET", url(live, CHUNK, "big"))
        assert len(answer.body) > 8 << 20
        assert hashlib.sha256(answer.body).hexdigest() == subprocess.check_output(["sha256sum", path], text=True)[:64]


@pytest.mark.timeout(60)
def test_what_is_no_plain_file_is_an_answer_at_once(tmp_path: Path) -> None:
    """More of them than the service has threads: none waits, and the service still answers and ends."""
    root = make_store(tmp_path / "tiny", make_samples([40]), shard_rows=256).root
    with serving(root) as live:
        (root / CHUNK).unlink()
        os.mkfifo(root / CHUNK)
        with ThreadPoolExecutor(50) as pool:
            answers = list(pool.map(lambda _: fetch("GET", url(live, CHUNK)), range(50)))
        assert {answer.status for answer in answers} <= {500, 503}
        assert any(b"is no plain file" in answer.body for answer in answers)
        assert fetch("GET", url(live, "store.json")).status == 200
