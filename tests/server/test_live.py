"""A server among misbehaving clients and files.

It stays up, stays bounded, and never passes a cut body for a whole one.
"""

from __future__ import annotations

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from hsstore.client import Patience, ServiceClient
from hsstore.errors import DamagedError, ServiceError
from hsstore.plan import PlanParameters
from hsstore.source import HttpSource
from server.settings import Limits
from tests.server.live import fetch, serving
from tests.stores import make_samples, make_store

QUICK = Patience(attempts=3, total_seconds=240, first_wait_seconds=0.01, longest_wait_seconds=0.05, read_seconds=120)
PLAN = PlanParameters(max_seq_len=4500, split="all")


def start_reading(url: str) -> socket.socket:
    """A client that asked for a batch and has read its first bytes only."""
    host, port = url.split("/")[2].split(":")
    connection = socket.create_connection((host, int(port)))
    path = "/" + url.split("/", 3)[3]
    connection.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    assert connection.recv(12) == b"HTTP/1.1 200"
    return connection


def wait_for(condition) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("state", ["after_2", "final"])
def test_a_file_truncated_under_the_server_is_never_a_whole_body(big, caplog, state):
    """Before its pages are read in (`final`) and after (`after_2`, half sent): either could be SIGBUS."""
    [path] = (big.root / f"arrays.zarr/hidden/{state}/c").rglob("0/0")
    with serving(big.root) as live:
        client = ServiceClient(live.url, patience=QUICK)
        source = HttpSource(client)
        plan_id = source.make_plan(PLAN).plan_id
        url = f"{live.url}/v1/plans/{plan_id}/epochs/0/batches/0"
        n_bytes = source.read_batch(plan_id, 0, 0).tensors["hidden.final"].nbytes
        assert n_bytes > 30 << 20
        whole = path.read_bytes()
        path.chmod(0o644)
        with start_reading(url) as connection:
            with open(path, "r+b") as file:
                file.truncate(4096)
            received = 0
            while data := connection.recv(1 << 20):
                received += len(data)
            assert received < 2 * n_bytes
        with pytest.raises((ServiceError, DamagedError)):
            source.read_batch(plan_id, 0, 0)
        assert fetch("GET", f"{live.url}/health").status == 200
        path.write_bytes(whole)
        source.read_batch(plan_id, 0, 0)
        source.close()
    assert "closed after" in caplog.text or state == "after_2"


def test_a_client_that_hangs_up_frees_its_slot(big):
    with serving(big.root, limits=Limits(streams=1, wait_seconds=120, grace_seconds=1)) as live:
        plan_id = fetch("POST", f"{live.url}/v1/plans", body={"max_seq_len": 4500, "split": "all"}).json()["plan_id"]
        url = f"{live.url}/v1/plans/{plan_id}/epochs/0/batches/0"
        connection = start_reading(url)
        wait_for(lambda: live.service.slots.in_use == 1)
        connection.close()
        assert fetch("GET", url).status == 200
        wait_for(lambda: live.service.slots.in_use == 0)


def test_a_client_that_stops_reading_does_not_keep_others_out(big):
    limits = Limits(streams=1, wait_seconds=0.05, stall_seconds=1, grace_seconds=1)
    with serving(big.root, limits=limits) as live:
        plan_id = fetch("POST", f"{live.url}/v1/plans", body={"max_seq_len": 4500, "split": "all"}).json()["plan_id"]
        url = f"{live.url}/v1/plans/{plan_id}/epochs/0/batches/0"
        for _ in range(30):  # on a busy machine it may be given up before the other one comes
            with start_reading(url):
                answer = fetch("GET", url)
                if answer.status == 200:
                    continue
                assert (answer.status, answer.json()["kind"]) == (503, "service")
                assert int(answer.headers["Retry-After"]) >= 1
                wait_for(lambda: live.service.slots.in_use == 0)
                assert fetch("GET", url).status == 200
                return
        raise AssertionError("nobody was ever kept out")


def test_thirty_two_clients_at_once_are_all_served_within_bounds(tmp_path):
    store = make_store(tmp_path / "store", make_samples([60] * 64, hidden_size=1024), shard_rows=2048)
    most = 0
    with serving(store.root, limits=Limits(streams=4, grace_seconds=1)) as live:
        original = live.service.slots.take

        async def counting() -> bool:
            nonlocal most
            taken = await original()
            most = max(most, live.service.slots.in_use)
            return taken

        live.service.slots.take = counting
        start = threading.Barrier(32)

        def read_all(_: int) -> int:
            source = HttpSource(ServiceClient(live.url))
            plan_id = source.make_plan(PlanParameters(max_seq_len=512, split="all")).plan_id
            start.wait()
            total = sum(
                source.read_batch(plan_id, 0, i).n_tokens for i in range(source.epoch_info(plan_id, 0).n_batches)
            )
            source.close()
            return total

        with ThreadPoolExecutor(32) as pool:
            assert set(pool.map(read_all, range(32))) == {64 * 60}
    assert 1 <= most <= 4
