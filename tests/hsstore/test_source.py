"""Sources: the local and the HTTP road cannot be told apart, and the HTTP one survives a restart but not a change."""

from __future__ import annotations

import multiprocessing
import pickle
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hsstore import gather
from hsstore.client import Patience, ServiceClient
from hsstore.errors import ConflictError, DamagedError, NotFoundError, ServiceError, UsageError
from hsstore.plan import PlanParameters
from hsstore.source import HttpSource, LocalSource, check_source, open_source, plan_of
from hsstore.store import Store
from tests.server.live import read_announcement, serve_command, serving
from tests.stores import make_samples, make_store

QUICK = Patience(attempts=4, total_seconds=240, first_wait_seconds=0.05, longest_wait_seconds=0.2, read_seconds=120)
PLAN = PlanParameters(max_seq_len=64, split="all")


@pytest.fixture(scope="module")
def live(shared_store):
    with serving(shared_store.root) as live:
        yield live


@pytest.fixture
def http(live):
    source = HttpSource(ServiceClient(live.url, patience=QUICK))
    yield source
    source.close()


@pytest.fixture
def local(shared_store):
    return LocalSource(shared_store)


def same(a, b) -> None:
    assert a.metadata == b.metadata
    assert a.dtypes == b.dtypes
    assert list(a.tensors) == list(b.tensors)
    for name in a.tensors:
        assert np.array_equal(a.tensors[name], b.tensors[name]), name


def test_both_roads_answer_alike(http, local):
    assert http.header == local.header
    assert http.manifest_id == local.manifest_id
    for parameters in (PLAN, PlanParameters(max_seq_len=33, seed=5, overflow="drop")):
        plan = local.make_plan(parameters)
        assert http.make_plan(parameters) == plan
        info = local.epoch_info(plan.plan_id, 2)
        assert http.epoch_info(plan.plan_id, 2) == info
        assert info.n_batches > 2
        for i in range(info.n_batches):
            same(http.read_batch(plan.plan_id, 2, i), local.read_batch(plan.plan_id, 2, i))
    for split in ("train", "validation", "all"):
        assert np.array_equal(http.token_counts(split), local.token_counts(split))


@pytest.mark.parametrize("road", ["http", "local"])
def test_both_roads_refuse_alike(road, request):
    source = request.getfixturevalue(road)
    plan_id = source.make_plan(PLAN).plan_id
    with pytest.raises(NotFoundError, match="no batch 999"):
        source.read_batch(plan_id, 0, 999)
    with pytest.raises(NotFoundError, match="no plan"):
        source.read_batch("0" * 64, 0, 0)
    with pytest.raises(UsageError, match="max_seq_len"):
        source.make_plan(PlanParameters(max_seq_len=1))


@pytest.mark.parametrize("road", ["http", "local"])
def test_a_batch_lies_in_the_buffer_that_was_given(road, request):
    source = request.getfixturevalue(road)
    plan_id = source.make_plan(PLAN).plan_id
    buffer = bytearray(1 << 20)
    batch = source.read_batch(plan_id, 0, 0, buffer)
    whole = np.frombuffer(buffer, np.uint8)
    assert all(np.shares_memory(whole, t) for t in batch.tensors.values())
    kept = source.read_batch(plan_id, 0, 0, bytearray(8))
    same(batch, kept)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_a_batch_has_the_same_bytes_on_both_roads(data):
    """The promise of the design: whatever the store and the plan, a trainer cannot tell the roads apart."""
    lengths = data.draw(st.lists(st.integers(1, 70), min_size=1, max_size=12), "lengths")
    hidden_size = data.draw(st.sampled_from([2, 8, 24]), "hidden size")
    parameters = PlanParameters(
        max_seq_len=data.draw(st.integers(2, 150), "max_seq_len"),
        seed=data.draw(st.integers(0, 2**63 - 1), "seed"),
        split=data.draw(st.sampled_from(["train", "validation", "all"]), "split"),
        overflow=data.draw(st.sampled_from(["truncate", "drop"]), "overflow"),
    )
    epoch = data.draw(st.integers(0, 2**31 - 1), "epoch")
    with tempfile.TemporaryDirectory() as directory:
        samples = make_samples(lengths, hidden_size=hidden_size)
        with make_store(Path(directory) / "store", samples) as store, serving(store.root) as live:
            plan = plan_of(store, parameters)
            client = ServiceClient(live.url, patience=QUICK)
            source = HttpSource(client)
            assert source.make_plan(parameters).plan_id == plan.plan_id
            for number in range(source.epoch_info(plan.plan_id, epoch).n_batches):
                out = bytearray(1 << 20)
                n = gather.gather(store, plan, epoch, number, out)
                path = f"/v1/plans/{plan.plan_id}/epochs/{epoch}/batches/{number}"
                assert client.read(path) == out[:n]
            source.close()


def test_a_restarted_service_is_told_the_plan_again(shared_store):
    with serving(shared_store.root) as live:
        source = HttpSource(ServiceClient(live.url, patience=QUICK))
        plan_id = source.make_plan(PLAN).plan_id
        before = [source.read_batch(plan_id, 0, i) for i in range(4)]
    with serving(shared_store.root, port=live.port):
        for i in range(4):
            same(source.read_batch(plan_id, 0, i), before[i])
        source.epoch_info(plan_id, 1)
        source.close()


def test_a_changed_store_is_refused(shared_store, tmp_path):
    """A silent switch in the middle of a run would train on other data than the run says."""
    other = make_store(tmp_path / shared_store.name, make_samples([20, 30, 40], seed=9))
    with serving(shared_store.root) as live:
        source = HttpSource(ServiceClient(live.url, patience=QUICK))
        plan_id = source.make_plan(PLAN).plan_id
    with serving(other.root, port=live.port):
        with pytest.raises(ConflictError, match="another state"):
            source.read_batch(plan_id, 0, 0)
        with pytest.raises(ConflictError, match="another state"):
            source.token_counts()
        source.close()


def test_a_killed_service_is_an_error_in_bounded_time(shared_store):
    with serve_command(shared_store.root, "--port", "0") as process:
        url, _ = read_announcement(process)
        source = HttpSource(ServiceClient(url, patience=QUICK))
        plan_id = source.make_plan(PLAN).plan_id
        source.read_batch(plan_id, 0, 0)
        process.kill()
        process.wait()
        with pytest.raises(ServiceError, match="tried 4 times"):
            source.read_batch(plan_id, 0, 1)
        source.close()


def flip(path: Path, offset: int) -> None:
    path.chmod(0o644)
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 4]))


@pytest.mark.parametrize("road", ["http", "local"])
def test_verify_finds_a_flipped_bit_on_both_roads(store_path, road):
    """Blocks cut by a sample's edge included: most samples of small stores have no other."""
    flip(store_path / "arrays.zarr/hidden/final/c/0/0", 3)
    with serving(store_path) as live:
        spec = live.url if road == "http" else str(store_path)
        found, messages = {}, []
        for verify in ("off", "sampled", "always"):
            source = open_source(spec, verify=verify)
            plan_id = source.make_plan(PLAN).plan_id
            found[verify] = []
            for i in range(source.epoch_info(plan_id, 0).n_batches):
                try:
                    source.read_batch(plan_id, 0, i)
                except DamagedError as error:
                    found[verify].append(i)
                    messages.append(str(error))
            source.close()
    assert all("rows 0 to 15 of shard 0" in message for message in messages)
    assert found["off"] == []
    assert found["always"]
    assert set(found["sampled"]) == {i for i in found["always"] if i % 16 == 0}


def test_a_bit_flipped_on_the_way_is_read_again_and_then_named(tmp_path, monkeypatch):
    """Blocks that lie whole in a batch are checked behind the network; one bad transfer costs a second one."""
    store = make_store(tmp_path / "store", make_samples([100, 50]))
    with serving(store.root) as live:
        source = HttpSource(ServiceClient(live.url, patience=QUICK), verify="always")
        plan_id = source.make_plan(PlanParameters(max_seq_len=200, split="all")).plan_id
        original, bad = ServiceClient.read, [1]

        def flipping(self, path, buffer=None):
            view = original(self, path, buffer)
            if bad and bad.pop(0):
                view[-100] ^= 1  # inside the mask of the longer sample
            return view

        monkeypatch.setattr(ServiceClient, "read", flipping)
        source.read_batch(plan_id, 0, 0)
        bad[:] = [1, 1]
        with pytest.raises(DamagedError, match="arrived with another CRC32C"):
            source.read_batch(plan_id, 0, 0)
        source.close()


def test_the_source_check_counts_what_it_compared(shared_store):
    plan = plan_of(shared_store, PLAN)
    segments = plan.epoch(0).segments(0)
    at, rows = plan.index, shared_store.header.chunk_rows
    spans = [(int(at.shard[s.sample]), int(at.row[s.sample]), int(at.row[s.sample]) + s.stop - 1) for s in segments]
    blocks = {(shard, b) for shard, first, last in spans for b in range(first // rows, last // rows + 1)}
    assert check_source(shared_store, plan, 0, 0) == len(blocks) * len(shared_store.header.arrays) > 0


def read_in_child(source, plan_id: str, queue) -> None:
    queue.put([source.read_batch(plan_id, 0, i).tensors["hidden.final"].tobytes() for i in range(3)])
    source.close()


@pytest.mark.parametrize("road", ["http", "local"])
def test_sources_survive_fork_and_pickling(road, request):
    """Data loader workers are forked or spawned with the plan already made."""
    source = request.getfixturevalue(road)
    plan_id = source.make_plan(PLAN).plan_id
    expected = [source.read_batch(plan_id, 0, i).tensors["hidden.final"].tobytes() for i in range(3)]
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    processes = [context.Process(target=read_in_child, args=(source, plan_id, queue)) for _ in range(3)]
    for process in processes:
        process.start()
    assert [queue.get() for _ in processes] == [expected] * 3
    for process in processes:
        process.join()
    copy = pickle.loads(pickle.dumps(source))  # noqa: S301 our own bytes
    assert copy.read_batch(plan_id, 0, 1).tensors["hidden.final"].tobytes() == expected[1]
    copy.close()


def test_a_pickled_local_source_refuses_a_changed_store(tmp_path):
    root = tmp_path / "store"
    make_store(root, make_samples([20, 30])).close()
    pickled = pickle.dumps(LocalSource(Store.open(root)))
    shutil.rmtree(root)
    make_store(root, make_samples([20, 31])).close()
    with pytest.raises(ConflictError, match="another state"):
        pickle.loads(pickled)  # noqa: S301 our own bytes


def test_open_source_takes_paths_and_urls(shared_store, live, tmp_path, monkeypatch):
    assert isinstance(open_source(shared_store.root), LocalSource)
    source = open_source(live.url, store="store")
    assert isinstance(source, HttpSource)
    source.close()
    with pytest.raises(NotFoundError, match="serves no store 'x'"):
        open_source(live.url, store="x")
    with pytest.raises(NotFoundError):
        open_source(tmp_path / "none")
    with pytest.raises(UsageError, match="verify"):
        open_source(shared_store.root, verify="maybe")
    with pytest.raises(UsageError, match="is a path"):
        open_source(shared_store.root, store="x")
    with serving(shared_store.root, token="t0ken") as guarded:
        monkeypatch.setenv("HSSTORE_TOKEN", "t0ken")
        open_source(guarded.url).close()
        open_source(guarded.url, token="t0ken").close()


def test_several_stores_want_a_choice(shared_store, tmp_path):
    other = make_store(tmp_path / "other", make_samples([20]))
    with serving(shared_store.root, other.root) as live:
        with pytest.raises(UsageError, match=r"2 stores.*--store"):
            open_source(live.url)
        source = open_source(live.url, store="other")
        assert source.manifest_id == other.manifest_id
        source.close()


def test_the_core_needs_neither_torch_nor_fastapi():
    code = "import sys, hsstore.source; sys.exit(any(m in sys.modules for m in ('torch', 'fastapi', 'pydantic')))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
