"""An S3 server in a process of its own, and a proxy in front of it that treats connections badly."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field

_CONDITION = b"if-none-match: *"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@contextlib.contextmanager
def s3_server() -> Iterator[int]:
    """moto's server; yields its port."""
    port = free_port()
    code = "import sys; from moto.server import main; main(sys.argv[1:])"
    command = [sys.executable, "-c", code, "-H", "127.0.0.1", "-p", str(port)]
    with open(os.devnull, "w") as devnull:
        process = subprocess.Popen(command, stdout=devnull, stderr=devnull)
    try:
        _wait_for(port, process)
        yield port
    finally:
        process.kill()
        process.wait()


def _wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 120
    while True:
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=1):
                return
        except OSError:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("moto's server did not start") from None
            time.sleep(0.05)


def make_bucket(port: int, name: str) -> None:
    request = urllib.request.Request(f"http://127.0.0.1:{port}/{name}", method="PUT")
    with urllib.request.urlopen(request, timeout=30) as answer:
        assert answer.status == 200


def uploads(port: int, bucket: str) -> str:
    """What the server says of multipart uploads that were begun and not ended."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/{bucket}?uploads", timeout=30) as answer:
        return str(answer.read().decode())


@dataclass
class Manners:
    """How the proxy treats connections; may be changed while it runs."""

    cut: tuple[int, int] | None = None
    """Reset each connection after so many bytes of one direction, drawn from this range."""
    dead: bool = False
    """Reset every connection at once."""
    silent: bool = False
    """Take everything, answer nothing."""
    deaf_to_conditions: bool = False
    """Let the server see no `If-None-Match`, as servers behave that do not know it."""
    cuts: dict[str, int] = field(default_factory=lambda: {"up": 0, "down": 0})
    """Connections that were cut in the midst, by the direction whose bytes ran out."""
    stripped: int = 0


class Proxy:
    """Between a client and the server on that port. A context manager; `port` is where it listens."""

    def __init__(self, server_port: int, seed: int = 0) -> None:
        self.manners = Manners()
        self._server_port, self._random = server_port, random.Random(seed)
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port = int(self._listener.getsockname()[1])
        self._lock, self._open = threading.Lock(), set[socket.socket]()
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._puts_left: int | None = None
        self.holding = threading.Event()
        """Set while a request to write is held back."""
        self._released = threading.Event()

    def __enter__(self) -> Proxy:
        self._threads[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.reset_all()
        for thread in list(self._threads):
            thread.join(10)

    def hold_after(self, n_puts: int | None) -> None:
        """Let so many more requests to write pass and hold the next ones; None lets all pass, but those that are held
        are lost."""
        self._puts_left = n_puts
        self._released.set()
        self._released = threading.Event()
        self.holding.clear()

    def _may_pass(self, data: bytes) -> bool:
        """Whether the beginning of a request goes on; waits while it is held."""
        with self._lock:
            if self._puts_left is None or not data.startswith((b"PUT ", b"POST ")):
                return True
            self._puts_left -= 1
            if self._puts_left >= 0:
                return True
            released = self._released
        self.holding.set()
        released.wait()
        return False

    def reset_all(self) -> None:
        with self._lock:
            still = list(self._open)
        for one in still:
            self._reset(one)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self.manners.dead:
                self._reset(client)
                continue
            server = socket.create_connection(("127.0.0.1", self._server_port))
            with self._lock:
                self._open |= {client, server}
            left = self._budget()
            for source, sink, way in ((client, server, "up"), (server, client, "down")):
                thread = threading.Thread(target=self._pump, args=(source, sink, way, left[way]), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _budget(self) -> dict[str, int | None]:
        """How many bytes each way of one connection lets through; only one of the two is limited."""
        if self.manners.cut is None:
            return {"up": None, "down": None}
        limited = self._random.choice(["up", "down"])
        n = self._random.randint(*self.manners.cut)
        return {"up": n if limited == "up" else None, "down": n if limited == "down" else None}

    def _pump(self, source: socket.socket, sink: socket.socket, way: str, left: int | None) -> None:
        try:
            while data := source.recv(1 << 16):
                if self.manners.dead:
                    break
                if way == "up" and not self._may_pass(data):
                    break
                if self.manners.silent and way == "down":
                    continue
                if way == "up" and self.manners.deaf_to_conditions and _CONDITION in data.lower():
                    at = data.lower().index(_CONDITION)
                    data = data[:at] + b"x" * 13 + data[at + 13 :]
                    self.manners.stripped += 1
                if left is not None and len(data) >= left:
                    sink.sendall(data[:left])
                    self.manners.cuts[way] += 1
                    break
                if left is not None:
                    left -= len(data)
                sink.sendall(data)
        except OSError:
            pass  # the other direction has reset it
        self._reset(source)
        self._reset(sink)

    def _reset(self, one: socket.socket) -> None:
        """Close it in the rudest way: what is under way is lost, the other end gets ECONNRESET."""
        with self._lock:
            self._open.discard(one)
        with contextlib.suppress(OSError):
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            one.shutdown(socket.SHUT_RDWR)
        one.close()
