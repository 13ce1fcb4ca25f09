"""What answers at a URL, when it is not what was meant; requests that are refused, and servers that are gone."""

from __future__ import annotations

import datetime
import json
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import msgspec
import numpy as np
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from extractor.engines import http, http_client
from extractor.engines.base import Job
from extractor.engines.http import HttpEngine, parse_options
from extractor.engines.http_client import Refused, VerifierClient
from extractor.engines.http_fetch import TornRowsError, write_rows
from extractor.sglang_plugin.protocol import PROTOCOL, Ready, Receipt, ServedModel, ServerInfo
from extractor.tokens import token_of
from hsstore.answers import TransientError
from hsstore.digest import crc32c
from hsstore.errors import (
    IncompleteError,
    MissingExtraError,
    NoSpaceError,
    NotFoundError,
    UnauthorizedError,
    UsageError,
)

Answer = tuple[int, str, bytes]
JSON, HTML = "application/json", "text/html; charset=utf-8"
INFO = ServerInfo(
    Ready("0.5.23", "float32", 100, {"device": "cpu"}), ServedModel("/m"), False, True, "auto", "default", PROTOCOL
)


class Site:
    """An HTTP server with one answer for each `METHOD path`."""

    def __init__(self, certificate: Path | None = None) -> None:
        site = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                site.requests.append((f"{self.command} {self.path}", self.headers.get("Authorization", ""), body))
                found = site.answers.get(f"{self.command} {self.path.partition('?')[0]}", (404, JSON, b"{}"))
                status, media, content = found(site) if callable(found) else found
                self.send_response(status)
                self.send_header("Content-Type", media)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content[: site.cut])
                self.close_connection = site.closes or site.cut is not None

            do_GET = do_POST = do_DELETE = answer

            def log_message(self, *_: object) -> None: ...

        self.answers: dict[str, Answer | Callable[[Site], Answer]] = {}
        self.requests: list[tuple[str, str, bytes]] = []
        self.cut: int | None = None
        self.closes = False
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            self.server.socket = context.wrap_socket(
                self.server.socket, server_side=True, do_handshake_on_connect=False
            )
            self.url = f"https://localhost:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@pytest.fixture
def site() -> Iterator[Site]:
    site = Site()
    yield site
    site.close()


@pytest.fixture
def client(site: Site) -> Iterator[VerifierClient]:
    client = VerifierClient(site.url, token="t0ken", answer_seconds=10)
    yield client
    client.close()


def json_answer(value: object, status: int = 200) -> Answer:
    return status, JSON, msgspec.json.encode(value)


def test_a_server_with_the_plugin_says_what_it_is(site: Site, client: VerifierClient) -> None:
    site.answers["GET /hsstore/info"] = json_answer(INFO)
    assert client.info() == INFO
    assert site.requests[0][1] == "Bearer t0ken"


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ({}, "is no SGLang server"),
        ({"GET /hsstore/info": (302, HTML, b"")}, "is no SGLang server"),
        ({"GET /hsstore/info": (200, HTML, b"<html>Welcome to nginx</html>")}, "is no SGLang server"),
        (
            {"GET /server_info": json_answer({"version": "0.5.23"})},
            "is SGLang 0.5.23, started without hsstore's capture plugin",
        ),
        ({"GET /v1/models": json_answer({"object": "list"})}, "a server of the OpenAI API"),
        ({"GET /hsstore/info": json_answer({"ready": 1})}, "another version of hsstore's plugin"),
        ({"GET /hsstore/info": json_answer(msgspec.structs.replace(INFO, protocol=99))}, r"\(protocol 99\)"),
    ],
)
def test_what_is_no_server_for_us_is_named(
    site: Site, client: VerifierClient, answers: dict[str, Answer], words: str
) -> None:
    site.answers.update(answers)
    with pytest.raises(UsageError, match=words) as caught:
        client.info()
    assert site.url in caught.value.message
    assert "install" in caught.value.hint or "hsstore verifier" in caught.value.hint


@pytest.mark.parametrize("status", [401, 403])
def test_a_refused_token_is_named_and_not_repeated(site: Site, client: VerifierClient, status: int) -> None:
    site.answers["GET /hsstore/info"] = json_answer({"error": "Unauthorized"}, status)
    with pytest.raises(UnauthorizedError, match="refuses the token") as caught:
        client.info()
    assert "t0ken" not in str(caught.value)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"error": {"message": "token id 9 lies outside"}}, "token id 9 lies outside"),
        ({"object": "error", "message": "1 validation error:\n  more"}, "1 validation error:"),
        ({"detail": "no"}, "no"),
    ],
)
def test_a_request_that_is_wrong_is_refused_in_the_servers_words(
    site: Site, client: VerifierClient, body: dict, words: str
) -> None:
    site.answers["POST /generate"] = json_answer(body, 400)
    with pytest.raises(Refused) as caught:
        client.generate({})
    assert caught.value.message == words


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_server_that_is_busy_or_broken_may_pass(site: Site, client: VerifierClient, status: int) -> None:
    site.answers["POST /generate"] = json_answer({"error": {"message": "draining"}}, status)
    with pytest.raises(TransientError, match=f"{status}: draining"):
        client.generate({})
    site.answers["POST /generate"] = (200, HTML, b"<html>")
    with pytest.raises(TransientError, match="no answer of SGLang"):
        client.generate({})
    site.answers["GET /hsstore/rows/x/errors"] = (200, JSON, b'["\xff')
    with pytest.raises(TransientError, match="no list of errors"):
        client.write_errors("x")


def test_nobody_there_may_pass() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
    with pytest.raises(TransientError, match="refused"):
        VerifierClient(url, token=None, answer_seconds=1).generate({})


def test_a_connection_that_was_closed_while_it_lay_idle_is_no_lost_server(site: Site, client: VerifierClient) -> None:
    """A server closes idle connections; the request that comes just then says nothing of the server."""
    site.answers["POST /generate"] = json_answer({"meta_info": {"a": 1}})
    assert client.generate({}) == {"a": 1}
    connection = client._connection()
    assert connection.sock is not None
    connection.sock.shutdown(socket.SHUT_WR)  # the next write fails, as after a close that has not arrived yet
    assert client.generate({}) == {"a": 1}


def test_over_tls_the_server_must_be_trusted(tmp_path: Path) -> None:
    """A token goes with every request: nobody may read it on the way."""
    certificate = write_certificate(tmp_path)
    site = Site(certificate)
    site.answers["GET /hsstore/info"] = json_answer(INFO)
    stranger = VerifierClient(site.url, token="t", answer_seconds=10)
    with pytest.raises(UsageError, match="is not trusted: self-signed certificate") as caught:
        stranger.info()
    assert "SSL_CERT_FILE" in caught.value.hint
    friend = VerifierClient(
        site.url, token="t", answer_seconds=10, context=ssl.create_default_context(cafile=certificate)
    )
    assert friend.info() == INFO
    assert [token for _, token, _ in site.requests] == ["Bearer t"]
    friend.end()
    friend.close()
    site.close()


def write_certificate(directory: Path) -> Path:
    """A key and a certificate of localhost that signs itself, in one file."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    today = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(today - datetime.timedelta(days=1))
        .not_valid_after(today + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    (directory / "pem").write_bytes(private + certificate.public_bytes(Encoding.PEM))
    return directory / "pem"


def test_after_the_end_nothing_is_begun(site: Site, client: VerifierClient) -> None:
    site.answers["POST /generate"] = json_answer({"meta_info": {}})
    client.generate({})
    client.end()
    with pytest.raises(TransientError, match="closed"):
        client.generate({})


def job_of(directory: Path, n_tokens: int = 3) -> tuple[Job, bytes, Receipt]:
    files = {name: str(directory / name) for name in ("after_2", "final")}
    for path in files.values():
        Path(path).write_bytes(bytes(10 * 4))
    body = bytes(range(1, 1 + 2 * n_tokens * 4))
    half = len(body) // 2
    receipt = Receipt(n_tokens, {"after_2": crc32c(body[:half]), "final": crc32c(body[half:])}, (2,))
    return Job(source_index=0, input_ids=np.zeros(n_tokens, np.int32), row=5, files=files), body, receipt


def test_a_body_of_rows_goes_to_its_places(site: Site, client: VerifierClient, tmp_path: Path) -> None:
    job, body, receipt = job_of(tmp_path)
    site.answers["GET /hsstore/rows/x"] = (200, "application/octet-stream", body)
    assert client.rows("x", lambda response: write_rows(response, job, receipt, 4))
    assert Path(job.files["after_2"]).read_bytes() == bytes(20) + body[:12] + bytes(8)
    assert Path(job.files["final"]).read_bytes() == bytes(20) + body[12:] + bytes(8)
    site.answers["GET /hsstore/rows/x"] = (202, JSON, b"")
    assert client.rows("x", lambda response: write_rows(response, job, receipt, 4)) is None


def test_other_bytes_and_early_ends_are_torn(site: Site, client: VerifierClient, tmp_path: Path) -> None:
    job, body, receipt = job_of(tmp_path)
    for content, words in ((body[:-1] + b"x", "not those it captured"), (body[:-1], "sent 23 bytes of rows")):
        site.answers["GET /hsstore/rows/x"] = (200, "application/octet-stream", content)
        with pytest.raises(TornRowsError, match=words):
            client.rows("x", lambda response: write_rows(response, job, receipt, 4))
    site.answers["GET /hsstore/rows/x"] = (200, "application/octet-stream", body)
    site.cut = 20
    with pytest.raises(TornRowsError, match="too early"):
        client.rows("x", lambda response: write_rows(response, job, receipt, 4))


def test_errors_of_the_own_disk_are_not_the_servers(
    site: Site, client: VerifierClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk must end the run; taken for a lost server it would be tried elsewhere for ever."""
    job, body, receipt = job_of(tmp_path)
    site.answers["GET /hsstore/rows/x"] = (200, "application/octet-stream", body)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("extractor.engines.http_fetch.pwrite_all", full)
    with pytest.raises(NoSpaceError, match="after_2"):
        client.rows("x", lambda response: write_rows(response, job, receipt, 4))
    Path(job.files["after_2"]).unlink()
    with pytest.raises(NotFoundError):
        client.rows("x", lambda response: write_rows(response, job, receipt, 4))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    config = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 6, "hidden_size": 4, "vocab_size": 50}
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    return tmp_path / "model"


def test_a_server_that_is_not_there_is_waited_for_and_then_named(model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
    with pytest.raises(IncompleteError, match=f"no server can be reached at {url}.*refused") as caught:
        HttpEngine(model, [url], layers=("after_2", "final"), options={"start_seconds": 0.1})
    assert "hsstore verifier" in caught.value.hint


def test_a_server_whose_hooks_do_not_run_is_refused(site: Site, model: Path) -> None:
    site.answers["GET /hsstore/info"] = json_answer(INFO)
    site.answers["POST /generate"] = json_answer({"meta_info": {"finish_reason": {"type": "length"}}})
    site.answers["DELETE /hsstore/rows/x"] = (204, JSON, b"")
    with pytest.raises(UsageError, match=r"captures nothing: .*the capture hooks did not run"):
        HttpEngine(model, [site.url], layers=("after_2", "final"))


def test_wrong_calls_are_refused_before_anything_is_asked(model: Path) -> None:
    with pytest.raises(UsageError, match=r"option tp is the server's.*hsstore verifier"):
        parse_options({"tp": "8"})
    with pytest.raises(UsageError, match="in_flight"):
        parse_options({"in_flight": "0"})
    with pytest.raises(UsageError, match="no URL of a service"):
        HttpEngine(model, ["gpu1:30000"], layers=("final",))
    for one, other in (("http://a:1", "http://a:1/"), ("http://a", "HTTP://A:80"), ("https://a/x", "https://a:443/x/")):
        with pytest.raises(UsageError, match="given twice"):
            HttpEngine(model, [one, other], layers=("final",))
    with pytest.raises(UsageError, match="transfer is"):
        HttpEngine(model, ["http://a:1"], layers=("final",), transfer="ftp")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["start_seconds", "stall_seconds", "confirm_seconds", "outage_seconds"])
@pytest.mark.parametrize("value", ["nan", "inf", "-1", "0", "1e300"])
def test_seconds_are_numbers_that_a_socket_takes(name: str, value: str) -> None:
    with pytest.raises(UsageError, match=f"{name} is a number of seconds"):
        parse_options({name: value})


@pytest.mark.parametrize(
    "host", ["host name:1", "a" * 70 + ".x:1", "xn--\ud7ff:1", "a..b", "a:1/x y", "a:1/\u00e9", "a:1/\n", "\udc80"]
)
def test_a_url_that_no_socket_takes_is_refused(host: str) -> None:
    with pytest.raises(UsageError, match="no URL of a service"):
        VerifierClient(f"http://{host}", token=None, answer_seconds=1)


def test_a_silent_server_is_named_while_another_one_answers(
    site: Site, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes the connection and never says anything: that must not hold up the start for as long as an answer may."""
    monkeypatch.setattr(http, "_SILENT_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        silent = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(IncompleteError, match=f"{silent} takes connections, and says nothing"):
            HttpEngine(model, [silent], layers=("final",), options={"start_seconds": "0.1"})
        monkeypatch.setattr(http, "_SILENT_SECONDS", 600)
        with pytest.raises(UsageError, match=f"{site.url} is no SGLang server"):  # it is asked at the same time
            HttpEngine(model, [silent, site.url], layers=("final",))


def test_the_token_comes_from_the_file_else_from_the_environment(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("one\n")
    assert token_of(tmp_path / "key", {"HSSTORE_TOKEN": "two"}) == "one"
    assert token_of(None, {"HSSTORE_TOKEN": "two"}) == "two"
    assert token_of(None, {"HSSTORE_TOKEN": ""}) is None
    with pytest.raises(UsageError, match="HSSTORE_TOKEN must hold one token"):
        token_of(None, {"HSSTORE_TOKEN": "a b"})


def test_sglang_need_not_be_installed_for_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    from extractor import engines

    monkeypatch.setattr(engines, "find_spec", lambda name: None)
    assert engines.choose_engine("auto", "", ["http://a:1"]) == "sglang"
    with pytest.raises(UsageError, match="--engine transformers is none"):
        engines.choose_engine("transformers", "", ["http://a:1"])
    with pytest.raises(MissingExtraError):
        engines.choose_engine("sglang")


def test_tickets_are_not_to_be_guessed() -> None:
    assert len({http_client.new_ticket() for _ in range(100)}) == 100
