"""Which HTTP client fills a preallocated buffer fastest: http.client, urllib3 or a bare socket.

Serves slices of a memory-mapped file from uvicorn (uvloop, httptools) in another process, as the service does, and
reads them over loopback with each client in turn. The rounds are interleaved so that a busy neighbour disturbs all
clients alike; the median counts. The rule of the design: urllib3 if it holds 90 % of http.client, else http.client.
It holds them on an idle machine only, and only in pieces of 1 MiB; where CPU is short, its extra copy costs 17 to
51 %. So `hsstore.client` uses http.client.

    python benchmarks/http_client.py [--mib 32 256] [--rounds 9] [--json]
"""

from __future__ import annotations

import argparse
import functools
import http.client
import json
import multiprocessing
import socket
import statistics
import tempfile
import time
from collections.abc import Callable

import urllib3

MIB = 1 << 20
PIECE_BYTES = 4 * MIB


def serve(listener: socket.socket, path: str) -> None:
    """Answer `/N` with the first N bytes of the file, as memoryviews of its map."""
    import mmap

    import uvicorn

    with open(path, "rb") as file:
        view = memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))

    async def app(scope, receive, send):
        n_bytes = int(scope["path"][1:])
        headers = [(b"content-length", str(n_bytes).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for start in range(0, n_bytes, PIECE_BYTES):
            piece = view[start : min(start + PIECE_BYTES, n_bytes)]
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    config = uvicorn.Config(app, loop="uvloop", http="httptools", log_level="warning", access_log=False, lifespan="off")
    uvicorn.Server(config).run(sockets=[listener])


def fill(readinto: Callable[[memoryview], int], view: memoryview) -> None:
    done = 0
    while done < len(view):
        n = readinto(view[done:])
        if n == 0:
            raise ConnectionError(f"body ended after {done} of {len(view)} bytes")
        done += n


def http_client_reader(port: int) -> Callable[[memoryview], None]:
    connection = http.client.HTTPConnection("127.0.0.1", port)

    def read(view: memoryview) -> None:
        connection.request("GET", f"/{len(view)}")
        response = connection.getresponse()
        fill(response.readinto, view)
        response.read()

    return read


def urllib3_reader(port: int) -> Callable[[memoryview], None]:
    pool = urllib3.HTTPConnectionPool("127.0.0.1", port)

    def read(view: memoryview) -> None:
        response = pool.request("GET", f"/{len(view)}", preload_content=False)
        fill(response.readinto, view)
        response.release_conn()

    return read


def urllib3_pieces_reader(port: int, piece_bytes: int = MIB) -> Callable[[memoryview], None]:
    """urllib3 asked for a piece at a time: its readinto copies out of a bytes object, which then stays in cache."""
    pool = urllib3.HTTPConnectionPool("127.0.0.1", port)

    def read(view: memoryview) -> None:
        response = pool.request("GET", f"/{len(view)}", preload_content=False)
        fill(lambda rest: response.readinto(rest[:piece_bytes]), view)
        response.release_conn()

    return read


def socket_reader(port: int) -> Callable[[memoryview], None]:
    """The floor: no parsing beyond the end of the header."""
    sock = socket.create_connection(("127.0.0.1", port))

    def read(view: memoryview) -> None:
        sock.sendall(f"GET /{len(view)} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        head = b""
        while b"\r\n\r\n" not in head:
            head += sock.recv(1)
        fill(sock.recv_into, view)

    return read


READERS = {
    "http.client": http_client_reader,
    "urllib3": urllib3_reader,
    "urllib3 256 KiB": functools.partial(urllib3_pieces_reader, piece_bytes=MIB // 4),
    "urllib3 1 MiB": urllib3_pieces_reader,
    "socket": socket_reader,
}


def measure(mib: int, rounds: int, port: int) -> dict[str, tuple[float, float]]:
    """Median (GB/s, CPU seconds per GB in the client) over interleaved rounds; the second hardly feels neighbours."""
    view = memoryview(bytearray(mib * MIB))
    readers = {name: make(port) for name, make in READERS.items()}
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in readers}
    for _ in range(rounds + 1):  # the first round warms connections and page tables
        for name, read in readers.items():
            start, cpu = time.perf_counter(), time.process_time()
            read(view)
            seconds[name].append((time.perf_counter() - start, time.process_time() - cpu))
    gb = mib * MIB / 1e9
    walls_and_cpus = {
        name: [statistics.median(x) for x in zip(*times[1:], strict=True)] for name, times in seconds.items()
    }
    return {name: (gb / wall, cpu / gb) for name, (wall, cpu) in walls_and_cpus.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, nargs="+", default=[32, 256])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()

    with tempfile.NamedTemporaryFile() as file, socket.create_server(("127.0.0.1", 0)) as listener:
        for _ in range(max(options.mib)):
            file.write(b"\x3f" * MIB)
        file.flush()
        process = multiprocessing.get_context("fork").Process(target=serve, args=(listener, file.name), daemon=True)
        process.start()
        port = listener.getsockname()[1]
        results = {mib: measure(mib, options.rounds, port) for mib in options.mib}
        process.terminate()
    if options.json:
        print(json.dumps(results))
        return
    for mib, speeds in results.items():
        for name, (speed, cpu) in speeds.items():
            share = speed / speeds["http.client"][0]
            print(f"{mib:4d} MiB  {name:15s} {speed:5.2f} GB/s  {share:4.0%} of http.client  {cpu:5.3f} CPU s/GB")


if __name__ == "__main__":
    main()
