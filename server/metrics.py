"""Prometheus metrics of one app, in a registry of its own so that two apps in a process never share a counter.

Responsible for the names (prefix `hsstore_`) and for the ASGI wrapper that counts requests by route template, never
by path: paths hold plan ids and would make a series each. Leaves what is worth counting to its callers.
"""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from starlette.types import ASGIApp, Message, Receive, Scope, Send

SECONDS = (0.001, 0.005, 0.025, 0.1, 0.5, 2.5, 10.0, 60.0)


class Metrics:
    """What one server counts."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "hsstore_http_requests",
            "Requests answered, by method, route template and status.",
            ("method", "route", "status"),
            registry=self.registry,
        )
        self.seconds = Histogram(
            "hsstore_http_request_seconds",
            "From the request to the last byte of its answer.",
            ("route",),
            buckets=SECONDS,
            registry=self.registry,
        )
        self.batch_bodies = Counter(
            "hsstore_batch_bodies",
            "Batch bodies by how they ended: complete, client_left, stalled, damaged or cancelled.",
            ("end",),
            registry=self.registry,
        )
        self.batch_bytes = Counter(
            "hsstore_batch_bytes", "Bytes of batch bodies handed to sockets.", registry=self.registry
        )
        self.file_bodies = Counter(
            "hsstore_file_bodies",
            "Bodies of shard files by how they ended: complete, client_left, stalled, damaged or cancelled.",
            ("end",),
            registry=self.registry,
        )
        self.file_bytes = Counter(
            "hsstore_file_bytes", "Bytes of shard files handed to sockets.", registry=self.registry
        )
        self.streams = Gauge(
            "hsstore_streams", "Bodies of batches and files on their way at this moment.", registry=self.registry
        )
        self.plans = Counter(
            "hsstore_plan_computations",
            "Plans and epochs computed, which a cache answers mostly.",
            ("what",),
            registry=self.registry,
        )
        self.samples = Gauge("hsstore_store_samples", "Samples of a served store.", ("store",), registry=self.registry)
        self.tokens = Gauge("hsstore_store_tokens", "Tokens of a served store.", ("store",), registry=self.registry)

    def body_finished(self, n_bytes: int, end: str) -> None:
        self.batch_bodies.labels(end).inc()
        self.batch_bytes.inc(n_bytes)

    def file_finished(self, n_bytes: int, end: str) -> None:
        self.file_bodies.labels(end).inc()
        self.file_bytes.inc(n_bytes)


class RequestMetrics:
    """ASGI wrapper: one count and one duration per request. Plain ASGI, so that bodies pass through untouched."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app = app
        self.metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        status = 500
        start = time.perf_counter()

        async def noting_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, noting_status)
        finally:
            route = getattr(scope.get("route"), "path", "none")
            self.metrics.requests.labels(_known(scope["method"]), route, str(status)).inc()
            self.metrics.seconds.labels(route).observe(time.perf_counter() - start)


def _known(method: str) -> str:
    """Any client may invent methods; each would be a series."""
    return method if method in ("GET", "HEAD", "POST") else "other"
