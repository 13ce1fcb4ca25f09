"""The body of an upload: pieces of a file, got a few ahead by a thread of their own.

obstore asks for a body inside of its event loop, where nothing may be asked of obstore again, as a copy from one bucket
to another would. Leaves requests to `objectplace`.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

from hsstore.places import Piece, check_length

_PIECES_AHEAD = 4


class Body:
    """To be iterated once, then closed."""

    def __init__(self, path: str, pieces: Iterable[Piece], n_bytes: int) -> None:
        self._path, self._pieces, self._expected = path, pieces, n_bytes
        self._queue: queue.Queue[bytes | None] = queue.Queue(_PIECES_AHEAD)
        self._unwanted = threading.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="pieces")
        self.error: BaseException | None = None
        """What went wrong with the pieces, as it was: obstore may wrap it."""

    def __iter__(self) -> Iterator[bytes]:
        fetched = self._thread.submit(self._fetch)
        while (piece := self._queue.get()) is not None:
            yield piece
        self.error = fetched.exception()
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        """End the thread, whether all pieces were wanted or not."""
        self._unwanted.set()
        self._thread.shutdown()

    def _fetch(self) -> None:
        found, pieces = 0, iter(self._pieces)
        try:
            for piece in pieces:
                found += len(piece)
                if not self._hand_over(bytes(piece)):  # a piece of ours is valid until the next one is asked for
                    return
            check_length(self._path, found, self._expected)
        finally:
            if isinstance(pieces, Generator):
                pieces.close()
            self._hand_over(None)

    def _hand_over(self, piece: bytes | None) -> bool:
        """False when nobody wants it any more."""
        while not self._unwanted.is_set():
            with contextlib.suppress(queue.Full):
                self._queue.put(piece, timeout=0.1)
                return True
        return False
