"""What the routes share: the service of the app they run in, and conditional requests."""

from __future__ import annotations

from typing import Annotated, Any, cast

import msgspec
from fastapi import Depends, Request, Response

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


def document(record: object) -> Response:
    """A record as its own JSON, which leaves out what is unset: pydantic has no word for that."""
    return Response(msgspec.json.encode(record), media_type="application/json")


def documented(type_: type, description: str) -> dict[int | str, dict[str, Any]]:
    """OpenAPI of a 200 that `document` answers with."""
    schema = msgspec.json.schema(type_)
    content = {"application/json": {"schema": _resolved(schema, schema.get("$defs", {}))}}
    return {200: {"description": description, "content": content}}


def _resolved(schema: Any, named: dict[str, Any]) -> Any:
    """The schema with every reference replaced by what it names, so that it stands anywhere in a document."""
    if isinstance(schema, list):
        return [_resolved(part, named) for part in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _resolved(named[schema["$ref"].rpartition("/")[2]], named)
    return {key: _resolved(part, named) for key, part in schema.items() if key != "$defs"}
