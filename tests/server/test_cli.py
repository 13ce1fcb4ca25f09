"""`hsstore serve` as a process: what it says, what it refuses, how it ends."""

from __future__ import annotations

import signal
import socket
import subprocess

import pytest

from tests.server.live import fetch, read_announcement, serve_command
from tests.server.test_live import start_reading, wait_for
from tests.stores import create, make_samples, stage


def test_it_says_what_it_serves_and_ends_cleanly(store):
    with serve_command(store.root, "--port", "0") as process:
        url, lines = read_announcement(process)
        assert fetch("GET", f"{url}/health").status == 200
        assert "24 samples" in lines[1]
        assert "1,874 tokens" in lines[1]
        assert lines[-1].startswith(f"next: hsstore train --source {url}")
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0
        assert process.stderr.read() == ""


def test_an_unfinished_store_is_served_but_not_silently(tmp_path):
    samples = make_samples([60] * 8)
    writer = create(tmp_path / "half", samples, shard_rows=256)
    n_open = len(writer.todo()) - 1
    assert n_open > 0
    assert stage(writer, 0, samples).commit() is not None
    with serve_command(writer.root, "--port", "0") as process:
        _, lines = read_announcement(process)
        assert f"warning: {n_open} shards of half are not extracted yet" in lines[2]


def test_ctrl_c_exits_130(store):
    with serve_command(store.root, "--port", "0") as process:
        read_announcement(process)
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == 130
        assert process.stderr.read() == ""


def test_a_second_ctrl_c_does_not_wait_for_a_body_on_its_way(big):
    with serve_command(big.root, "--port", "0") as process:
        url, _ = read_announcement(process)
        body = {"max_seq_len": 4500, "split": "all"}
        plan_id = fetch("POST", f"{url}/v1/plans", body=body).json()["plan_id"]
        with start_reading(f"{url}/v1/plans/{plan_id}/epochs/0/batches/0"):
            process.send_signal(signal.SIGINT)
            wait_for(lambda: not listens(url))  # it has heard the first one: two at once would be one
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(1)
            process.send_signal(signal.SIGINT)
            assert process.wait(120) == 130
        assert "Traceback" not in process.stderr.read()


def listens(url: str) -> bool:
    host, port = url.split("/")[2].split(":")
    try:
        socket.create_connection((host, int(port)), timeout=120).close()
    except OSError:
        return False
    return True


def test_a_token_file_guards_it(store, tmp_path):
    (tmp_path / "token").write_text("t0ken")
    with serve_command(store.root, "--port", "0", "--host", "0.0.0.0", "--token-file", tmp_path / "token") as process:
        url, lines = read_announcement(process)
        assert "token needed" in lines[0]
        assert fetch("GET", f"{url}/v1/stores").status == 401
        assert fetch("GET", f"{url}/v1/stores", Authorization="Bearer t0ken").status == 200


def test_the_environment_gives_a_token_too(store):
    with serve_command(store.root, "--port", "0", env={"HSSTORE_TOKEN": "t0ken"}) as process:
        url, _ = read_announcement(process)
        assert fetch("GET", f"{url}/v1/stores").status == 401
        assert fetch("GET", f"{url}/v1/stores", Authorization="Bearer t0ken").status == 200


@pytest.fixture
def taken_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["STORE", "--host", "0.0.0.0"], 2, "--token-file"),
        (["STORE", "--port", "TAKEN"], 11, "in use"),
        (["STORE", "--host", "203.0.113.1", "--token-file", "TOKEN"], 2, "cannot listen"),
        (["STORE", "--host", "a" * 80 + ".b", "--token-file", "TOKEN"], 2, "no name of a host"),
        (["STORE", "--token-file", "EMPTY"], 10, "does not exist"),
        (["EMPTY"], 10, "does not exist"),
        (["STORE", "STORE"], 2, "two stores"),
        ([], 2, "STORE"),
    ],
)
def test_what_is_wrong_is_one_sentence(store, tmp_path, taken_port, arguments, code, words):
    (tmp_path / "token").write_text("t0ken")
    names = {"STORE": store.root, "TAKEN": taken_port, "TOKEN": tmp_path / "token", "EMPTY": tmp_path / "none"}
    with serve_command(*(str(names.get(a, a)) for a in arguments)) as process:
        assert process.wait(120) == code
        said = process.stderr.read()
        assert words in said
        assert "Traceback" not in said
        if arguments:
            assert said.startswith("hsstore: error: ")
            assert len(said.splitlines()) <= 2
