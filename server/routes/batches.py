"""Batches: a safetensors file per URL, immutable, streamed from the maps of the store.

Whatever is wrong before the first byte is a problem answer; afterwards the body ends early and the connection closes.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query, Request, Response

from hsstore.source import check_source, is_checked
from server.problems import BusyError, error_response
from server.routes.common import NOT_MODIFIED, ServiceDep, binary, matches
from server.routes.plans import Epoch
from server.service import Service
from server.streaming import MapResponse

router = APIRouter(prefix="/v1/plans/{plan_id}/epochs/{epoch}/batches", tags=["batches"])
Number = Annotated[int, Path(ge=0, lt=2**53)]
Check = Annotated[bool, Query(description="Compare every block of the batch with its record before the first byte.")]
_PREFIX = "/{number}"
_DOCUMENTED = {**binary("The batch as a .safetensors file"), **NOT_MODIFIED}


@router.get(_PREFIX, response_class=Response, responses=_DOCUMENTED)
def get_batch(
    service: ServiceDep, request: Request, plan_id: str, epoch: Epoch, number: Number, check: Check = False
) -> Response:
    """One packed batch."""
    held = service.plan(plan_id)
    view = held.view(epoch, number)
    headers = _headers(service, plan_id, epoch, number)
    if matches(request, headers["ETag"]):
        return Response(status_code=304, headers=headers)
    with held.served.noticing_damage():
        if check or is_checked(service.verify_reads, number):
            check_source(held.served.store, held.plan, epoch, number)
        return MapResponse(
            view.pieces(),
            n_bytes=view.n_bytes,
            headers=headers,
            slots=service.slots,
            busy=lambda: error_response(request, BusyError("too many batches are on their way", hint="try again")),
            stall_seconds=service.limits.stall_seconds,
            finished=service.metrics.body_finished,
        )


@router.head(_PREFIX, response_class=Response, responses={200: {"description": "Length and ETag"}, **NOT_MODIFIED})
def head_batch(service: ServiceDep, request: Request, plan_id: str, epoch: Epoch, number: Number) -> Response:
    """Length and ETag of a batch, without reading it."""
    view = service.plan(plan_id).view(epoch, number)
    headers = _headers(service, plan_id, epoch, number)
    if matches(request, headers["ETag"]):
        return Response(status_code=304, headers=headers)
    return Response(headers={**headers, "Content-Length": str(view.n_bytes)}, media_type=MapResponse.media_type)


def _headers(service: Service, plan_id: str, epoch: int, number: int) -> dict[str, str]:
    audience = "private" if service.private else "public"
    return {
        "ETag": f'"{plan_id}/{epoch}/{number}"',
        "Cache-Control": f"{audience}, max-age=31536000, immutable",
        "Content-Disposition": f'attachment; filename="{plan_id[:12]}-{epoch}-{number}.safetensors"',
    }
