"""Running an app on a socket: bind, listen, say so, stop cleanly.

Responsible for the order that makes each failure one sentence: stores and token first, then the socket, then the
announcement, which is printed only when connections are accepted. Leaves options to `cli` and requests to `app`.
"""

from __future__ import annotations

import errno
import json
import logging
import signal
import socket
import time

import uvicorn
from fastapi import FastAPI

from hsstore import console
from hsstore.errors import EXIT_INTERRUPTED, LockedError, UsageError
from server.app import create_app
from server.service import Service
from server.settings import Settings


class _Server(uvicorn.Server):
    """uvicorn that announces itself when it listens and remembers the signal that ended it instead of re-raising."""

    def __init__(self, config: uvicorn.Config, announcement: list[str]) -> None:
        super().__init__(config)
        self._announcement = announcement
        self.ended_by: list[int] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            for line in self._announcement:
                console.note(line)

    def handle_exit(self, sig: int, frame: object) -> None:
        self.ended_by.append(sig)
        if len(self.ended_by) > 1:
            self.force_exit = True  # a second Ctrl-C does not wait for bodies on their way
        self.should_exit = True


def run(settings: Settings, *, access_log: bool = False, json_log: bool = False) -> int:
    """Serve until SIGTERM (returns 0) or Ctrl-C (returns 130)."""
    app = create_app(settings)
    listener = listen(settings.host, settings.port)
    configure_logging(json_log)
    config = uvicorn_config(app, settings, access_log=access_log)
    server = _Server(config, announcement(url_of(listener, settings.host), app.state.service))
    try:
        server.run(sockets=[listener])
    finally:
        app.state.service.close()
    return EXIT_INTERRUPTED if signal.SIGINT in server.ended_by else 0


def uvicorn_config(app: FastAPI, settings: Settings, *, access_log: bool = False) -> uvicorn.Config:
    """uvloop is not a matter of taste: it hands memoryviews to the kernel without copying them first."""
    return uvicorn.Config(
        app,
        loop="uvloop",
        http="httptools",
        log_config=None,
        access_log=access_log,
        server_header=False,
        timeout_keep_alive=75,  # a training step may take long; 5 s would cost a connection for each batch
        lifespan="off",  # cancelled by a second Ctrl-C, it would log a traceback; `run` closes the stores itself
        timeout_graceful_shutdown=int(settings.limits.grace_seconds),
    )


def listen(host: str, port: int) -> socket.socket:
    """A bound socket. Raises `LockedError` for a port in use and `UsageError` for an address that is not ours."""
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = found[0]
        return socket.create_server(address[:2], family=family, backlog=2048)
    except UnicodeError:  # of the IDNA codec: a label of more than 63 characters, an empty one
        raise UsageError(f"{host!r} is no name of a host", hint="check --host") from None
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise LockedError(f"port {port} of {host} is in use", hint="choose another --port, or 0 for any") from None
        raise UsageError(f"cannot listen on {host} port {port}: {error.strerror}", hint="check --host") from None


def url_of(listener: socket.socket, host: str) -> str:
    """The URL that reaches this listener from here, with the true port."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host.strip("[]"), host.strip("[]"))
    return f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"


def announcement(url: str, service: Service) -> list[str]:
    """What is served, where, and the next command."""
    lines = [f"serving on {url}{' (token needed)' if service.private else ''}"]
    for name, served in service.stores.items():
        m = served.store.totals
        lines.append(
            f"  {name}: {console.human_count(m.n_samples)} samples, {console.human_count(m.n_tokens)} tokens,"
            f" {console.human_bytes(m.n_bytes)}, manifest {served.store.manifest_id[:12]}"
        )
        if n_open := served.open_shards():
            lines.append(f"  warning: {n_open} shards of {name} are not extracted yet; their samples are not served")
    lines.append(f"next: hsstore train --source {url} --verifier MODEL --out DIR")
    return lines


class _JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(record.created)),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def configure_logging(json_log: bool) -> None:
    """Ours and uvicorn's lines on stderr: warnings and errors, and requests where --access-log asks for them."""
    handler = logging.StreamHandler()
    handler.setFormatter(_JsonLines() if json_log else logging.Formatter("%(levelname)s %(message)s"))
    for name, level in (("hsstore", "INFO"), ("uvicorn", "WARNING"), ("uvicorn.access", "INFO")):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.setLevel(level)
        logger.propagate = False
