"""Prometheus metrics of one extraction, served by a thread of its own from before the engine is loaded to the end.

Responsible for the names (prefix `hsstore_extract_`, in a registry of its own) and for the socket. prometheus_client is
loaded only when the metrics are asked for. Leaves the estimate to `extractor.watch.pace`, the disk to
`extractor.watch.disk`.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from extractor import estimate
from extractor.engines.base import EngineInfo
from extractor.watch.events import Deaf, Pace, RunFacts
from hsstore import __version__
from hsstore.errors import MissingExtraError, UsageError, extra_hint
from hsstore.records import ShardRecord

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

PREFIX = "hsstore_extract_"
SAMPLE_SECONDS = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
SEAL_SECONDS = (0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_CLIENT_SECONDS = 30.0  # a client that says nothing for that long is left


class Metrics(Deaf):
    """A `Watcher` that counts."""

    def __init__(self, store: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises `MissingExtraError` without prometheus_client."""
        try:
            from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
        except ModuleNotFoundError as error:
            raise MissingExtraError(f"--metrics-port needs {error.name}", hint=extra_hint("metrics")) from None
        self.registry: CollectorRegistry = CollectorRegistry()
        self._clock = clock
        self._sent: dict[int, float] = {}
        self._facts: RunFacts | None = None
        self._was_up = False
        self._filling: set[int] = set()
        """Shards that wait for samples."""
        self._filled: set[int] = set()
        """Complete ones that wait for their commit."""

        def counter(name: str, text: str, *labels: str) -> Any:
            return Counter(PREFIX + name, text, labels, registry=self.registry)

        def gauge(name: str, text: str, *labels: str) -> Any:
            return Gauge(PREFIX + name, text, labels, registry=self.registry)

        self._samples = counter("samples", "Samples by outcome: ok, failed; retried counts each repetition.", "outcome")
        self._tokens = counter("tokens", "Tokens whose states came in, failed samples left out.")
        self._bytes = counter("bytes", "Bytes of the shards that this run committed.")
        self._shards = counter("shards", "Shards committed since the run began: by us or by others.", "by")
        self._errors = counter("errors", "What went wrong, by kind.", "kind")
        self._restarts = counter("engine_restarts", "Times that the engine was started again.")
        self._remaining = gauge("shards_remaining", "Shards that nobody has committed yet, as far as this run knows.")
        self._in_flight = gauge("in_flight", "Samples that the engine has and has not answered.")
        self._open = gauge("shards_open", "Shards that wait for samples.")
        self._sealing = gauge("shards_sealing", "Complete shards that wait for their commit.")
        self._up = gauge("engine_up", "1 while the engine is loaded.")
        self._eta = gauge("eta_seconds", "Seconds to the end at the present rate; NaN while not known.")
        self._rate = gauge("tokens_per_second", "Tokens a second of this run, of late.")
        self._committed = gauge("last_commit_timestamp_seconds", "When this run last committed a shard; 0 before.")
        free = gauge("free_bytes", "Free space of the store's file system, for this user.")
        free.set_function(lambda: _free(store))
        self._info = gauge("info", "What runs, always 1.", "store", "model", "engine", "version")
        self._sample_seconds = Histogram(
            PREFIX + "sample_seconds",
            "From sending a sample to its answer.",
            buckets=SAMPLE_SECONDS,
            registry=self.registry,
        )
        self._seal_seconds = Histogram(
            PREFIX + "seal_seconds", "Hashing and committing a shard.", buckets=SEAL_SECONDS, registry=self.registry
        )
        self._begin()

    def _begin(self) -> None:
        """Series that are there from the start: a rate over a counter that appears late misses its first step."""
        for outcome in ("ok", "failed", "retried"):
            self._samples.labels(outcome)
        for by in ("us", "others"):
            self._shards.labels(by)
        self._eta.set(float("nan"))

    def run_started(self, facts: RunFacts) -> None:
        self._facts = facts
        self._remaining.set(facts.shards)
        self._say_what_runs(facts.engine)

    def _say_what_runs(self, engine: str) -> None:
        if self._facts:
            self._info.clear()
            self._info.labels(self._facts.store, self._facts.model, engine, __version__).set(1)

    def run_failed(self, kind: str, reason: str) -> None:
        self._errors.labels(kind).inc()

    def engine_started(self, info: EngineInfo, seconds: float) -> None:
        self._say_what_runs(f"{info.engine} {info.version}")
        self._up.set(1)
        if self._was_up:
            self._restarts.inc()
        self._was_up = True

    def engine_lost(self, reason: str) -> None:
        self._errors.labels("engine_lost").inc()
        self.engine_stopped()

    def engine_stopped(self) -> None:
        self._up.set(0)
        self._sent.clear()
        self._in_flight.set(0)

    def shard_staged(self, shard: int, n_samples: int, n_tokens: int) -> None:
        self._move(shard, self._filling)

    def shard_dropped(self, shard: int, n_samples: int, n_tokens: int, reason: str) -> None:
        self._move(shard, None)

    def shard_filled(self, shard: int) -> None:
        self._move(shard, self._filled)

    def shard_sealed(self, shard: int, seconds: float, n_bytes: int) -> None:
        self._move(shard, None)
        self._seal_seconds.observe(seconds)

    def _move(self, shard: int, to: set[int] | None) -> None:
        """By name, so that whatever happens to a shard no gauge drifts."""
        self._filling.discard(shard)
        self._filled.discard(shard)
        if to is not None:
            to.add(shard)
        self._open.set(len(self._filling))
        self._sealing.set(len(self._filled))

    def shard_done(self, record: ShardRecord | None) -> None:
        self._remaining.dec()
        self._shards.labels("others" if record is None else "us").inc()
        if record is not None:
            self._bytes.inc(sum(entry.bytes for entry in record.files.values()))
            self._committed.set_to_current_time()

    def shard_elsewhere(self, shard: int, n_samples: int, n_tokens: int) -> None:
        self._remaining.dec()
        self._shards.labels("others").inc()

    def sample_sent(self, source_index: int) -> None:
        self._sent[source_index] = self._clock()
        self._in_flight.set(len(self._sent))

    def sample_retried(self, source_index: int, reason: str) -> None:
        self._samples.labels("retried").inc()
        self._errors.labels("sample_retried").inc()
        self._answered(source_index)

    def sample_failed(self, source_index: int, reason: str, tries: int) -> None:
        self._errors.labels("sample_failed").inc()

    def sample_done(self, source_index: int, n_tokens: int, ok: bool) -> None:
        self._samples.labels("ok" if ok else "failed").inc()
        if ok:
            self._tokens.inc(n_tokens)
        self._answered(source_index)

    def _answered(self, source_index: int) -> None:
        sent = self._sent.pop(source_index, None)
        if sent is not None:
            self._sample_seconds.observe(self._clock() - sent)
        self._in_flight.set(len(self._sent))

    def disk_low(self, free: int, needed: int) -> None:
        self._errors.labels("disk_low").inc()

    def paced(self, pace: Pace) -> None:
        self._rate.set(pace.tokens_per_second)
        self._eta.set(float("nan") if pace.eta_seconds is None else pace.eta_seconds)


def _free(store: Path) -> float:
    """NaN where the file system does not answer: a scrape must not fail for it."""
    try:
        return float(estimate.free_bytes(store))
    except OSError:
        return float("nan")


class MetricsServer:
    """GET /metrics on a port, until `close`."""

    def __init__(self, metrics: Metrics, host: str = "127.0.0.1", port: int = 0) -> None:
        """Bind and serve. Raises `UsageError` for a port in use and for an address that is not ours."""
        from prometheus_client import make_wsgi_app

        self._server = _bound(host, port)
        self._server.set_app(make_wsgi_app(metrics.registry))
        self.url = _url(host, self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.2,), name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the threads and free the port; a client that is still there is cut off."""
        self._server.shutdown()
        self._thread.join()
        self._server.cut_off()
        self._server.server_close()


class _Handler(WSGIRequestHandler):
    timeout = _CLIENT_SECONDS

    def log_message(self, format: str, *args: Any) -> None:
        """Scrapes are no news."""


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = False  # else server_close would not wait for them
    allow_reuse_address = True
    allow_reuse_port = False

    def __init__(self, address: tuple[str, int]) -> None:
        self._clients: set[socket.socket] = set()
        super().__init__(address, _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        self._clients.add(request)
        super().process_request(request, client_address)

    def close_request(self, request: Any) -> None:
        self._clients.discard(request)
        super().close_request(request)

    def cut_off(self) -> None:
        """Wake the threads that wait for a client. To be called when no further one is taken."""
        for client in list(self._clients):
            with contextlib.suppress(OSError):  # it left by itself meanwhile
                client.shutdown(socket.SHUT_RDWR)

    def server_bind(self) -> None:
        """As the base does, without asking a name server for the host's name."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that leaves in the middle is no news either; anything else is a fault of ours and is shown."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class _Server6(_Server):
    address_family = socket.AF_INET6


def _bound(host: str, port: int) -> _Server:
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = found[0]
        kind = _Server6 if family == socket.AF_INET6 else _Server
        return kind((str(address[0]), int(address[1])))
    except (UnicodeError, socket.gaierror):
        raise UsageError(f"{host!r} is no name of a host", hint="check --metrics-host") from None
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            hint = "choose another --metrics-port, or 0 for any"
            raise UsageError(f"the metrics port {port} of {host} is in use", hint=hint) from None
        reason = (error.strerror or str(error)).lower()
        raise UsageError(f"cannot serve metrics on {host} port {port}: {reason}", hint="check --metrics-host") from None


def _url(host: str, port: int) -> str:
    name = host.strip("[]")
    return f"http://{f'[{name}]' if ':' in name else name}:{port}/metrics"
