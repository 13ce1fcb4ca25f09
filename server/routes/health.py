"""Probes and metrics. The two probes are free of the token: who may start a container must be able to watch it."""

from __future__ import annotations

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from hsstore.api import Status
from hsstore.errors import DamagedError
from server.routes.common import ServiceDep

probes = APIRouter(tags=["operation"])
router = APIRouter(tags=["operation"])


@probes.get("/health")
def health() -> Status:
    """The process answers."""
    return Status(status="ok")


@probes.get("/ready")
def ready(service: ServiceDep) -> Status:
    """Every store is still where it was opened."""
    for served in service.stores.values():
        if not (served.store.root / "store.json").is_file():
            raise DamagedError(f"store {served.name!r} is no longer there", hint="is its disk mounted?")
    return Status(status="ready")


@router.get(
    "/metrics",
    response_class=Response,
    responses={200: {"description": "Prometheus text format", "content": {CONTENT_TYPE_LATEST: {}}}},
)
def metrics(service: ServiceDep) -> Response:
    """Counters for Prometheus."""
    return Response(generate_latest(service.metrics.registry), media_type=CONTENT_TYPE_LATEST)
