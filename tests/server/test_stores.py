"""Stores over HTTP: what they say is what the store and its manifest say."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from hsstore import wire
from hsstore.errors import DamagedError, NotFoundError, UsageError
from server.app import create_app
from server.settings import Settings
from tests.server.live import fetch, serving
from tests.stores import make_samples, make_store


def test_the_list_names_each_store_and_its_state(live, store):
    [info] = fetch("GET", f"{live.url}/v1/stores").json()
    assert info["name"] == "tiny"
    assert info["manifest_id"] == store.manifest_id
    assert info["n_tokens"] == store.manifest.n_tokens
    detail = fetch("GET", f"{live.url}/v1/stores/tiny").json()
    assert detail["info"] == info
    assert detail["header"]["self_sha256"] == store.header.self_sha256


def test_the_manifest_is_the_canonical_one(live, store):
    url = f"{live.url}/v1/stores/tiny/manifest"
    answer = fetch("GET", url)
    assert hashlib.sha256(answer.body).hexdigest() == store.manifest_id
    assert answer.body == (store.root / "manifest.json").read_bytes()
    assert answer.headers["ETag"] == f'"{store.manifest_id}"'
    assert fetch("GET", url, If_None_Match=answer.headers["ETag"]).status == 304


def test_pages_cover_every_sample_once(live, store):
    url, seen, offset = f"{live.url}/v1/stores/tiny/samples", [], 0
    while page := fetch("GET", f"{url}?offset={offset}&limit=7").json()["samples"]:
        seen += [s["source_index"] for s in page]
        offset += len(page)
    assert seen == store.index.source_index.tolist()


@pytest.mark.parametrize("query", ["limit=1001", "limit=0", "offset=-1", "limit=x", "offset=9999999999999999999"])
def test_pages_are_bounded(live, query):
    answer = fetch("GET", f"{live.url}/v1/stores/tiny/samples?{query}")
    assert (answer.status, answer.json()["kind"]) == (422, "usage")


def test_a_sample_is_found_by_both_of_its_names(live, store):
    for name in ("2", store.index.uid_hex(2)):
        found = fetch("GET", f"{live.url}/v1/stores/tiny/samples/{name}").json()
        assert found["input_ids"] == store.input_ids(2).tolist()
        assert found["loss_mask"] == store.loss_mask(2).tolist()
        assert found["sample"]["n_tokens"] == 300


@pytest.mark.parametrize(
    "path", ["nope", "tiny/samples/999", "tiny/samples/ffffffffffffffff", "tiny/samples/%00", "a%20b"]
)
def test_what_is_not_there_is_not_found(live, path):
    answer = fetch("GET", f"{live.url}/v1/stores/{path}")
    assert (answer.status, answer.json()["kind"]) == (404, "not_found")


@pytest.mark.parametrize("split", ["train", "validation", "all"])
def test_token_counts_are_the_store_s(live, store, split):
    answer = fetch("GET", f"{live.url}/v1/stores/tiny/token_counts?split={split}")
    batch = wire.parse(answer.body)
    assert np.array_equal(batch.tensors["counts"], store.token_counts(split))
    assert batch.metadata["manifest_id"] == store.manifest_id


def test_two_stores_are_served_under_their_names(tmp_path):
    first = make_store(tmp_path / "first", make_samples([10, 20]))
    second = make_store(tmp_path / "second", make_samples([30, 40], seed=1))
    with serving(first.root, second.root) as live:
        assert [s["name"] for s in fetch("GET", f"{live.url}/v1/stores").json()] == ["first", "second"]
        unnamed = fetch("POST", f"{live.url}/v1/plans", body={})
        assert (unnamed.status, unnamed.json()["kind"]) == (422, "usage")
        assert "first, second" in unnamed.json()["detail"]
        named = fetch("POST", f"{live.url}/v1/plans", body={"store": "second"})
        assert named.json()["manifest_id"] == second.manifest_id


def test_what_cannot_be_served_is_said_at_the_start(tmp_path):
    store = make_store(tmp_path / "a" / "same", make_samples([10]))
    other = make_store(tmp_path / "b" / "same", make_samples([20]))
    with pytest.raises(UsageError, match="two stores are named 'same'"):
        create_app(Settings(stores=(store.root, other.root)))
    (tmp_path / "linked").symlink_to(other.root)  # what the hint says
    app = create_app(Settings(stores=(store.root, tmp_path / "linked")))
    assert list(app.state.service.stores) == ["same", "linked"]
    app.state.service.close()
    app = create_app(Settings(stores=(store.root / "records" / "..",)))
    assert list(app.state.service.stores) == ["same"]
    app.state.service.close()
    with pytest.raises(NotFoundError, match="not a store"):
        create_app(Settings(stores=(tmp_path,)))
    with pytest.raises(UsageError, match="no store"):
        Settings(stores=())
    record = store.root / "records/000000.json"
    record.chmod(0o644)
    record.write_bytes(record.read_bytes().replace(b'"shard":0', b'"shard":1'))
    with pytest.raises(DamagedError):
        create_app(Settings(stores=(store.root,)))


def test_truncated_tokens_are_damage_not_a_crash(tmp_path):
    """Reading a map past the end of its file is SIGBUS: the whole test run would die without the check."""
    store = make_store(tmp_path / "cut", make_samples([2000, 3000]), chunk_rows=256)
    [path] = (store.root / "arrays.zarr/tokens/input_ids/c").iterdir()
    with serving(store.root) as live:
        url = f"{live.url}/v1/stores/cut"
        assert fetch("GET", f"{url}/samples/1").status == 200
        whole = path.read_bytes()
        path.chmod(0o644)
        with open(path, "r+b") as file:
            file.truncate(4096)
        for request in ("samples/1", "token_counts?split=all"):
            answer = fetch("GET", f"{url}/{request}")
            assert (answer.status, answer.json()["kind"]) == (503, "damaged")
        path.write_bytes(whole)
        assert fetch("GET", f"{url}/samples/1").status == 200, "a repaired file is found without a restart"
