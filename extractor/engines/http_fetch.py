"""A body of raw rows, out of the network and into the staged files, piece by piece.

The body holds every state of one sample, one after the other. Memory is one piece a thread, whatever the sample's
length. Leaves the request to `http_client`, trying again to `http_link`.

Letters: T tokens of a sample, H hidden size.
"""

from __future__ import annotations

import http.client
import os
import threading

from extractor.engines.base import Job
from extractor.sglang_plugin.protocol import Receipt
from hsstore.digest import crc32c
from hsstore.durable import pwrite_all
from hsstore.errors import from_os_error

_PIECE = 1 << 20
_local = threading.local()


class TornRowsError(Exception):
    """The body is not what was captured; what of it was written is overwritten by the next try."""


def write_rows(response: http.client.HTTPResponse, job: Job, receipt: Receipt, row_bytes: int) -> bool:
    """Write each state's rows to their place, and compare their digests with the receipt's. True when all is there.

    Raises `TornRowsError` for other bytes or an end that is too early, `NoSpaceError` and its kin for the disk.
    """
    expected = len(job.files) * len(job.input_ids) * row_bytes
    if response.length != expected:
        raise TornRowsError(f"sent {response.length} bytes of rows, expected {expected}")
    for name, path in job.files.items():
        if _write_state(response, path, job, row_bytes) != receipt.crc32c[name]:
            raise TornRowsError(f"sent rows of {name} that are not those it captured")
    return True


def _write_state(response: http.client.HTTPResponse, path: str, job: Job, row_bytes: int) -> int:
    """CRC32C of one state's rows, which are then in the file."""
    buffer, digest = _buffer(), 0
    at = job.row * row_bytes
    end = at + len(job.input_ids) * row_bytes
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    except OSError as error:
        raise from_os_error(error) from None
    try:
        while at < end:
            piece = buffer[: min(len(buffer), end - at)]
            n_bytes = response.readinto(piece)
            if n_bytes == 0:
                raise TornRowsError(f"ended the rows {end - at} bytes too early")
            digest = crc32c(piece[:n_bytes], digest)
            _pwrite(fd, piece[:n_bytes], at, path)
            at += n_bytes
    finally:
        os.close(fd)
    return digest


def _pwrite(fd: int, piece: memoryview, at: int, path: str) -> None:
    try:
        pwrite_all(fd, piece, at)
    except OSError as error:  # not one of the network, which `http_client` reads as a lost server
        error.filename = path
        raise from_os_error(error) from None


def _buffer() -> memoryview:
    """One piece of memory for each thread."""
    if not hasattr(_local, "buffer"):
        _local.buffer = memoryview(bytearray(_PIECE))
    view: memoryview = _local.buffer
    return view
