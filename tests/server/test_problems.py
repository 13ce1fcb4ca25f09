"""Every error is RFC 9457 with a kind of the error tree, and none of them tells more than it should."""

from __future__ import annotations

import pytest
from starlette.testclient import TestClient

from hsstore import errors
from hsstore.errors import HsstoreError
from server.app import create_app
from server.settings import Settings
from tests.server.live import fetch

CLASSES = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, HsstoreError)]


@pytest.fixture(scope="module")
def failing(store):
    """An app with one more path, which raises what the test asks for."""
    app = create_app(Settings(stores=(store.root,)))
    raised: list[Exception] = []

    @app.get("/raise")
    def fail() -> None:
        raise raised.pop()

    with TestClient(app, raise_server_exceptions=False) as client:
        yield client, raised


@pytest.mark.parametrize("class_", CLASSES, ids=lambda c: c.kind)
def test_every_class_of_the_tree_has_its_kind_and_status(failing, class_):
    client, raised = failing
    raised.append(class_("expected a, found b", hint="do c"))
    answer = client.get("/raise")
    assert answer.status_code == class_.http_status
    assert answer.headers["content-type"] == "application/problem+json"
    problem = answer.json()
    assert problem["kind"] == class_.kind
    assert problem["type"] == f"urn:hsstore:problem:{class_.kind}"
    assert (problem["status"], problem["detail"], problem["hint"]) == (
        class_.http_status,
        "expected a, found b",
        "do c",
    )
    assert problem["instance"] == "/raise"


def test_an_unexpected_error_keeps_its_words_to_the_log(failing):
    client, raised = failing
    raised.append(RuntimeError("/home/somebody/secret"))
    answer = client.get("/raise")
    assert (answer.status_code, answer.json()["kind"]) == (500, "error")
    assert answer.headers["content-type"] == "application/problem+json"
    assert "secret" not in answer.text
    assert "Traceback" not in answer.text


@pytest.mark.parametrize(
    ("method", "path", "status", "kind"),
    [
        ("GET", "/", 404, "not_found"),
        ("GET", "/v1/stores/", 404, "not_found"),
        ("GET", "/docs", 404, "not_found"),
        ("DELETE", "/v1/stores", 405, "usage"),
        ("PUT", "/v1/plans", 405, "usage"),
        ("GET", "/v1/stores/tiny/token_counts?split=x", 422, "usage"),
    ],
)
def test_the_router_s_own_errors_are_problems(live, method, path, status, kind):
    answer = fetch(method, live.url + path)
    assert (answer.status, answer.json()["kind"]) == (status, kind)
    assert answer.headers["Content-Type"] == "application/problem+json"
    if status == 405:
        assert answer.headers["Allow"]


def test_a_body_that_is_no_json_is_a_problem(live):
    for body in (b"{", b"\xff\xfe", b"", b"[" * 60_000, b"1" * 6000):
        answer = fetch("POST", f"{live.url}/v1/plans", Content_Type="application/json", body_bytes=body)
        assert (answer.status, answer.json()["kind"]) == (422, "usage")


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("DELETE", "/v1/plans/x/epochs/0/batches/0", "GET, HEAD"),
        ("GET", "/v1/plans", "POST"),
        ("PUT", "/health", "GET"),
    ],
)
def test_a_wrong_method_is_told_every_right_one(live, method, path, allowed):
    answer = fetch(method, live.url + path)
    assert (answer.status, answer.headers["Allow"]) == (405, allowed)


def test_the_instance_is_a_uri_reference(live):
    answer = fetch("GET", f"{live.url}/v1/stores/a%20b%0A%3Fc%C3%A9")
    assert answer.json()["instance"] == "/v1/stores/a%20b%0A%3Fc%C3%A9"
    answer = fetch("GET", f"{live.url}/none%20%22%0A")
    assert answer.json()["detail"] == "GET /none%20%22%0A: Not Found"
