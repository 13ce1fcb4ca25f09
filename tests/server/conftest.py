from __future__ import annotations

import pytest

from hsstore.store import Store
from tests.server.live import Live, serving
from tests.stores import make_samples, make_store

LENGTHS = [5, 40, 300, 17, 90, 33, 2, 128, 64, 1, 250, 7] * 2


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """A small store with samples of many lengths, one of a single token among them."""
    with make_store(tmp_path_factory.mktemp("stores") / "tiny", make_samples(LENGTHS), shard_rows=2048) as store:
        yield store


@pytest.fixture(scope="module")
def live(store: Store):
    with serving(store.root) as live:
        yield live


@pytest.fixture
def plan_url(live: Live) -> str:
    from tests.server.live import fetch

    answer = fetch("POST", f"{live.url}/v1/plans", body={"max_seq_len": 256, "split": "all"})
    return f"{live.url}/v1/plans/{answer.json()['plan_id']}"


@pytest.fixture
def big(tmp_path) -> Store:
    """A store of one batch of 74 MiB: more than sockets buffer."""
    return make_store(tmp_path / "big", make_samples([2000, 2500], hidden_size=4096), chunk_rows=256)
