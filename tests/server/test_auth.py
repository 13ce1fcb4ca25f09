"""The token: needed for everything but the probes, compared whole, rotated without a restart, never repeated."""

from __future__ import annotations

import os
import traceback

import pytest

from hsstore.credentials import checked_token
from hsstore.errors import NotFoundError, UsageError
from server.auth import TokenFile, token_reader
from server.settings import Settings, is_loopback
from tests.server.live import fetch, serving

TOKEN = "s3cret-token"
GUARDED = ["/v1/stores", "/v1/stores/tiny", "/v1/stores/tiny/manifest", "/v1/stores/tiny/samples", "/metrics"]


@pytest.fixture(scope="module")
def guarded(store):
    with serving(store.root, token=TOKEN) as live:
        yield live


@pytest.mark.parametrize("path", GUARDED)
@pytest.mark.parametrize("given", [None, "Bearer wrong", f"Bearer {TOKEN}x", "Bearer ", f"Basic {TOKEN}", "Bearer é"])
def test_nothing_is_answered_without_the_token(guarded, path, given):
    headers = {"Authorization": given} if given else {}
    answer = fetch("GET", guarded.url + path, **headers)
    assert (answer.status, answer.json()["kind"]) == (401, "unauthorized")
    assert answer.headers["WWW-Authenticate"] == "Bearer"
    assert TOKEN not in str(answer)


@pytest.mark.parametrize("path", GUARDED)
def test_the_token_opens_everything(guarded, path):
    assert fetch("GET", guarded.url + path, Authorization=f"Bearer {TOKEN}").status == 200


def test_a_post_without_the_token_makes_no_plan(guarded):
    assert fetch("POST", f"{guarded.url}/v1/plans", body={}).status == 401


def test_the_probes_need_no_token(guarded):
    assert fetch("GET", f"{guarded.url}/health").json() == {"status": "ok"}
    assert fetch("GET", f"{guarded.url}/ready").json() == {"status": "ready"}


def test_no_shared_cache_may_keep_a_guarded_batch(guarded):
    plan_id = fetch("POST", f"{guarded.url}/v1/plans", body={}, Authorization=f"Bearer {TOKEN}").json()["plan_id"]
    url = f"{guarded.url}/v1/plans/{plan_id}/epochs/0/batches/0"
    assert fetch("HEAD", url).status == 401
    assert "private" in fetch("HEAD", url, Authorization=f"Bearer {TOKEN}").headers["Cache-Control"]


def test_a_rotated_file_counts_from_the_next_request_on(tmp_path):
    path = tmp_path / "token"
    path.write_text("first\n")
    tokens = TokenFile(path)
    assert tokens.current() == "first"
    path.write_text("second")
    assert tokens.current() == "second"
    (tmp_path / "new").write_text("third")
    os.replace(tmp_path / "new", path)
    assert tokens.current() == "third"


@pytest.mark.parametrize("damage", ["vanished", "empty", "a directory"])
def test_a_broken_rotation_keeps_the_last_token(tmp_path, damage, caplog):
    path = tmp_path / "token"
    path.write_text("first")
    tokens = TokenFile(path)
    path.unlink()
    if damage == "empty":
        path.write_text("")
    elif damage == "a directory":
        path.mkdir()
    assert tokens.current() == "first"
    assert "stays in force" in caplog.text
    assert "first" not in caplog.text


UNUSABLE = [
    b"",
    b"\n",
    b"two words",
    b"s3cret\nline",
    b"s3cret\r\nX: y",
    "s3cret-nön".encode(),
    b"s3cret\xff",
    b"\x00x",
]


@pytest.mark.parametrize("content", [*UNUSABLE, b"s3cret" * 2000])
def test_a_file_without_a_usable_token_is_refused_at_the_start(tmp_path, content):
    path = tmp_path / "token"
    path.write_bytes(content)
    with pytest.raises(UsageError, match="one token") as caught:
        token_reader(Settings(stores=(tmp_path,), token_file=path))
    assert "s3cret" not in "".join(traceback.format_exception(caught.value))
    assert "words" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "s3cret\nline", "s3cret\udcff", "s3cret\x7f", "s3cret\xa0x"])
def test_a_token_of_the_environment_is_checked_alike(text):
    with pytest.raises(UsageError, match="HSSTORE_TOKEN must hold one token") as caught:
        checked_token(text, "HSSTORE_TOKEN")
    assert "s3cret" not in "".join(traceback.format_exception(caught.value))
    assert checked_token(f" {TOKEN}\r\n", "HSSTORE_TOKEN") == TOKEN


def test_a_missing_token_file_is_refused_at_the_start(tmp_path):
    with pytest.raises(NotFoundError, match="does not exist"):
        token_reader(Settings(stores=(tmp_path,), token_file=tmp_path / "none"))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org"])
def test_an_address_others_reach_needs_a_token(tmp_path, host):
    with pytest.raises(UsageError, match="--token-file"):
        Settings(stores=(tmp_path,), host=host)
    assert Settings(stores=(tmp_path,), host=host, token="x").needs_token


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "[::1]", "127.1.2.3"])
def test_loopback_needs_none(host):
    assert is_loopback(host)


def test_settings_never_show_the_token(tmp_path):
    assert TOKEN not in repr(Settings(stores=(tmp_path,), token=TOKEN))
