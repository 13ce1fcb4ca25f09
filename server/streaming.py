"""A response whose body is slices of memory maps: known length, never assembled, never a stall of the event loop.

Responsible for handing uvicorn memoryviews of at most 4 MiB, for reading the next window of pages in while the last
one is on the wire, and for ending a body that cannot be finished by closing the connection: the client then sees a
body shorter than its Content-Length. Leaves the bytes to `hsstore.gather` and page faults to `prefault`.

Starlette's StreamingResponse would go through a thread for each piece; here one thread hop serves 32 MiB.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping

from fastapi import Response
from starlette.concurrency import run_in_threadpool
from starlette.types import Receive, Scope, Send

from hsstore.errors import HsstoreError
from hsstore.prefault import prefault

log = logging.getLogger("hsstore.server")
PIECE_BYTES = 4 << 20
WINDOW_BYTES = 32 << 20
Window = list[memoryview]


def cut(pieces: Iterable[memoryview]) -> Iterator[memoryview]:
    """The same bytes as flat views of at most `PIECE_BYTES`, without copying."""
    for piece in pieces:
        flat = piece if piece.ndim == 1 and piece.format == "B" else piece.cast("B")
        for start in range(0, flat.nbytes, PIECE_BYTES):
            yield flat[start : start + PIECE_BYTES]


def windows(pieces: Iterable[memoryview], window_bytes: int | None = None) -> Iterator[Window]:
    """Groups of about `window_bytes` (`WINDOW_BYTES`) whose pages are in memory when they are handed out."""
    window: Window = []
    n_bytes = 0
    for piece in cut(pieces):
        prefault(piece)
        window.append(piece)
        n_bytes += len(piece)
        if n_bytes >= (window_bytes or WINDOW_BYTES):
            yield window
            window, n_bytes = [], 0
    if window:
        yield window


class Slots:
    """At most `n` bodies on their way; the others wait in line, at most `wait_seconds`."""

    def __init__(self, n: int, wait_seconds: float) -> None:
        self._semaphore = asyncio.Semaphore(n)
        self._wait_seconds = wait_seconds
        self.in_use = 0

    async def take(self) -> bool:
        try:
            await asyncio.wait_for(self._semaphore.acquire(), self._wait_seconds)
        except TimeoutError:
            return False
        self.in_use += 1
        return True

    def give(self) -> None:
        self.in_use -= 1
        self._semaphore.release()


class MapResponse(Response):
    """Sends `pieces` (their first window is read in by the constructor, so damage there is still an error answer)."""

    media_type = "application/octet-stream"

    def __init__(
        self,
        pieces: Iterable[memoryview],
        *,
        n_bytes: int,
        headers: Mapping[str, str],
        slots: Slots,
        busy: Callable[[], Response],
        stall_seconds: float,
        finished: Callable[[int, str], None],
        window_bytes: int | None = None,
    ) -> None:
        super().__init__(b"", headers={**headers, "Content-Length": str(n_bytes)})
        self._windows = windows(pieces, window_bytes)
        self._first = next(self._windows, None)
        self._n_bytes = n_bytes
        self._sent = 0
        self._slots = slots
        self._busy = busy
        self._stall_seconds = stall_seconds
        self._finished = finished

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not await self._slots.take():
            await self._busy()(scope, receive, send)
            return
        gone = asyncio.ensure_future(_disconnected(receive))
        end = "cancelled"
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await self._send_windows(send, gone)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            end = "complete"
        except _ClientLeft:
            end = "client_left"
        except TimeoutError:
            end = "stalled"
        except (HsstoreError, OSError) as error:
            log.error("GET %s: closed after %d of %d bytes: %s", scope["path"], self._sent, self._n_bytes, error)
            end = "damaged"
        except asyncio.CancelledError:
            pass  # the server stops; raised further, uvicorn would log a traceback for each body on its way
        finally:
            gone.cancel()
            self._slots.give()
            self._finished(self._sent, end)

    async def _send_windows(self, send: Send, gone: asyncio.Future[None]) -> None:
        """All pieces in order; the pages of the next window are read in while this one is sent."""
        window, self._first = self._first, None
        while window is not None:
            ahead = asyncio.ensure_future(run_in_threadpool(next, self._windows, None))
            try:
                for piece in window:
                    if gone.done():
                        raise _ClientLeft
                    async with asyncio.timeout(self._stall_seconds):
                        await send({"type": "http.response.body", "body": piece, "more_body": True})
                    self._sent += len(piece)
            finally:  # also when sending failed: nothing may outlive the response in a thread
                window = await ahead


class _ClientLeft(Exception):
    """The connection was closed before the body was complete."""


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
