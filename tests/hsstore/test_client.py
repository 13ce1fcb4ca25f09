"""The HTTP client against a scripted server: bounded retries, whole bodies only, errors that keep their kind."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from hsstore import errors
from hsstore.client import Patience, ServiceClient
from hsstore.errors import HsstoreError, NotFoundError, ServiceError, UnauthorizedError, UsageError

QUICK = Patience(
    attempts=3,
    total_seconds=240,
    first_wait_seconds=0.01,
    longest_wait_seconds=0.02,
    connect_seconds=120,
    read_seconds=120,
)
TOKEN = "s3cret-token"
CLASSES = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, HsstoreError)]


class Handler(BaseHTTPRequestHandler):
    """Runs the next step of the server's script for each request; the last step repeats."""

    protocol_version = "HTTP/1.1"
    server: Scripted

    def do_GET(self) -> None:
        script = self.server.script
        self.server.seen.append((self.path, dict(self.headers), threading.get_native_id()))
        (script.pop(0) if len(script) > 1 else script[0])(self)

    do_POST = do_GET

    def log_message(self, *_: object) -> None:
        pass


class Scripted(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, script: list[Callable[[Handler], None]]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.script = script
        self.seen: list[tuple[str, dict[str, str], int]] = []
        self.closed = threading.Semaphore(0)
        """Released for every connection that the server has closed."""

    def shutdown_request(self, request: Any) -> None:
        super().shutdown_request(request)
        self.closed.release()

    def handle_error(self, *_: object) -> None:
        """A client that hangs up is part of the plan."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


@contextmanager
def scripted(*script: Callable[[Handler], None]) -> Iterator[Scripted]:
    with Scripted(list(script)) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def answer(status: int = 200, body: bytes = b"[1,2]", length: int | None = None, **headers: str):
    def step(handler: Handler) -> None:
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(body) if length is None else length))
        for name, value in headers.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(body)
        if length is not None:
            handler.close_connection = True

    return step


def problem(class_: type[HsstoreError], status: int | None = None):
    document = {"type": "x", "title": "x", "status": class_.http_status, "detail": "what is wrong", "kind": class_.kind}
    return answer(status or class_.http_status, json.dumps({**document, "hint": "what helps"}).encode())


def hang_up(handler: Handler) -> None:
    handler.connection.shutdown(socket.SHUT_RDWR)
    handler.close_connection = True


def silent(handler: Handler) -> None:
    handler.connection.recv(1)  # until the client hangs up
    handler.close_connection = True


@contextmanager
def client_of(server: Scripted, **options: object) -> Iterator[ServiceClient]:
    client = ServiceClient(server.url, **{"patience": QUICK, "token": TOKEN, **options})
    try:
        yield client
    finally:
        client.close()


@pytest.mark.parametrize(
    "trouble",
    [
        hang_up,
        silent,
        answer(502, b"<html>"),
        answer(503, b""),
        answer(504),
        problem(ServiceError, 503),
        answer(200, b"[1", length=5),
    ],
    ids=["hang up", "silence", "502", "503", "504", "busy problem", "short body"],
)
def test_what_may_pass_is_tried_again(trouble, caplog):
    patience = dataclasses.replace(QUICK, read_seconds=2) if trouble is silent else QUICK
    with scripted(trouble, trouble, answer()) as server, client_of(server, patience=patience) as client:
        assert client.get("/x", list[int]) == [1, 2]
        assert len(server.seen) == 3
    assert "attempt 2 of 3" in caplog.text, "nobody should have to wonder why nothing happens"
    assert TOKEN not in caplog.text


@pytest.mark.parametrize("trouble", [hang_up, answer(503, b""), answer(200, b"short", length=999)])
def test_what_does_not_pass_ends_as_a_service_error(trouble):
    with scripted(trouble) as server, client_of(server) as client:
        with pytest.raises(ServiceError, match="tried 3 times") as caught:
            client.read("/x")
        assert type(caught.value) is ServiceError
        assert len(server.seen) == 3


def test_nobody_there_is_a_service_error_within_the_patience():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(ServiceError, match=r"refused.*tried 3 times|tried 3 times.*refused"):
        ServiceClient(f"http://127.0.0.1:{port}", patience=QUICK).read("/x")


def test_retry_after_is_honoured():
    with scripted(answer(503, b"", Retry_After="1"), answer()) as server, client_of(server) as client:
        started = time.monotonic()
        client.get("/x", list[int])
        assert time.monotonic() - started >= 1


@pytest.mark.parametrize("class_", CLASSES, ids=lambda c: c.kind)
def test_a_problem_becomes_the_error_that_was_raised(class_):
    with scripted(problem(class_)) as server, client_of(server) as client:
        with pytest.raises(class_, match="what is wrong") as caught:
            client.get("/x", list[int])
        if class_ is not ServiceError:  # which may pass, and was tried three times
            assert type(caught.value) is class_
            assert caught.value.hint == "what helps"
            assert len(server.seen) == 1, "an answer that will not change is not asked for again"


def test_a_kind_of_a_later_version_is_a_service_error():
    document = {"type": "x", "title": "x", "status": 418, "detail": "tea", "kind": "teapot"}
    step = answer(418, json.dumps(document).encode())
    with scripted(step) as server, client_of(server) as client, pytest.raises(ServiceError, match="tea"):
        client.get("/x", list[int])


@pytest.mark.parametrize("status", [301, 400, 404, 500])
def test_an_answer_of_something_else_is_a_service_error(status):
    with scripted(answer(status, b"<html>", Location="/y")) as server, client_of(server) as client:
        with pytest.raises(ServiceError, match=f"answered {status}"):
            client.get("/x", list[int])
        assert [path for path, *_ in server.seen] == ["/x"], "no redirect is followed: it would carry the token along"


def test_json_of_another_shape_is_a_service_error():
    wrong = pytest.raises(ServiceError, match="did not answer with a list")
    with scripted(answer(200, b'{"a":1}')) as server, client_of(server) as client, wrong:
        client.get("/x", list[int])


def test_a_body_goes_into_the_given_buffer():
    body = os.urandom(3 << 20)
    with scripted(answer(200, body)) as server, client_of(server) as client:
        buffer = bytearray(4 << 20)
        view = client.read("/x", buffer)
        assert view.obj is buffer
        assert bytes(view) == body
        small = bytearray(10)
        assert bytes(client.read("/x", small)) == body
        assert small == bytearray(10)
        assert len({thread for *_, thread in server.seen}) == 1, "the connection is kept"


def test_an_idle_connection_closed_by_the_service_costs_no_retry(caplog):
    def last_word(handler: Handler) -> None:
        answer()(handler)
        handler.close_connection = True  # without saying so in a header

    with scripted(last_word) as server, client_of(server) as client:
        for _ in range(3):
            assert client.get("/x", list[int]) == [1, 2]
            assert server.closed.acquire(timeout=240)
        assert len({thread for *_, thread in server.seen}) == 3
    assert "attempt" not in caplog.text


def test_a_body_that_was_left_unread_is_never_the_next_answer():
    def unread(handler: Handler) -> None:
        answer(200, b"[3,4]")(handler)

    with scripted(unread, answer()) as server, client_of(server) as client:
        with pytest.raises(KeyError), client._exchange("GET", "/x", None):
            raise KeyError
        assert client.get("/x", list[int]) == [1, 2]


def test_the_token_travels_in_its_header_and_nowhere_else():
    with scripted(answer(401, b""), hang_up) as server, client_of(server) as client:
        with pytest.raises(UnauthorizedError) as refused:
            client.get("/x", list[int])
        with pytest.raises(ServiceError) as failed:
            client.get("/x", list[int])
        assert server.seen[0][1]["Authorization"] == f"Bearer {TOKEN}"
        assert TOKEN not in f"{refused.value!r} {failed.value!r} {client!r}"


@pytest.mark.parametrize("url", ["ftp://x", "http://", "x", "http://u:p@x", "http://x?a=b", "http://x:port"])
def test_a_url_that_is_none_is_refused(url):
    with pytest.raises(UsageError):
        ServiceClient(url)


def test_each_thread_and_process_has_its_own_connection():
    with scripted(answer()) as server, client_of(server) as client:
        client.get("/x", list[int])
        thread = threading.Thread(target=lambda: (client.get("/x", list[int]), client.close()))
        thread.start()
        thread.join()
        pid = os.fork()
        if pid == 0:
            os._exit(0 if client.get("/x", list[int]) == [1, 2] else 1)
        assert os.waitpid(pid, 0)[1] == 0
        assert client.get("/x", list[int]) == [1, 2]
        connections = [thread for *_, thread in server.seen]
        assert connections[0] == connections[3]
        assert len(set(connections)) == 3


def test_it_survives_pickling():
    with scripted(answer()) as server, client_of(server) as client:
        client.get("/x", list[int])
        copy = pickle.loads(pickle.dumps(client))  # noqa: S301 our own bytes
        assert copy.get("/x", list[int]) == [1, 2]
        copy.close()
        assert server.seen[1][1]["Authorization"] == f"Bearer {TOKEN}"


def test_not_found_is_a_file_not_found_error_too():
    with scripted(problem(NotFoundError)) as server, client_of(server) as client, pytest.raises(FileNotFoundError):
        client.get("/x", list[int])
