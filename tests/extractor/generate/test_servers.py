"""Running servers as a source: both roads, and every way in which a server can let one down."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from extractor.chat import ChatTokenizer
from extractor.generate import loop
from extractor.generate.run import generate
from extractor.generate.settings import Settings
from extractor.generate.sources import connection, servers
from hsstore.errors import ConflictError, IncompleteError, UsageError
from tests.extractor.tiny import conversations, write_jsonl

N_LINES = 30


class FakeServer(ThreadingHTTPServer):
    """SGLang's roads or vLLM's; answers with how many messages or tokens it was shown."""

    daemon_threads = True

    def __init__(self, kind: str, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.kind, self.model = kind, "/models/tiny-llama"
        self.bodies: list[dict[str, Any]] = []
        self.headers_seen: list[str | None] = []
        self.bad: dict[int, tuple[int, str]] = {}
        """Request number → (status, body) instead of an answer; −1 = the connection is dropped."""
        self.silent = threading.Event()
        """Set: it takes requests, and says nothing until `stop`."""
        self.ended = threading.Event()
        self.lock = threading.Lock()
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def stop(self) -> None:
        self.ended.set()
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: FakeServer

    def do_GET(self) -> None:
        sglang = {"model_path": self.server.model, "version": "0.5.23", "max_req_input_len": 500, "dtype": "bfloat16"}
        models = {"data": [{"id": "tiny-llama", "max_model_len": 500, "root": self.server.model}]}
        roads = {"sglang": {"/server_info": sglang}, "openai": {"/v1/models": models, "/version": {"version": "0.9"}}}
        document = roads[self.server.kind].get(self.path)
        self._send(*((200, document) if document else (404, {"detail": "Not Found"})))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            number = len(self.server.bodies)
            self.server.bodies.append(body)
            self.server.headers_seen.append(self.headers["Authorization"])
        if self.server.silent.is_set():
            self.server.ended.wait()
        status, text = self.server.bad.get(number, (200, ""))
        if status == -1:
            self.connection.close()
        elif text or status != 200:
            self._send(status, text)
        else:
            self._send(200, self._answer(body))

    def _answer(self, body: dict[str, Any]) -> dict[str, Any]:
        if self.path == "/generate":
            n = len(body["input_ids"])
            meta = {"finish_reason": {"type": "stop", "matched": 257}, "prompt_tokens": n, "completion_tokens": 3}
            return {"text": f"n={n}", "output_ids": [79, 28, 257], "meta_info": meta}
        message = {"role": "assistant", "content": f"m={len(body['messages'])}", "reasoning_content": "hm"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return {"choices": [choice], "usage": {"prompt_tokens": 25, "completion_tokens": 4}}

    def _send(self, status: int, document: Any) -> None:
        data = document.encode() if isinstance(document, str) else json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "wait_seconds", lambda _n: 0.05)


@pytest.fixture
def sglang() -> Iterator[FakeServer]:
    server = FakeServer("sglang")
    yield server
    server.stop()


@pytest.fixture
def openai() -> Iterator[FakeServer]:
    server = FakeServer("openai")
    yield server
    server.stop()


def settings(tmp_path: Path, model: Path, *urls: str, **options: Any) -> Settings:
    prompts = write_jsonl(tmp_path / "in.jsonl", conversations(N_LINES))
    return Settings(
        model=str(model),
        prompts=prompts,
        out=tmp_path / "out.jsonl",
        urls=urls,
        **{"server_wait_seconds": 5.0} | options,
    )


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_sglang_is_asked_by_ids(tmp_path: Path, tiny_model: Path, sglang: FakeServer) -> None:
    """The tokens are those of the verifier's own template, and every parameter is sent."""
    asked = settings(tmp_path, tiny_model, sglang.url, temperature=0.5, top_k=9, max_new_tokens=70, seed=4)
    outcome = generate(asked)
    assert (outcome.written, outcome.failed, outcome.skipped) == (N_LINES, 0, 0)
    found = rows(asked.out)
    assert [row["generate"]["line"] for row in found] == list(range(1, N_LINES + 1))
    assert len({body["sampling_params"]["sampling_seed"] for body in sglang.bodies}) == N_LINES
    params = sglang.bodies[0]["sampling_params"]
    assert (params["temperature"], params["top_k"], params["max_new_tokens"]) == (0.5, 9, 70)
    assert params["repetition_penalty"] == 1.0
    meta = json.loads(asked.meta.read_text())
    assert (meta["runs"][0]["engine"], meta["runs"][0]["version"]) == ("sglang", "0.5.23")
    assert meta["runs"][0]["context_tokens"] == 500
    assert meta["status"] == "complete"
    assert meta["model"]["weights_sha256"] == ""  # nobody knows what the server has loaded


def test_openai_is_asked_by_messages(
    tmp_path: Path, tiny_model: Path, openai: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HSSTORE_TOKEN", "secret")
    asked = settings(tmp_path, tiny_model, f"{openai.url}/v1/", template_arguments={"enable_thinking": True})
    assert generate(asked).written == N_LINES
    body = openai.bodies[0]
    assert body["model"] == "tiny-llama"
    assert body["chat_template_kwargs"] == {"enable_thinking": True}
    assert (body["top_k"], body["seed"] >= 0, body["max_tokens"]) == (-1, True, 475)
    assert set(openai.headers_seen) == {"Bearer secret"}
    answer = rows(asked.out)[0]["messages"][-1]
    assert answer == {"role": "assistant", "content": "m=1", "reasoning_content": "hm"}
    assert "secret" not in asked.meta.read_text()


def test_answers_are_spread_over_servers(tmp_path: Path, tiny_model: Path, sglang: FakeServer) -> None:
    other = FakeServer("sglang")
    assert generate(settings(tmp_path, tiny_model, sglang.url, other.url, in_flight=4)).written == N_LINES
    assert len(sglang.bodies) + len(other.bodies) == N_LINES
    assert min(len(sglang.bodies), len(other.bodies)) > 0
    other.stop()


def test_a_server_that_is_away_loses_nothing(tmp_path: Path, tiny_model: Path, sglang: FakeServer) -> None:
    """Nobody there, busy, a proxy's 502, connections lost in the middle: the same answers, somewhere, later."""
    gone = FakeServer("sglang")
    gone.stop()
    sglang.bad = {2: (503, "loading"), 5: (-1, ""), 6: (429, "busy"), 9: (502, "bad gateway")}
    assert generate(settings(tmp_path, tiny_model, gone.url, sglang.url)).written == N_LINES
    assert len(sglang.bodies) == N_LINES + 4


def test_refused_and_broken_answers_fail_their_own_line(tmp_path: Path, tiny_model: Path, sglang: FakeServer) -> None:
    """A resume then tries just these again."""
    abort = {"meta_info": {"finish_reason": {"type": "abort", "message": "out of memory"}}, "text": ""}
    sglang.bad = {3: (400, '{"error": "no"}'), 7: (200, json.dumps(abort)), 11: (500, "boom"), 13: (200, "no json")}
    asked = settings(tmp_path, tiny_model, sglang.url, in_flight=1)
    outcome = generate(asked)
    assert (outcome.written, outcome.failed) == (N_LINES - 2, 2)
    assert Counter(row["reason"] for row in rows(asked.failures)) == {"refused": 1, "engine_error": 1}
    assert len(sglang.bodies) == N_LINES + 2  # a 500 and an answer that is none are worth another try
    again = generate(settings(tmp_path, tiny_model, sglang.url, resume=True))
    assert (again.written, again.failed) == (N_LINES, 0)
    assert len(sglang.bodies) == N_LINES + 4
    assert not asked.failures.exists()
    assert [row["generate"]["line"] for row in rows(asked.out)] == list(range(1, N_LINES + 1))


def test_without_any_server_the_run_ends_resumable(tmp_path: Path, tiny_model: Path, sglang: FakeServer) -> None:
    """They died for good: what was answered is kept, and no line is to blame."""
    asked = settings(tmp_path, tiny_model, sglang.url, server_wait_seconds=0.3, in_flight=2, max_consecutive_errors=2)
    sglang.bad = dict.fromkeys(range(10, 10000), (503, "gone"))
    with pytest.raises(IncompleteError):
        generate(asked)
    assert not asked.out.exists()
    assert asked.part.read_bytes().count(b"\n") == 10
    assert not asked.failures.exists() or not asked.failures.read_text()
    sglang.bad = {}
    assert generate(settings(tmp_path, tiny_model, sglang.url, resume=True)).written == N_LINES


def test_servers_of_two_models_are_refused(tmp_path: Path, tiny_model: Path, sglang: FakeServer) -> None:
    other = FakeServer("sglang")
    other.model = "/models/another"
    with pytest.raises(UsageError, match="different models: another, tiny-llama"):
        generate(settings(tmp_path, tiny_model, sglang.url, other.url))
    other.stop()


def test_what_is_no_server_of_models_is_named(tmp_path: Path, tiny_model: Path, openai: FakeServer) -> None:
    with pytest.raises(UsageError, match="no server of --api sglang"):
        generate(settings(tmp_path, tiny_model, openai.url, api="sglang"))
    with pytest.raises(UsageError, match="serves tiny-llama, not other"):
        generate(settings(tmp_path, tiny_model, openai.url, served_model="other"))
    assert not (tmp_path / "out.jsonl.part").exists()


def test_another_template_of_the_server_is_said(
    tmp_path: Path, tiny_model: Path, openai: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    """The extraction would see other prompts than the server answered."""
    generate(settings(tmp_path, tiny_model, openai.url))
    assert "its tokenizer or chat template is another one" in capsys.readouterr().err


@pytest.mark.parametrize(
    "url", ["ftp://host", "host:1", "http://", "http://u:p@host", "http://host:port", "http://host/?x=1"]
)
def test_addresses_that_are_none(url: str) -> None:
    with pytest.raises(UsageError):
        connection.checked(url)


def test_thoughts_in_the_end(byte_chat: ChatTokenizer) -> None:
    """What a stop string ends has no end token to compare."""
    from extractor.generate.settings import Sampling
    from extractor.generate.sources.base import Ask
    from extractor.generate.sources.requests import sglang_reply

    sampling = Sampling(temperature=1, top_p=1, top_k=0, max_new_tokens=9, seed=0, stop=("END",))
    ask = Ask(line=1, turn=0, messages=(), prompt_ids=(1,), max_new_tokens=9, seed=1)
    meta = {"finish_reason": {"type": "stop", "matched": "END"}, "prompt_tokens": 1, "completion_tokens": 4}
    reply = sglang_reply(ask, {"text": "yes END", "output_ids": [1], "meta_info": meta}, sampling, (257,), byte_chat)
    assert (reply.text, reply.ids, reply.completion_tokens) == ("yes ", None, 4)


def test_a_silent_server_holds_nobody_up(tmp_path: Path, tiny_model: Path, sglang: FakeServer) -> None:
    """It takes requests and never answers: they go to the other one, and no line is lost on the way."""
    mute = FakeServer("sglang")
    mute.silent.set()
    asked = settings(tmp_path, tiny_model, mute.url, sglang.url, answer_seconds=1.0, in_flight=2)
    assert generate(asked).written == N_LINES
    assert mute.bodies
    mute.stop()


def test_a_busy_server_is_waited_for_once(tmp_path: Path, tiny_model: Path, sglang: FakeServer) -> None:
    """It says what it is and answers nothing: when patience is at its end the run ends, and waits no second time."""
    sglang.bad = dict.fromkeys(range(10000), (503, "busy"))
    pauses: list[int] = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(loop, "wait_seconds", lambda n: pauses.append(n) or 0.0)
        with pytest.raises(IncompleteError, match="no server answers") as caught:
            generate(settings(tmp_path, tiny_model, sglang.url, server_wait_seconds=0.3))
    assert not pauses
    assert "every answer so far is kept" in str(caught.value.hint)


def test_a_server_of_another_model_does_not_resume(tmp_path: Path, tiny_model: Path, sglang: FakeServer) -> None:
    """Its answers would stand beside those of the first."""
    sglang.bad = dict.fromkeys(range(10, 10000), (503, "gone"))
    with pytest.raises(IncompleteError):
        generate(settings(tmp_path, tiny_model, sglang.url, in_flight=2, server_wait_seconds=0.3))
    sglang.bad, sglang.model = {}, "/models/another"
    with pytest.raises(ConflictError, match="tiny-llama → another"):
        generate(settings(tmp_path, tiny_model, sglang.url, resume=True))
    sglang.model = "/elsewhere/tiny-llama"
    assert generate(settings(tmp_path, tiny_model, sglang.url, resume=True)).written == N_LINES


def test_a_server_that_comes_back_as_another_ends_the_run(
    tmp_path: Path, tiny_model: Path, sglang: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = connection.Server.request

    def request(self: connection.Server, method: str, path: str, body: Any, seconds: float) -> dict[str, Any]:
        if len(sglang.bodies) >= 5:
            sglang.model = "/models/another"
        return real(self, method, path, body, seconds)

    monkeypatch.setattr(connection.Server, "request", request)
    sglang.bad = {5: (503, "restarting")}
    with pytest.raises(UsageError, match="serves another now"):
        generate(settings(tmp_path, tiny_model, sglang.url, in_flight=1))
