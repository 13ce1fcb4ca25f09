"""The files of a store by path, whole or a range of bytes, each with its recorded SHA-256 as the ETag."""

from __future__ import annotations

import re
from typing import Annotated, Any

from fastapi import APIRouter, Header, Request, Response

from server.files import Document, ShardFile
from server.problems import BusyError, error_response, problem_response
from server.routes.common import NOT_MODIFIED, ServiceDep, matches
from server.service import Service
from server.streaming import MapResponse

router = APIRouter(prefix="/v1/stores/{store}/files", tags=["files"])
WINDOW_BYTES = 4 << 20  # two of them for each body on its way: unlike pages of a map they are memory of ours
_PREFIX = "/{path:path}"
_RANGE = re.compile(r"bytes=(\d*)-(\d*)", re.IGNORECASE)
_CONTENT = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
_DOCUMENTED: dict[int | str, dict[str, Any]] = {
    200: {"description": "The file as it lies on disk", "content": _CONTENT},
    206: {"description": "The bytes that `Range` asks for", "content": _CONTENT},
    **NOT_MODIFIED,
}
Range = Annotated[str | None, Header(description="One range, `bytes=FIRST-LAST`; several of them are not supported.")]
IfRange = Annotated[str | None, Header(description="`Range` counts only while the file has this ETag.")]


@router.get(_PREFIX, response_class=Response, responses=_DOCUMENTED)
def get_file(
    service: ServiceDep, request: Request, store: str, path: str, range: Range = None, if_range: IfRange = None
) -> Response:
    """One file that the records of the store name."""
    found = service.store(store).files.find(path)
    headers = _headers(service, found)
    if matches(request, headers["ETag"]):
        return Response(status_code=304, headers=headers)
    counts = if_range is None or if_range == headers["ETag"]
    bounds = _bounds(range if counts else None, found.n_bytes)
    if bounds is None:
        unsatisfiable = {"Content-Range": f"bytes */{found.n_bytes}", "Accept-Ranges": "bytes"}
        detail = f"the file has {found.n_bytes} bytes, none of them in the range that was asked for"
        return problem_response(request, status=416, kind="usage", detail=detail, headers=unsatisfiable)
    start, stop = bounds
    response = _body(service, request, found, start, stop, headers)
    if range and counts and _single(range):
        response.status_code = 206
        response.headers["Content-Range"] = f"bytes {start}-{stop - 1}/{found.n_bytes}"
    return response


@router.head(_PREFIX, response_class=Response, responses={200: {"description": "Length and ETag"}, **NOT_MODIFIED})
def head_file(service: ServiceDep, request: Request, store: str, path: str) -> Response:
    """Recorded length and SHA-256 of a file, without reading it."""
    found = service.store(store).files.find(path)
    headers = _headers(service, found)
    if matches(request, headers["ETag"]):
        return Response(status_code=304, headers=headers)
    return Response(headers={**headers, "Content-Length": str(found.n_bytes)}, media_type=MapResponse.media_type)


def _headers(service: Service, found: Document | ShardFile) -> dict[str, str]:
    audience = "private, " if service.private else ""
    return {"ETag": f'"{found.sha256}"', "Accept-Ranges": "bytes", "Cache-Control": f"{audience}no-cache"}


def _body(
    service: Service, request: Request, found: Document | ShardFile, start: int, stop: int, headers: dict[str, str]
) -> Response:
    if isinstance(found, Document):
        return Response(found.data[start:stop], headers=headers, media_type=MapResponse.media_type)
    return MapResponse(
        found.pieces(start, stop),
        n_bytes=stop - start,
        headers=headers,
        slots=service.slots,
        busy=lambda: error_response(request, BusyError("too many bodies are on their way", hint="try again")),
        stall_seconds=service.limits.stall_seconds,
        finished=service.metrics.file_finished,
        window_bytes=WINDOW_BYTES,
    )


def _single(header: str) -> re.Match[str] | None:
    """The one range of a Range header; None for what RFC 9110 §14.2 lets us ignore: other units, several, nonsense."""
    match = _RANGE.fullmatch(header.strip())
    if match is None or match[1] == match[2] == "" or len(header) > 64:
        return None
    return None if match[1] and match[2] and int(match[1]) > int(match[2]) else match


def _bounds(header: str | None, n_bytes: int) -> tuple[int, int] | None:
    """First byte and the one behind the last. None when no byte of the file is in the range."""
    match = _single(header) if header else None
    if match is None:
        return 0, n_bytes
    if not match[1]:
        start, stop = max(0, n_bytes - int(match[2])), n_bytes
    else:
        start, stop = int(match[1]), min(n_bytes, int(match[2]) + 1 if match[2] else n_bytes)
    return (start, stop) if start < stop else None
