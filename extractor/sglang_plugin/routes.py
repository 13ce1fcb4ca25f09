"""Routes that the plugin adds to SGLang's own HTTP server: what is served, and the rows that clients fetch.

On the server's own port, so its address, TLS and API key are those of `/generate`, and no scheduler spends time on a
network. Rows come out of the spool (`spool`), in which the schedulers' writer threads put them. Leaves to `delivery`
how they get there, to `extractor.engines.http` what a client makes of them.

    GET    /hsstore/info                  `ServerInfo`
    GET    /hsstore/rows/TICKET?wait=20   the rows as raw bytes, as soon as they are complete
    GET    /hsstore/rows/TICKET/errors    `WriteError`s of that request
    DELETE /hsstore/rows/TICKET           free them, and write no more of them
"""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from extractor import verifier, weights
from extractor.sglang_plugin import SPOOL_VARIABLE, flags, host
from extractor.sglang_plugin.protocol import INFO_PATH, PROTOCOL, ROWS_PATH, ServedModel, ServerInfo
from extractor.sglang_plugin.spool import Spool, is_ticket
from hsstore import __version__
from hsstore.api import Problem
from hsstore.errors import HsstoreError, IncompleteError, UsageError
from hsstore.modeldigest import weights_sha256

LONGEST_WAIT_SECONDS = 60.0
_POLL_SECONDS = 0.002
_SLOWEST_POLL_SECONDS = 0.1
_PIECE = 4 << 20
_SERVING = ("api_key", "admin_api_key", "served_model_name", "chat_template", "file_storage_path")  # or ssl_…


def attach(
    server_args: Any,
    tokenizer_manager: Any,
    template_manager: Any,
    port_args: Any,
    scheduler_infos: Any,
    *_: Any,
    **__: Any,
) -> None:
    """Hook: before SGLang's HTTP server runs, its app gets our routes."""
    from sglang.srt.entrypoints.http_server import app
    from starlette.routing import Route

    served = Served(server_args, tokenizer_manager, scheduler_infos)
    rows = SpoolRoutes(Spool.of(os.environ[SPOOL_VARIABLE]))
    one = f"{ROWS_PATH}/{{ticket}}"
    app.router.routes.extend(
        (
            Route(INFO_PATH, served.info, methods=["GET"]),
            Route(one, rows.fetch, methods=["GET"]),
            Route(one, rows.drop, methods=["DELETE"]),
            Route(f"{one}/errors", rows.errors, methods=["GET"]),
        )
    )


class Served:
    """What this server runs."""

    def __init__(self, server_args: Any, manager: Any, scheduler_infos: Any) -> None:
        self._arguments, self._manager, self._infos = server_args, manager, scheduler_infos
        self._models: dict[str, ServedModel] = {}
        self._reading = asyncio.Lock()

    async def info(self, request: Any) -> Any:
        ranks = await self._manager.get_internal_state()
        state = ranks[0]
        layer_ids = self._arguments.return_aux_hidden_state_layer_ids or []
        method = {
            "capture_method": str(self._arguments.speculative_algorithm),
            "capture_layer_ids": ",".join(map(str, layer_ids)),
        }
        value = ServerInfo(
            ready=host.ready(self._manager, self._infos, ranks, method, chosen(self._arguments)),
            model=await self._model(self._manager.model_path),
            radix_cache=not state.get("disable_radix_cache"),
            capture=bool(state.get("enable_return_aux_hidden_states")),
            load_format=str(self._manager.config_value("load_format")),
            weight_version=str(self._manager.config_value("weight_version")),
            protocol=PROTOCOL,
            hsstore=__version__,
        )
        return _json(value)

    async def _model(self, path: str) -> ServedModel:
        async with self._reading:
            if path not in self._models:
                self._models[path] = await asyncio.to_thread(read_model, path)
            return self._models[path]


def read_model(path: str) -> ServedModel:
    """The digests of a model directory (17 MiB of each file of weights), as far as it can be read."""
    try:
        model = verifier.read_verifier(path)
        files = weights.weight_files(model.path)
        digest = weights_sha256(files, sampled=True)
    except (HsstoreError, OSError) as error:
        return ServedModel(path, unknown=str(error))
    return ServedModel(str(model.path), model.architecture, model.config_sha256, digest)


def chosen(server_args: Any) -> dict[str, Any]:
    """The flags that whoever started the server chose, without those that say where and whom it serves."""
    found = {}
    for name, parameter in inspect.signature(type(server_args)).parameters.items():
        value = getattr(server_args, name, parameter.default)
        ours = name in flags.RESERVED or name.startswith(("speculative_", "ssl_")) or name in _SERVING
        if not ours and value != parameter.default:
            found[name] = value
    return found


class SpoolRoutes:
    """Rows and errors out of the spool."""

    def __init__(self, spool: Spool) -> None:
        self._spool = spool

    async def fetch(self, request: Any) -> Any:
        from starlette.responses import Response, StreamingResponse

        if (ticket := _ticket(request)) is None:
            return _no_ticket(request)
        self._spool.asked(ticket)
        path = await self._complete(ticket, _seconds(request.query_params))
        if failed := self._spool.failure(ticket):
            return _problem(IncompleteError(f"the server could not keep the rows: {failed.reason}"), request)
        if path is None:
            return Response(status_code=202)  # not complete yet: ask again
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return _problem(IncompleteError("the rows are gone: fetched already, or kept for too long"), request)
        headers = {"Content-Length": str(os.fstat(fd).st_size), "Cache-Control": "no-store"}
        return StreamingResponse(_pieces(fd), media_type="application/octet-stream", headers=headers)

    async def errors(self, request: Any) -> Any:
        if (ticket := _ticket(request)) is None:
            return _no_ticket(request)
        failed = self._spool.failure(ticket)
        return _json([failed] if failed else [])

    async def drop(self, request: Any) -> Any:
        from starlette.responses import Response

        if (ticket := _ticket(request)) is None:
            return _no_ticket(request)
        self._spool.drop(ticket)
        return Response(status_code=204)

    async def _complete(self, ticket: str, seconds: float) -> Path | None:
        """The file of the rows, once it is complete or its writing has failed; None when neither happens in time."""
        loop = asyncio.get_running_loop()
        deadline, wait = loop.time() + seconds, _POLL_SECONDS
        path = self._spool.rows(ticket)
        while not path.exists() and self._spool.failure(ticket) is None:
            if loop.time() > deadline:
                return None
            await asyncio.sleep(wait)
            wait = min(2 * wait, _SLOWEST_POLL_SECONDS)
        return path


async def _pieces(fd: int) -> AsyncIterator[bytes]:
    try:
        offset = 0
        while piece := await asyncio.to_thread(os.pread, fd, _PIECE, offset):
            offset += len(piece)
            yield piece
            os.utime(fd)  # it is being fetched, however slowly
    finally:
        os.close(fd)


def _ticket(request: Any) -> str | None:
    text = str(request.path_params["ticket"])
    return text if is_ticket(text) else None


def _no_ticket(request: Any) -> Any:
    return _problem(UsageError("a ticket is 32 hexadecimal digits"), request)


def _seconds(query: Mapping[str, str]) -> float:
    try:
        return min(max(float(query.get("wait", 0)), 0.0), LONGEST_WAIT_SECONDS)
    except ValueError:
        return 0.0


def _json(value: object) -> Any:
    from starlette.responses import Response

    return Response(msgspec.json.encode(value), media_type="application/json")


def _problem(error: HsstoreError, request: Any) -> Any:
    from http import HTTPStatus

    from starlette.responses import Response

    status = error.http_status
    problem = Problem(
        type=f"urn:hsstore:problem:{error.kind}",
        title=HTTPStatus(status).phrase,
        status=status,
        detail=error.message,
        kind=error.kind,
        hint=error.hint,
        instance=request.url.path,
    )
    return Response(msgspec.json.encode(problem), status_code=status, media_type="application/problem+json")
