"""The ASGI application: stores opened, routes mounted, errors mapped, requests counted.

Responsible for putting the parts together in one place. `create_app` owns no global, so two apps may live in one
process. Leaves sockets, signals and logs to `runner`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import Depends, FastAPI

from hsstore import __version__
from server import auth, problems
from server.guard import Guard
from server.metrics import RequestMetrics
from server.routes import batches, files, health, plans, stores
from server.service import Service
from server.settings import Settings


def create_app(settings: Settings) -> FastAPI:
    """An app that serves the stores of `settings`.

    Raises what opening a store raises (`NotFoundError`, `DamagedError`, `FormatError`), and `UsageError` for two
    stores of one name or an unusable token.
    """
    current = auth.token_reader(settings) if settings.needs_token else None
    service = Service(settings)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        service.close()

    app = FastAPI(
        title="hsstore",
        version=__version__,
        summary="Packed batches of a verifier's hidden states",
        docs_url=None,  # its pages load scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
        lifespan=lifespan,
    )
    app.state.service = service
    app.add_middleware(Guard, current=current)
    app.add_middleware(RequestMetrics, metrics=service.metrics)
    problems.install(app)
    app.include_router(health.probes, responses=problems.DOCUMENTED)
    documented = [Depends(auth.SCHEME)] if current else []
    for part in (health, stores, files, plans, batches):
        app.include_router(part.router, responses=problems.DOCUMENTED, dependencies=documented)
    return app
