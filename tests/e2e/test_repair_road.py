"""The whole road of a repair: the command as a process, replicas behind real servers, bytes counted there."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from hsstore.store import Store
from hsstore.verify import Verifier
from tests.e2e.s3server import Proxy, make_bucket, s3_server
from tests.hsstore.test_repair import contents, flip
from tests.server.live import fetch, read_announcement, serve_command
from tests.stores import make_samples, make_store

HIDDEN, IDS = "arrays.zarr/hidden/final/c/0/0", "arrays.zarr/tokens/input_ids/c/0"
BLOCK_BYTES = 16 * 256 * 2


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of two shards with hidden files of 1 MB, which no test changes."""
    root = tmp_path_factory.mktemp("origin") / "states"
    make_store(root, make_samples([500] * 8, hidden_size=256), shard_rows=2048).close()
    return root


@pytest.fixture
def ours(origin: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(origin, tmp_path / "ours"))


def repair(root: Path, *arguments: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    state = {"HSSTORE_STATE_DIR": str(root.parent / "ledger")}
    command = [sys.executable, "-W", "error", "-m", "hsstore.cli", "repair", str(root), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env={**os.environ, **state, **env})


def summary_of(done: subprocess.CompletedProcess[str]) -> dict[str, object]:
    last = json.loads(done.stdout.splitlines()[-1])
    assert last["type"] == "summary"
    return last


def harm(root: Path) -> None:
    """Three bad blocks of a large file, a cut one, a missing one, and documents."""
    for block in (0, 7, 8):
        flip(root / HIDDEN, block * BLOCK_BYTES + 11)
    os.chmod(root / IDS, 0o644)
    os.truncate(root / IDS, 100)
    (root / "records/000001.json").unlink()
    (root / "index/row.npy").unlink()


IDS_BYTES = 2000 * 4 - 64  # all blocks of `IDS` but the first, which is still there when it is cut to 100 bytes


@contextmanager
def service(*arguments: str | Path, **env: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    with serve_command(*arguments, "--port", "0", env=env) as process:
        yield read_announcement(process)[0], process


def sent(url: str, **headers: str) -> int:
    """Bytes of shard files that a service has sent, by its own counter."""
    text = fetch("GET", f"{url}/metrics", **headers).body.decode()
    return int(float(re.findall(r"^hsstore_file_bytes_total (\S+)", text, re.MULTILINE)[0]))


@pytest.mark.parametrize("suffix", ["", "/v1/stores/states/files/"])
def test_from_a_service(origin: Path, ours: Path, suffix: str) -> None:
    """What crosses the wire is the bad blocks, by the count of the other end."""
    harm(ours)
    with service(origin) as (url, _):
        done = repair(ours, "--from", url + suffix, "--full", "--json")
        assert done.returncode == 0, done.stderr
        assert summary_of(done)["bytes_fetched"] == 3 * BLOCK_BYTES + IDS_BYTES
        assert sent(url) == 3 * BLOCK_BYTES + IDS_BYTES
    assert contents(ours) == contents(origin)


def test_a_service_chooses_the_store_and_wants_its_token(origin: Path, ours: Path, tmp_path: Path) -> None:
    make_store(tmp_path / "another", make_samples([20, 30])).close()
    harm(ours)
    with service(tmp_path / "another", origin, HSSTORE_TOKEN="open-sesame") as (url, _):
        refused = repair(ours, "--from", url)
        assert refused.returncode == 2
        assert "token" in refused.stderr
        assert repair(ours, "--from", url, HSSTORE_TOKEN="wrong").returncode == 2
        other = repair(ours, "--from", f"{url}/v1/stores/another", HSSTORE_TOKEN="open-sesame")
        assert other.returncode == 2
        assert f"{url}/v1/stores/another is no replica: it is store" in other.stderr
        nothing = repair(ours, "--from", f"{url}/v1/stores/nothing", HSSTORE_TOKEN="open-sesame")
        assert nothing.returncode == 10
        (tmp_path / "token").write_text("open-sesame\n")
        done = repair(ours, "--from", url, "--full", "--token-file", tmp_path / "token")
        assert done.returncode == 0, done.stderr
    assert contents(ours) == contents(origin)


def test_a_copy_may_come_from_a_service(origin: Path, tmp_path: Path) -> None:
    """A trainer's machine gets its own copy of what it was served, compared byte by byte; a wrong name is told."""
    with service(origin, HSSTORE_TOKEN="open-sesame") as (url, _):
        for spec in (url, f"{url}/v1/stores/{origin.name}"):
            command = [sys.executable, "-m", "hsstore.cli", "copy", spec, str(tmp_path / "out"), "--json"]
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=300, env=os.environ | {"HSSTORE_TOKEN": "open-sesame"}
            )
            assert done.returncode == 0, done.stderr
            assert summary_of(done)["manifest_id"] == summary_of(done)["source_manifest_id"]
        refused = subprocess.run(
            [*command[:4], f"{url}/v1/stores/nope", str(tmp_path / "no"), "--token", "x"],
            capture_output=True,
            text=True,
            timeout=300,
        )
    assert refused.returncode == 2
    assert "token" in refused.stderr
    assert list(Verifier(tmp_path / "out", "full").findings()) == []
    assert not (tmp_path / "no").exists()


def test_two_half_broken_replicas_heal_each_other_s_gaps(origin: Path, ours: Path, tmp_path: Path) -> None:
    """A directory without the first block and a service whose file is cut after it: each gives what it has."""
    whole = contents(origin)
    near, far = (Path(shutil.copytree(origin, tmp_path / name)) for name in ("near", "far"))
    for block in (0, 7):
        flip(ours / HIDDEN, block * BLOCK_BYTES + 11)
    (ours / "store.json").unlink()
    flip(near / HIDDEN, 5)
    (near / "store.json").unlink()
    with service(far) as (url, _):
        os.chmod(far / HIDDEN, 0o644)
        os.truncate(far / HIDDEN, 5 * BLOCK_BYTES)
        done = repair(ours, "--from", near, "--from", url, "--full", "--json")
        assert done.returncode == 0, done.stderr
        assert sent(url) == BLOCK_BYTES
    assert contents(ours) == whole
    republished = [e for e in map(json.loads, done.stdout.splitlines()) if e["type"] == "republished"]
    assert [sorted(e["replicas"]) for e in republished] == [sorted([str(near), url])]


def test_connections_that_are_cut_are_opened_again(origin: Path, ours: Path) -> None:
    harm(ours)
    with service(origin) as (url, _), Proxy(int(url.rpartition(":")[2]), seed=12) as proxy:
        proxy.manners.cut = (6_000, 18_000)
        done = repair(ours, "--from", f"http://127.0.0.1:{proxy.port}", "--full", "--json")
        assert done.returncode == 0, done.stderr
        assert proxy.manners.cuts["down"] > 0
    assert contents(ours) == contents(origin)


def test_a_service_that_is_not_there_is_an_error_at_once(ours: Path) -> None:
    flip(ours / HIDDEN, 300_000)
    before = contents(ours)
    gone = repair(ours, "--from", "http://127.0.0.1:9", "--full", "--patience", "4s", "--quarantine-rest")
    assert gone.returncode == 1
    assert "127.0.0.1:9" in gone.stderr
    assert contents(ours) == before


class _Handler(SimpleHTTPRequestHandler):
    """A plain web server that knows Range; `gate` holds answers of shard files back."""

    protocol_version = "HTTP/1.1"
    sent: ClassVar[dict[str, int]] = {}
    dead: ClassVar[bool] = False
    gate: ClassVar[threading.Event] = threading.Event()
    reached: ClassVar[threading.Event] = threading.Event()

    def log_message(self, *_: object) -> None:
        pass

    def list_directory(self, path: object) -> None:
        self.send_error(404)

    def do_GET(self) -> None:
        path = Path(self.translate_path(self.path))
        if not path.is_file():
            self.send_error(404)
            return
        data = path.read_bytes()
        if "/c/" in self.path:
            self.reached.set()
            self.gate.wait(300)
        if self.dead:
            self.close_connection = True
            return
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        start, stop = (int(match[1]), min(int(match[2] or len(data)) + 1, len(data))) if match else (0, len(data))
        self.send_response(206 if match else 200)
        if match:
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(data)}")
        self.send_header("Content-Length", str(stop - start))
        self.send_header("Last-Modified", self.date_time_string(path.stat().st_mtime))
        self.end_headers()
        self.sent[self.path] = self.sent.get(self.path, 0) + stop - start
        self.wfile.write(data[start:stop])


@contextmanager
def web_server(root: Path) -> Iterator[tuple[str, type[_Handler]]]:
    class Handler(_Handler):
        sent: ClassVar[dict[str, int]] = {}
        gate, reached = threading.Event(), threading.Event()

        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(*args, directory=str(root), **kwargs)  # type: ignore[arg-type]

    Handler.gate.set()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", Handler
    finally:
        Handler.gate.set()
        server.shutdown()
        server.server_close()
        thread.join(10)


def test_from_a_plain_web_server(origin: Path, ours: Path) -> None:
    harm(ours)
    with web_server(origin) as (url, handler):
        done = repair(ours, "--from", url, "--full", "--json")
        assert done.returncode == 0, done.stderr
        assert handler.sent[f"/{HIDDEN}"] == 3 * BLOCK_BYTES
    assert contents(ours) == contents(origin)


def test_a_web_server_without_ranges_is_told(origin: Path, ours: Path) -> None:
    """Python's own: it answers with whole files. Said in one sentence, and nothing wrong is written."""
    flip(ours / HIDDEN, 300_000)
    before = contents(ours)
    command = [sys.executable, "-m", "http.server", "0", "--bind", "127.0.0.1", "--directory", str(origin)]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    ) as server:
        try:
            assert server.stdout is not None
            port = re.search(r"port (\d+)", server.stdout.readline())
            assert port
            done = repair(ours, "--from", f"http://127.0.0.1:{port[1]}", "--full", "--patience", "2s")
        finally:
            server.kill()
    assert done.returncode == 3
    assert "Traceback" not in done.stderr
    assert contents(ours) == before


def test_what_a_replica_that_went_away_may_have_is_not_given_up(origin: Path, ours: Path) -> None:
    """It dies while a block is on its way. That is no reason for a tombstone: the next run may find it there."""
    harm(ours)
    with web_server(origin) as (url, handler):
        handler.gate.clear()
        arguments = ["--from", url, "--full", "--json", "--patience", "4s", "--quarantine-rest"]
        command = [sys.executable, "-m", "hsstore.cli", "repair", str(ours), *arguments]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert handler.reached.wait(240)
            handler.dead = True
            handler.gate.set()
            out, err = process.communicate(timeout=300)
        summary = json.loads(out.splitlines()[-1])
        assert process.returncode == 3
        assert (summary["replicas_away"], summary["quarantined"], summary["documents_restored"]) == (1, 0, 1)
        assert summary["remaining"] == summary["lost"] > 0
        assert "run it again when every replica answers" in err
        assert not (ours / "tombstones").exists()
        handler.dead = False
        assert repair(ours, "--from", url, "--full").returncode == 0
    assert contents(ours) == contents(origin)


def test_ctrl_c_ends_it_and_leaves_nothing_behind(origin: Path, ours: Path) -> None:
    """Interrupted while a block is on its way: exit 130, the store as it was, staging empty; the next run completes."""
    flip(ours / HIDDEN, 300_000)
    before = contents(ours)
    with web_server(origin) as (url, handler):
        handler.gate.clear()
        command: Sequence[str] = [sys.executable, "-m", "hsstore.cli", "repair", str(ours), "--from", url, "--full"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert handler.reached.wait(240)
            process.send_signal(signal.SIGINT)
            handler.gate.set()
            _, err = process.communicate(timeout=300)
        assert process.returncode == 130
        assert "Traceback" not in err
        assert contents(ours) == before
        assert not list((ours / "staging").iterdir())
        assert repair(ours, "--from", url, "--full").returncode == 0
    assert contents(ours) == contents(origin)


def test_from_an_object_store(origin: Path, ours: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy in a bucket is a replica: ranges of its objects, conditionally nothing written."""
    with s3_server() as port:
        make_bucket(port, "keep")
        for name, value in (("ACCESS_KEY_ID", "k"), ("SECRET_ACCESS_KEY", "s"), ("REGION", "us-east-1")):
            monkeypatch.setenv(f"AWS_{name}", value)
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
        command = [sys.executable, "-m", "hsstore.cli", "copy", str(origin), "s3://keep/states", "--quiet"]
        assert subprocess.run(command, capture_output=True).returncode == 0
        harm(ours)
        done = repair(ours, "--from", "s3://keep/states", "--full", "--json")
        assert done.returncode == 0, done.stderr
        assert summary_of(done)["blocks_fetched"] == 3 + IDS_BYTES // 64
    assert contents(ours) == contents(origin)


def test_a_healed_store_trains_on(origin: Path, ours: Path) -> None:
    """The point of it all: the same manifest id, the same bytes through the reader, sound by every look."""
    harm(ours)
    assert repair(ours, "--from", origin, "--full").returncode == 0
    with Store.open(origin) as a, Store.open(ours) as b:
        assert a.manifest_id == b.manifest_id
        assert all((a.hidden(i, "final") == b.hidden(i, "final")).all() for i in range(len(a.index)))
    assert list(Verifier(ours, "full").findings()) == []
    assert subprocess.run(["sha256sum", "--quiet", "-c", "manifest.sha256"], cwd=ours).returncode == 0
