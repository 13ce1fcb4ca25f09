"""Metrics: every event counts where it should, from before the engine is loaded until the run ends, and no longer."""

from __future__ import annotations

import contextlib
import math
import re
import socket
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from prometheus_client.parser import text_string_to_metric_families

import hsstore
from extractor.watch.events import Many
from extractor.watch.metrics import Metrics, MetricsServer
from hsstore.errors import MissingExtraError, UsageError
from tests.extractor.watch.test_jsonlog import PACE, tell_everything
from tests.extractor.watch.test_pace import committed, facts
from tests.models import ROOT


def scrape(url: str) -> dict[str, float]:
    """Values by name and labels, e.g. `samples_total{ok}`."""
    with urllib.request.urlopen(url, timeout=30) as answer:
        text = answer.read().decode()
    found = {}
    for family in text_string_to_metric_families(text):
        for value in family.samples:
            labels = ",".join(value.labels.values())
            found[value.name.removeprefix("hsstore_extract_") + (f"{{{labels}}}" if labels else "")] = value.value
    return found


@pytest.fixture
def metrics(tmp_path: Path) -> Metrics:
    return Metrics(tmp_path / "store")


@pytest.fixture
def url(metrics: Metrics) -> Iterator[str]:
    server = MetricsServer(metrics)
    yield server.url
    server.close()
    assert "metrics" not in {thread.name for thread in threading.enumerate()}


def test_it_is_served_while_the_engine_loads(metrics: Metrics, url: str) -> None:
    """Every counter of a known label is there from the start, so that its first step is seen."""
    found = scrape(url)
    assert (found["samples_total{ok}"], found["samples_total{failed}"], found["samples_total{retried}"]) == (0, 0, 0)
    assert (found["shards_total{us}"], found["shards_total{others}"], found["engine_up"]) == (0, 0, 0)
    assert math.isnan(found["eta_seconds"])
    assert found["free_bytes"] > 0
    metrics.run_started(facts(shards=7))
    found = scrape(url)
    assert found["shards_remaining"] == 7
    assert found[f"info{{e,m,s,{hsstore.__version__}}}"] == 1


def test_a_whole_run(metrics: Metrics, url: str) -> None:
    tell_everything(Many([metrics]))
    found = scrape(url)
    assert (found["samples_total{ok}"], found["samples_total{failed}"], found["samples_total{retried}"]) == (1, 1, 1)
    assert found["tokens_total"] == 10
    assert (found["shards_total{us}"], found["shards_total{others}"]) == (1, 2)
    assert found["shards_remaining"] == 10 - 3
    assert (found["in_flight"], found["engine_up"], found["engine_restarts_total"]) == (0, 0, 1)
    errors = {key: value for key, value in found.items() if key.startswith("errors_total")}
    assert errors == {
        "errors_total{engine_lost}": 1,
        "errors_total{sample_retried}": 1,
        "errors_total{sample_failed}": 1,
        "errors_total{disk_low}": 1,
        "errors_total{no_space}": 1,
    }
    assert (found["sample_seconds_count"], found["seal_seconds_count"]) == (3, 2)
    assert found["last_commit_timestamp_seconds"] > 1.7e9


def test_depths_go_up_and_down(metrics: Metrics, url: str) -> None:
    """What is in flight, open and being sealed at this moment; a lost engine has nothing in flight any more."""
    metrics.shard_staged(0, 2, 2)
    metrics.shard_staged(1, 2, 2)
    for i in range(4):
        metrics.sample_sent(i)
    metrics.sample_done(0, 1, True)
    metrics.shard_filled(0)
    found = scrape(url)
    assert (found["in_flight"], found["shards_open"], found["shards_sealing"]) == (3, 1, 1)
    metrics.engine_lost("signal 9")
    metrics.shard_sealed(0, 0.1, 5)
    record = committed(0)
    record.files = {"a": SimpleNamespace(bytes=5), "b": SimpleNamespace(bytes=6)}
    metrics.shard_done(record)
    metrics.shard_dropped(1, 0, 0, "the run ended")
    metrics.paced(PACE)
    found = scrape(url)
    assert (found["in_flight"], found["shards_open"], found["shards_sealing"]) == (0, 0, 0)
    assert (found["bytes_total"], found["tokens_per_second"]) == (11, 6)
    metrics.paced(SimpleNamespace(tokens_per_second=3.0, eta_seconds=12.5))  # type: ignore[arg-type]
    assert scrape(url)["eta_seconds"] == 12.5


def test_a_port_in_use_is_named(metrics: Metrics) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=f"metrics port {port} of 127.0.0.1 is in use"):
            MetricsServer(metrics, port=port)


@pytest.mark.parametrize("host", ["a..b", "x" * 70, "192.0.2.1"])
def test_an_address_that_is_not_ours(metrics: Metrics, host: str) -> None:
    with pytest.raises(UsageError, match="--metrics-host"):
        MetricsServer(metrics, host=host)


def test_the_port_is_free_when_the_run_ends(metrics: Metrics) -> None:
    """At once, with a client that still holds a connection and says nothing."""
    server = MetricsServer(metrics)
    port = int(server.url.split(":")[2].removesuffix("/metrics"))
    scrape(server.url)
    with contextlib.closing(socket.create_connection(("127.0.0.1", port))):
        server.close()
    assert {thread.name for thread in threading.enumerate()} & {"metrics"} == set()
    MetricsServer(metrics, port=port).close()


def test_a_client_that_talks_nonsense_harms_nobody(
    metrics: Metrics, url: str, capfd: pytest.CaptureFixture[str]
) -> None:
    port = int(url.split(":")[2].removesuffix("/metrics"))
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(b"\x00\xff\r\n\r\n")
        client.recv(100)
    with pytest.raises(urllib.error.HTTPError):
        urllib.request.urlopen(urllib.request.Request(url, method="DELETE"), timeout=30)
    assert scrape(url)["engine_up"] == 0
    assert capfd.readouterr().err == ""


def test_without_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(MissingExtraError, match=r"hsstore\[metrics\]"):
        Metrics(tmp_path)


def test_ipv6(metrics: Metrics) -> None:
    try:
        server = MetricsServer(metrics, host="::1")
    except UsageError as error:
        pytest.skip(f"this machine has no IPv6: {error}")
    assert server.url.startswith("http://[::1]:")
    assert scrape(server.url)["engine_up"] == 0
    server.close()


def test_every_metric_is_documented(metrics: Metrics) -> None:
    """Both ways: what is served stands in docs/extract.md, and what stands in its table is served."""
    served = {f"{m.name}_total" if m.type == "counter" else m.name for m in metrics.registry.collect()}
    rows = re.findall(r"^\| (`hsstore_extract_.*?`) \|", (ROOT / "docs" / "extract.md").read_text(), re.MULTILINE)
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == served
