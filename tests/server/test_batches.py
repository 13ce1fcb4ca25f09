"""Batches over a real socket: the same bytes as the local road, standard headers, nothing assembled in memory."""

from __future__ import annotations

import subprocess

import pytest

from hsstore import gather
from hsstore.plan import PlanParameters
from hsstore.source import plan_of
from tests.server.live import fetch


@pytest.fixture(scope="module")
def plan(store):
    return plan_of(store, PlanParameters(max_seq_len=256, split="all"))


def test_every_batch_is_the_gathered_one(store, plan, plan_url):
    n_batches = plan.epoch(1).n_batches
    assert n_batches > 3
    for number in range(n_batches):
        out = bytearray(1 << 20)
        n = gather.gather(store, plan, 1, number, out)
        answer = fetch("GET", f"{plan_url}/epochs/1/batches/{number}")
        assert answer.status == 200
        assert answer.body == bytes(out[:n])


def test_headers_let_any_cache_keep_a_batch_for_ever(plan, plan_url):
    answer = fetch("GET", f"{plan_url}/epochs/0/batches/0")
    assert answer.headers["ETag"] == f'"{plan.plan_id}/0/0"'
    assert "immutable" in answer.headers["Cache-Control"]
    assert "public" in answer.headers["Cache-Control"]
    assert answer.headers["Content-Type"] == "application/octet-stream"
    assert answer.headers["Content-Disposition"].endswith('.safetensors"')
    assert int(answer.headers["Content-Length"]) == len(answer.body)


@pytest.mark.parametrize("form", ["{}", "W/{}", '"other", {}', "*"])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_a_held_batch_is_not_sent_again(plan_url, form, method):
    url = f"{plan_url}/epochs/0/batches/0"
    etag = fetch("HEAD", url).headers["ETag"]
    answer = fetch(method, url, If_None_Match=form.format(etag))
    assert (answer.status, answer.body) == (304, b"")
    assert answer.headers["ETag"] == etag
    assert fetch(method, url, If_None_Match='"other"').status == 200


def test_head_says_what_get_would(plan_url):
    url = f"{plan_url}/epochs/0/batches/1"
    head, get = fetch("HEAD", url), fetch("GET", url)
    assert (head.status, head.body) == (200, b"")
    for name in ("Content-Length", "ETag", "Cache-Control", "Content-Type", "Content-Disposition"):
        assert head.headers[name] == get.headers[name]


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("epochs/0/batches/999", 404),
        ("epochs/99999999999/batches/0", 422),
        ("epochs/-1/batches/0", 422),
        ("epochs/0/batches/x", 422),
        ("epochs/0/batches/-1", 422),
    ],
)
def test_a_batch_that_does_not_exist_is_a_problem(plan_url, path, status):
    for method in ("GET", "HEAD"):
        assert fetch(method, f"{plan_url}/{path}").status == status


def test_curl_gets_a_file_that_safetensors_opens(store, plan, plan_url, tmp_path):
    torch = pytest.importorskip("torch")
    torch_io = pytest.importorskip("safetensors.torch")
    path = tmp_path / "batch.safetensors"
    subprocess.run(["curl", "-sSf", "-o", path, f"{plan_url}/epochs/0/batches/0"], check=True)
    tensors = torch_io.load_file(path)
    ours = gather.read(store, plan, 0, 0)
    assert set(tensors) == set(ours.tensors)
    for name, tensor in tensors.items():
        assert tensor.view(torch.uint8).numpy().tobytes() == ours.tensors[name].tobytes(), name


@pytest.mark.parametrize("verify_reads", ["off", "sampled", "always"])
def test_a_server_may_check_what_no_client_asks_for(tmp_path, verify_reads):
    """Every block is bad here, so what is checked shows by the answers alone."""
    from tests.server.live import serving
    from tests.stores import make_samples, make_store

    store = make_store(tmp_path / "bad", make_samples([16] * 40))
    for path in (store.root / "arrays.zarr/hidden/final/c").rglob("0"):
        if path.is_file():
            path.chmod(0o644)
            path.write_bytes(bytes(b ^ 1 for b in path.read_bytes()))
    with serving(store.root, verify_reads=verify_reads) as live:
        plan = fetch("POST", f"{live.url}/v1/plans", body={"split": "all", "max_seq_len": 16}).json()["plan_id"]
        url = f"{live.url}/v1/plans/{plan}/epochs/0/batches"
        refused = [number for number in range(40) if fetch("GET", f"{url}/{number}").status == 503]
    assert refused == {"off": [], "sampled": [0, 16, 32], "always": list(range(40))}[verify_reads]


def test_checked_batches_name_damage_before_the_first_byte(tmp_path):
    """`?check=true` covers blocks that a sample's edge cuts, which no client can check."""
    from tests.server.live import serving
    from tests.stores import make_samples, make_store

    store = make_store(tmp_path / "flipped", make_samples([20, 20, 20]))
    path = next((store.root / "arrays.zarr/hidden/final/c").rglob("0/0"))
    path.chmod(0o644)
    with open(path, "r+b") as file:
        file.seek(5)
        byte = file.read(1)[0]
        file.seek(5)
        file.write(bytes([byte ^ 1]))
    with serving(store.root) as live:
        plan_id = fetch("POST", f"{live.url}/v1/plans", body={"split": "all"}).json()["plan_id"]
        url = f"{live.url}/v1/plans/{plan_id}/epochs/0/batches/0"
        assert fetch("GET", url).status == 200
        answer = fetch("GET", f"{url}?check=true")
        assert (answer.status, answer.json()["kind"]) == (503, "damaged")
        assert "rows 0 to 15 of shard 0" in answer.json()["detail"]
