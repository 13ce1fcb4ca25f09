"""Errors as RFC 9457 `application/problem+json`, all of them, with the `kind` of the error tree.

Responsible for the answer to every error: ours, the framework's validation, the router's 404 and 405, and what nobody
expected (logged with its traceback, answered without it). Leaves the tables of kinds and statuses to `hsstore.errors`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any
from urllib.parse import quote

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import TypeAdapter
from starlette.exceptions import HTTPException
from starlette.routing import Match

from hsstore.api import Problem
from hsstore.errors import HsstoreError, ServiceError, UnauthorizedError
from hsstore.records import canonical

log = logging.getLogger("hsstore.server")
MEDIA_TYPE = "application/problem+json"
RETRY_AFTER_SECONDS = 1

# For `responses=` of a router: whatever is not a success is a problem.
DOCUMENTED: dict[int | str, dict[str, Any]] = {
    "default": {
        "description": "A problem (RFC 9457)",
        "content": {MEDIA_TYPE: {"schema": TypeAdapter(Problem).json_schema()}},
    }
}


class BusyError(ServiceError):
    """More is asked for at once than this server gives: 503 with Retry-After."""

    http_status = 503


def problem_response(
    request: Request, *, status: int, kind: str, detail: str, hint: str = "", headers: Mapping[str, str] | None = None
) -> Response:
    problem = Problem(
        type=f"urn:hsstore:problem:{kind}",
        title=HTTPStatus(status).phrase,
        status=status,
        detail=detail,
        kind=kind,
        hint=hint,
        instance=_instance(request),
    )
    return Response(canonical(problem), status, dict(headers or {}), MEDIA_TYPE)


def _instance(request: Request) -> str:
    """The path as a URI reference: percent-encoded, which also keeps line breaks out of logs."""
    return quote(request.scope["path"], safe="/:@!$&'()*+,;=~", errors="replace")


def error_response(request: Request, error: HsstoreError) -> Response:
    """The answer to an error of our tree."""
    headers = {}
    if isinstance(error, UnauthorizedError):
        headers["WWW-Authenticate"] = "Bearer"
    if error.http_status == HTTPStatus.SERVICE_UNAVAILABLE:
        headers["Retry-After"] = str(RETRY_AFTER_SECONDS)
    if error.http_status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        log.error("%s %s: %s: %s", request.method, _instance(request), error.kind, error)
    status, kind = error.http_status, error.kind
    return problem_response(request, status=status, kind=kind, detail=error.message, hint=error.hint, headers=headers)


def install(app: FastAPI) -> None:
    """Register one handler per family of errors."""

    @app.exception_handler(HsstoreError)
    async def ours(request: Request, error: HsstoreError) -> Response:
        return error_response(request, error)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return problem_response(request, status=422, kind="usage", detail=describe(error.errors()))

    @app.exception_handler(HTTPException)
    async def router(request: Request, error: HTTPException) -> Response:
        # The framework's 400 is a body that its JSON parser gave up on: for the client no other case than a wrong one.
        status = HTTPStatus.UNPROCESSABLE_ENTITY if error.status_code == 400 else error.status_code
        headers = dict(error.headers or {})
        if status == HTTPStatus.METHOD_NOT_ALLOWED:
            headers["Allow"] = ", ".join(_allowed(request))
        kind = {401: "unauthorized", 404: "not_found"}.get(status, "usage")
        detail = f"{request.method} {_instance(request)}: {error.detail}"
        hint = "GET /openapi.json lists the paths" if status in (404, 405) else ""
        return problem_response(request, status=status, kind=kind, detail=detail, hint=hint, headers=headers)

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> Response:
        # Starlette raises it again behind this answer, and uvicorn logs the traceback.
        return problem_response(
            request, status=500, kind="error", detail="an unexpected error; the log of the server has the traceback"
        )


def _allowed(request: Request) -> list[str]:
    """Every method of a path. The router names only those of the first route that it finds there."""
    routes = request.app.router.routes
    return [
        method
        for method in ("GET", "HEAD", "POST")
        if any(route.matches({**request.scope, "method": method})[0] is Match.FULL for route in routes)
    ]


def describe(errors: Sequence[Any]) -> str:
    """One sentence for all that pydantic found: where and what, never the value itself."""
    return "; ".join(f"{'.'.join(map(str, error['loc']))}: {error['msg']}" for error in errors)
