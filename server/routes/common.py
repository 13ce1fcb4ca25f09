"""What the routes share: the service of the app they run in, and conditional requests."""

from __future__ import annotations

from typing import Annotated, Any, cast

from fastapi import Depends, Request

from server.service import Service


def _service(request: Request) -> Service:
    return cast(Service, request.app.state.service)


ServiceDep = Annotated[Service, Depends(_service)]
NOT_MODIFIED: dict[int | str, dict[str, Any]] = {304: {"description": "`If-None-Match` names this `ETag`"}}


def matches(request: Request, etag: str) -> bool:
    """Whether the client holds this very answer already (RFC 9110 §13.1.2: weak comparison)."""
    held = [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]
    return "*" in held or etag in held


def binary(description: str) -> dict[int | str, dict[str, Any]]:
    """OpenAPI of a 200 whose body is a safetensors file."""
    content = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
    return {200: {"description": description, "content": content}}
