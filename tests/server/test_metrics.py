"""Metrics: names with our prefix, one registry per app, no series per plan or batch."""

from __future__ import annotations

import re
import time
from pathlib import Path

from tests.server.live import fetch, serving


def sample(text: str, line: str) -> float:
    match = re.search(rf"^{re.escape(line)} (\S+)$", text, re.MULTILINE)
    return float(match[1]) if match else 0.0


def test_bodies_and_requests_are_counted_by_route(store):
    with serving(store.root) as live, serving(store.root) as other:
        plan_id = fetch("POST", f"{live.url}/v1/plans", body={"split": "all"}).json()["plan_id"]
        url = f"{live.url}/v1/plans/{plan_id}/epochs/0/batches/0"
        n_bytes = len(fetch("GET", url).body)
        fetch("DELETE", f"{live.url}/v1/plans/{plan_id}")
        complete = 'hsstore_batch_bodies_total{end="complete"}'
        deadline = time.monotonic() + 120
        while sample(text := fetch("GET", f"{live.url}/metrics").body.decode(), complete) < 1:
            assert time.monotonic() < deadline
        assert sample(text, "hsstore_batch_bytes_total") == n_bytes
        assert sample(text, 'hsstore_store_samples{store="tiny"}') == store.manifest.n_samples
        assert sample(text, "hsstore_streams") == 0
        assert 'route="/v1/plans/{plan_id}/epochs/{epoch}/batches/{number}",status="200"' in text
        assert 'method="other"' in text
        assert plan_id not in text
        names = {line.split("{")[0].split(" ")[0] for line in text.splitlines() if not line.startswith("#")}
        assert all(name.startswith("hsstore_") for name in names)
        assert sample(fetch("GET", f"{other.url}/metrics").body.decode(), complete) == 0


def test_plans_and_epochs_are_counted_when_they_are_computed(store):
    with serving(store.root) as live:
        for _ in range(2):
            plan_id = fetch("POST", f"{live.url}/v1/plans", body={"split": "all"}).json()["plan_id"]
        for epoch in (0, 0, 1, 2, 3, 4, 0):  # four are kept, so the last 0 is computed again
            assert fetch("GET", f"{live.url}/v1/plans/{plan_id}/epochs/{epoch}").status == 200
            assert fetch("HEAD", f"{live.url}/v1/plans/{plan_id}/epochs/{epoch}/batches/0").status == 200
        text = fetch("GET", f"{live.url}/metrics").body.decode()
        assert sample(text, 'hsstore_plan_computations_total{what="plan"}') == 1
        assert sample(text, 'hsstore_plan_computations_total{what="epoch"}') == 6


def test_the_documented_metrics_are_those_there_are(live):
    page = (Path(__file__).parents[2] / "docs" / "http.md").read_text(encoding="utf-8")
    documented = dict(re.findall(r"^\| `(hsstore_\w+)` \| (\w+) \|", page, re.MULTILINE))
    text = fetch("GET", f"{live.url}/metrics").body.decode()
    there = dict(re.findall(r"^# TYPE (\w+) (\w+)$", text, re.MULTILINE))
    assert documented == {name: kind for name, kind in there.items() if not name.endswith("_created")}
