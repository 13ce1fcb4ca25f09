"""The streaming response by itself: views, not copies; bounded; an end for every way a body can end."""

from __future__ import annotations

import asyncio
import mmap
import os
import tracemalloc

import pytest
from fastapi import Response

from hsstore.errors import DamagedError
from hsstore.gather import BatchView
from hsstore.plan import PlanParameters
from hsstore.prefault import prefault
from hsstore.source import plan_of
from server import streaming
from server.streaming import PIECE_BYTES, MapResponse, Slots, cut
from tests.stores import make_samples, make_store


@pytest.fixture(scope="module")
def big(tmp_path_factory):
    """A store with one batch of 40 MiB."""
    samples = make_samples([2000, 2500], hidden_size=2048)
    with make_store(tmp_path_factory.mktemp("stores") / "big", samples, chunk_rows=256) as store:
        yield store


def view_of(store) -> BatchView:
    return BatchView(store, plan_of(store, PlanParameters(max_seq_len=4500, split="all")), 0, 0)


def response(pieces, n_bytes, ends, *, slots=None, stall_seconds=5.0):
    return MapResponse(
        pieces,
        n_bytes=n_bytes,
        headers={},
        slots=slots or Slots(1, 0.05),
        busy=lambda: Response(status_code=503),
        stall_seconds=stall_seconds,
        finished=lambda n, end: ends.append((n, end)),
    )


async def never_disconnects():
    await asyncio.sleep(3600)


async def play(answer, send, receive=never_disconnects):
    await answer({"type": "http", "path": "/x", "method": "GET"}, receive, send)


def test_pieces_are_the_maps_themselves(big):
    view = view_of(big)
    pieces = list(cut(view.pieces()))
    assert max(map(len, pieces)) == PIECE_BYTES
    assert sum(map(len, pieces)) == view.n_bytes
    mapped = [p for p in pieces if isinstance(p.obj, mmap.mmap)]
    assert sum(map(len, mapped)) / view.n_bytes > 0.99


def test_a_batch_is_never_assembled(big):
    """Sending 40 MiB may allocate at most a hundredth of that in Python."""
    view, sent, ends = view_of(big), 0, []

    async def send(message):
        nonlocal sent
        sent += len(message.get("body", b""))

    tracemalloc.start()
    try:
        asyncio.run(play(response(view.pieces(), view.n_bytes, ends), send))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert sent == view.n_bytes > 30 << 20
    assert ends == [(view.n_bytes, "complete")]
    assert peak < view.n_bytes / 100


def test_a_truncated_file_is_an_error_before_the_first_byte(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"x" * (1 << 20))
    with open(path, "rb") as file:
        view = memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
    prefault(view)
    os.truncate(path, 8192)
    with pytest.raises(DamagedError, match="shorter"):
        response([view[8000:]], 1, [])


def test_an_older_kernel_reads_ahead_without_an_error(tmp_path, monkeypatch):
    """MADV_POPULATE_READ is EINVAL before Linux 5.14; the bytes must still flow."""
    monkeypatch.setattr("hsstore.prefault.MADV_POPULATE_READ", 12345)
    path = tmp_path / "file"
    path.write_bytes(b"x" * 100_000)
    with open(path, "rb") as file:
        prefault(memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))[1:99_999])
    prefault(memoryview(b""))


def test_a_file_truncated_on_the_way_ends_the_body_early(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(streaming, "WINDOW_BYTES", 1 << 16)
    path = tmp_path / "file"
    path.write_bytes(b"x" * (1 << 20))
    with open(path, "rb") as file:
        view = memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
    pieces = (view[i : i + 65536] for i in range(0, len(view), 65536))
    messages, ends = [], []

    async def send(message):
        messages.append(message)
        if len(messages) == 3:
            os.truncate(path, 0)

    asyncio.run(play(response(pieces, len(view), ends), send))
    [(n, end)] = ends
    assert end == "damaged"
    assert n < len(view)
    assert messages[-1]["more_body"], "the body must not look complete"
    assert "closed after" in caplog.text


def test_a_client_that_left_stops_the_reading(big):
    view, ends = view_of(big), []

    async def left():
        return {"type": "http.disconnect"}

    async def send(message):
        await asyncio.sleep(0)

    asyncio.run(play(response(view.pieces(), view.n_bytes, ends), send, left))
    [(n, end)] = ends
    assert end == "client_left"
    assert n < view.n_bytes


def test_a_client_that_stops_reading_loses_its_slot():
    ends, slots = [], Slots(1, 0.05)

    async def send(message):
        if message["type"] == "http.response.body":
            await asyncio.sleep(3600)

    asyncio.run(play(response([memoryview(b"abc")], 3, ends, slots=slots, stall_seconds=0.05), send))
    assert ends == [(0, "stalled")]
    assert slots.in_use == 0


def test_a_cancelled_body_gives_its_slot_back():
    ends, slots = [], Slots(1, 0.05)

    async def scenario():
        async def send(message):
            if message["type"] == "http.response.body":
                await asyncio.sleep(3600)

        task = asyncio.create_task(play(response([memoryview(b"abc")], 3, ends, slots=slots), send))
        await asyncio.sleep(0.05)
        task.cancel()
        await task

    asyncio.run(scenario())
    assert ends == [(0, "cancelled")]
    assert slots.in_use == 0


def test_more_bodies_than_slots_wait_and_then_are_told_to_come_back():
    ends, statuses, slots = [], [], Slots(1, 0.05)

    async def scenario():
        release = asyncio.Event()

        async def slow(message):
            if message["type"] == "http.response.body":
                await release.wait()

        async def quick(message):
            if message["type"] == "http.response.start":
                statuses.append(message["status"])

        first = asyncio.create_task(play(response([memoryview(b"a")], 1, ends, slots=slots), slow))
        await asyncio.sleep(0.01)
        await play(response([memoryview(b"b")], 1, ends, slots=slots), quick)
        release.set()
        await first
        await play(response([memoryview(b"c")], 1, ends, slots=slots), quick)

    asyncio.run(scenario())
    assert statuses == [503, 200]
    assert ends == [(1, "complete"), (1, "complete")]
