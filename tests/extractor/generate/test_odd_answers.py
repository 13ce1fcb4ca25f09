"""Answers that no server should give: each costs its own line, never the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from extractor.generate.run import generate
from extractor.generate.sources import connection
from hsstore.errors import UsageError
from tests.extractor.generate.test_servers import N_LINES, FakeServer, rows, settings, short_pauses

__all__ = ["short_pauses"]  # a fixture of every test here


def sglang(ids: Any = (79, 257), reason: Any = None, text: Any = "yes", **meta: Any) -> str:
    reason = {"type": "stop", "matched": 257} if reason is None else reason
    usage = {"prompt_tokens": 3, "completion_tokens": 2}
    return json.dumps({"text": text, "output_ids": ids, "meta_info": {"finish_reason": reason, **usage, **meta}})


def openai(content: Any = "yes", **choice: Any) -> str:
    choice = {"message": {"role": "assistant", "content": content}, "finish_reason": "stop"} | choice
    return json.dumps({"choices": [choice], "usage": {"prompt_tokens": 3, "completion_tokens": 2}})


ODD_SGLANG = {
    "negative id": sglang([-1]),
    "endless id": sglang([1 << 70]),
    "nested ids": sglang([[79]]),
    "fractional id": sglang([1.5]),
    "null id": sglang([None]),
    "no list of ids": sglang({"a": 1}),
    "half a surrogate": sglang(None, text="\ud800"),
    "other half of one": sglang(None, text="x\udc00y"),
    "number for a text": sglang(None, text=5),
    "list for a reason": sglang(reason=["stop"]),
    "negative count": sglang(completion_tokens=-3),
    "endless count": sglang(prompt_tokens=1 << 70),
    "no meta": json.dumps({"text": "x"}),
    "a list": "[1]",
    "depth": "[" * 100_000,
}
ODD_OPENAI = {
    "half a surrogate": openai("\ud800"),
    "no text": openai(["yes"]),
    "null message": openai(message=None),
    "list for a reason": openai(finish_reason=["stop"]),
    "no choices": json.dumps({"choices": []}),
    "number for choices": json.dumps({"choices": 5}),
    "text for usage": json.dumps(json.loads(openai()) | {"usage": "much"}),
}


@pytest.mark.parametrize(("kind", "odd"), [("sglang", ODD_SGLANG), ("openai", ODD_OPENAI)])
def test_an_odd_answer_fails_its_own_line(tmp_path: Path, tiny_model: Path, kind: str, odd: dict[str, str]) -> None:
    """Asked again as often as for any other error; all lines beside them are answered."""
    server = FakeServer(kind)
    answers = list(odd.values())
    server.bad = {3 * i + n: (200, answers[i]) for i in range(len(answers)) for n in range(3)}
    asked = settings(tmp_path, tiny_model, server.url, in_flight=1, max_consecutive_errors=100)
    outcome = generate(asked)
    server.stop()
    assert (outcome.written, outcome.failed) == (N_LINES - len(odd), len(odd))
    assert {row["reason"] for row in rows(asked.failures)} == {"engine_error"}


def test_a_reason_may_be_a_word(tmp_path: Path, tiny_model: Path) -> None:
    """Old servers give the reason itself where newer ones give an object."""
    server = FakeServer("sglang")
    server.bad = {0: (200, sglang(reason="stop")), 1: (200, sglang(None, reason="length"))}
    assert generate(settings(tmp_path, tiny_model, server.url)).written == N_LINES
    server.stop()


@pytest.fixture
def roads(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a server says by GET."""
    found: dict[str, Any] = {}

    def request(_self: connection.Server, _method: str, path: str, *_: Any) -> Any:
        if path not in found:
            raise connection.RefusedError("HTTP 404")
        return found[path]

    monkeypatch.setattr(connection.Server, "request", request)
    return found


@pytest.mark.parametrize(
    "models", [{"data": 5}, {"data": "x"}, {"data": None}, {"data": {"id": "x"}}, {"data": [5, {"id": 5}]}, {}]
)
def test_what_lists_no_models_is_no_server(roads: dict[str, Any], models: Any) -> None:
    roads["/v1/models"] = models
    with pytest.raises(UsageError, match="is no server of --api auto"):
        connection.Server("http://host", "").probe("auto", "")


@pytest.mark.parametrize(
    "url",
    [
        "http://a b",
        "http://host/a b",
        f"http://{'a' * 70}",
        "http://xn--\ud7ff",
        "http://a..b",
        "http://host/\udcff",
        "http://host/ä",
        "http://host\n/",
        "http://[::1",
        "",
    ],
)
def test_addresses_that_no_socket_takes(url: str) -> None:
    with pytest.raises(UsageError) as caught:
        connection.checked(url)
    caught.value.message.encode()
