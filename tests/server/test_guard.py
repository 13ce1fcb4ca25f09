"""Nothing of a request is read before its token is checked, and never more than 64 KiB of it."""

from __future__ import annotations

import asyncio
import http.client

import pytest

from server.app import create_app
from server.guard import MAX_BODY_BYTES
from server.settings import Settings
from tests.server.live import fetch, serving

TOKEN = "s3cret-token"
BEARER = f"Bearer {TOKEN}"


@pytest.fixture(scope="module")
def guarded(store):
    with serving(store.root, token=TOKEN) as live:
        yield live


def chunked(port: int, n_chunks: int, **headers: str) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    chunks = (b" " * 4096 for _ in range(n_chunks))
    connection.request(
        "POST", "/v1/plans", chunks, {"Content-Type": "application/json", **headers}, encode_chunked=True
    )
    response = connection.getresponse()
    response.read()
    connection.close()
    return response


@pytest.mark.parametrize("body", [b"{", b"\xff", b" " * 4_000_000], ids=["bad", "binary", "large"])
def test_the_token_is_asked_for_before_the_body(guarded, body):
    answer = fetch("POST", f"{guarded.url}/v1/plans", body_bytes=body, Content_Type="application/json")
    assert (answer.status, answer.json()["kind"]) == (401, "unauthorized")
    assert answer.headers["WWW-Authenticate"] == "Bearer"


@pytest.mark.parametrize("path", ["/v1/plans", "/health", "/none"])
def test_a_large_body_is_refused_by_its_length(guarded, path):
    body = b" " * (MAX_BODY_BYTES + 1)
    answer = fetch("POST", guarded.url + path, body_bytes=body, Authorization=BEARER)
    assert (answer.status, answer.json()["kind"]) == (413, "usage")
    assert answer.headers["Content-Type"] == "application/problem+json"


def test_a_large_body_without_a_length_is_refused_as_it_comes(guarded):
    assert chunked(guarded.port, 2000, Authorization=BEARER).status == 413
    assert chunked(guarded.port, 2000).status == 401


def test_a_body_up_to_the_bound_is_read(guarded):
    body = b"{}".ljust(MAX_BODY_BYTES)
    answer = fetch(
        "POST", f"{guarded.url}/v1/plans", body_bytes=body, Authorization=BEARER, Content_Type="application/json"
    )
    assert answer.status in (200, 201)


@pytest.mark.parametrize("authorization", [None, BEARER])
def test_no_more_is_read_than_the_bound(store, authorization):
    app = create_app(Settings(stores=(store.root,), token=TOKEN))
    read: list[int] = []
    sent: list[dict[str, object]] = []

    async def receive() -> dict[str, object]:
        read.append(1)
        return {"type": "http.request", "body": b" " * 16384, "more_body": True}

    async def send(message: dict[str, object]) -> None:
        sent.append(message)

    headers = [(b"transfer-encoding", b"chunked"), (b"content-type", b"application/json")]
    if authorization:
        headers.append((b"authorization", authorization.encode()))
    scope = {"type": "http", "method": "POST", "path": "/v1/plans", "query_string": b"", "headers": headers}
    asyncio.run(app(scope, receive, send))
    assert sent[0]["status"] == (413 if authorization else 401)
    assert len(read) == (5 if authorization else 0)
    app.state.service.close()


def test_a_refused_request_is_counted_and_the_document_names_the_scheme(guarded):
    fetch("POST", f"{guarded.url}/v1/plans", body={})
    text = fetch("GET", f"{guarded.url}/metrics", Authorization=BEARER).body.decode()
    assert 'hsstore_http_requests_total{method="POST",route="none",status="401"}' in text
    document = fetch("GET", f"{guarded.url}/openapi.json").json()
    assert document["paths"]["/v1/plans"]["post"]["security"] == [{"HTTPBearer": []}]
    assert "security" not in document["paths"]["/health"]["get"]
