"""A real server on a real socket for tests: uvicorn in a thread, or the command in a process."""

from __future__ import annotations

import http.client
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from email.message import Message
from pathlib import Path
from urllib.parse import urlsplit

import uvicorn

from hsstore.source import Verify
from server.app import create_app
from server.runner import listen, url_of, uvicorn_config
from server.service import Service
from server.settings import Limits, Settings


@dataclass
class Live:
    """A running server in this process."""

    url: str
    port: int
    service: Service
    server: uvicorn.Server


@contextmanager
def serving(
    *stores: Path,
    port: int = 0,
    token: str | None = None,
    limits: Limits | None = None,
    verify_reads: Verify = "off",
) -> Iterator[Live]:
    """Serve stores from a thread until the block ends."""
    settings = Settings(
        stores=stores, port=port, token=token, limits=limits or Limits(grace_seconds=1), verify_reads=verify_reads
    )
    app = create_app(settings)
    listener = listen(settings.host, settings.port)
    server = uvicorn.Server(uvicorn_config(app, settings))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    live = Live(url_of(listener, settings.host), listener.getsockname()[1], app.state.service, server)
    thread.start()
    try:
        deadline = time.monotonic() + 120
        while not server.started and thread.is_alive() and time.monotonic() < deadline:
            time.sleep(0.005)
        assert server.started
        yield live
    finally:
        server.should_exit = True
        thread.join(120)
        app.state.service.close()
        assert not thread.is_alive()


@contextmanager
def serve_command(*arguments: str | Path, env: dict[str, str] | None = None) -> Iterator[subprocess.Popen[str]]:
    """`hsstore serve …` as a process, killed at the end if it still runs."""
    process = subprocess.Popen(
        [sys.executable, "-m", "hsstore.cli", "serve", *map(str, arguments)],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **(env or {})},
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(120)
        assert process.stderr is not None
        process.stderr.close()


def read_announcement(process: subprocess.Popen[str]) -> tuple[str, Sequence[str]]:
    """(URL, lines) once the command says that it listens."""
    assert process.stderr is not None
    lines: list[str] = []
    while not lines or not lines[-1].startswith("next: "):
        line = process.stderr.readline()
        assert line, f"the server ended: {lines}"
        lines.append(line.rstrip("\n"))
    match = re.search(r"http://\S+", lines[0])
    assert match
    return match[0], lines


@dataclass
class Answer:
    status: int
    headers: Message
    body: bytes

    def json(self) -> dict[str, object]:
        return json.loads(self.body)


def fetch(method: str, url: str, *, body: object = None, body_bytes: bytes | None = None, **headers: str) -> Answer:
    """One request on a connection of its own; `If_None_Match="x"` is the header If-None-Match."""
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    if body is not None:
        body_bytes = json.dumps(body).encode()
        names["Content-Type"] = "application/json"
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=120)
    try:
        connection.request(method, f"{parts.path or '/'}{'?' * bool(parts.query)}{parts.query}", body_bytes, names)
        response = connection.getresponse()
        return Answer(response.status, response.headers, response.read())
    finally:
        connection.close()
