"""One running server: its address, what it says of itself, one request after the other in a connection each.

Turns whatever a server or the network does into one of three words: it is away (`AwayError`), it failed
(`FailedError`), it refuses this request (`RefusedError`). Leaves patience and the choice between servers to `servers`.
"""

from __future__ import annotations

import http.client
import json
import socket
from pathlib import PurePosixPath
from typing import Any, Literal
from urllib.parse import urlsplit

import msgspec

from extractor.engines.http_client import unauthorized
from hsstore import __version__
from hsstore.errors import UsageError

CONNECT_SECONDS = 10.0
PROBE_SECONDS = 30.0
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 6))
"""A host that died is noticed after a minute and a half, however long an answer may take."""
_AWAY = {408, 425, 429, 502, 503, 504}
_LONGEST = 256 << 20

Api = Literal["sglang", "openai"]


class AwayError(Exception):
    """Nobody is there, or it has no time now. `begun`: it had taken the request."""

    def __init__(self, reason: str, *, begun: bool = False) -> None:
        super().__init__(reason)
        self.begun = begun


class FailedError(Exception):
    """It tried, and failed, or answered what is no answer."""


class RefusedError(Exception):
    """It will not have this request."""


class Server:
    """One URL."""

    def __init__(self, url: str, key: str) -> None:
        """Opens no connection. Raises `UsageError` for a URL that is none."""
        self.url = checked(url)
        self._key = key
        self.api: Api = "sglang"
        self.model = ""
        self.version = ""
        self.context_tokens = 0
        self.details: dict[str, str] = {}

    def probe(self, api: str, served: str) -> None:
        """Ask what it is. Raises `AwayError`, or `UsageError` when it is no such server."""
        failures = []
        if api in ("auto", "sglang"):
            try:
                return self._probe_sglang()
            except (FailedError, RefusedError) as error:
                failures.append(f"/server_info: {error}")
        if api in ("auto", "openai"):
            try:
                return self._probe_openai(served)
            except (FailedError, RefusedError) as error:
                failures.append(f"/v1/models: {error}")
        raise UsageError(
            f"{self.url} is no server of --api {api}: {'; '.join(failures)}", hint="give the URL of SGLang or vLLM"
        )

    def _probe_sglang(self) -> None:
        try:
            info = self.request("GET", "/server_info", None, PROBE_SECONDS)
        except RefusedError:  # SGLang before 0.5.4
            info = self.request("GET", "/get_server_info", None, PROBE_SECONDS)
        if not isinstance(info.get("model_path"), str) or "version" not in info:
            raise FailedError("no model_path and version in the answer")
        self.api, self.model, self.version = "sglang", info["model_path"], str(info["version"])
        longest = info.get("max_req_input_len")
        self.context_tokens = longest if type(longest) is int and longest > 0 else 0
        recorded = ("dtype", "quantization", "tp_size", "dp_size", "enable_deterministic_inference")
        self.details = {name: str(info[name]) for name in recorded if info.get(name) is not None}

    def _probe_openai(self, served: str) -> None:
        entries = self.request("GET", "/v1/models", None, PROBE_SECONDS).get("data")
        listed = entries if isinstance(entries, list) else []
        known = {e["id"]: e for e in listed if isinstance(e, dict) and isinstance(e.get("id"), str)}
        if not known:
            raise FailedError("it names no models")
        if served and served not in known:
            raise UsageError(f"{self.url} serves {', '.join(known)}, not {served}", hint="correct --served-model")
        if not served and len(known) > 1:
            raise UsageError(f"{self.url} serves {', '.join(known)}", hint="say which with --served-model NAME")
        self.api, self.model = "openai", served or next(iter(known))
        entry = known[self.model]
        longest = entry.get("max_model_len")
        self.context_tokens = longest if type(longest) is int and longest > 0 else 0
        self.details = {"root": str(entry["root"])} if entry.get("root") else {}
        try:
            self.version = str(self.request("GET", "/version", None, PROBE_SECONDS).get("version", ""))
        except (FailedError, RefusedError):
            self.version = ""  # vLLM's own road; others have none

    @property
    def model_name(self) -> str:
        """Last part of what it calls its model, a path or a hub id."""
        return PurePosixPath(self.details.get("root", self.model)).name

    def request(self, method: str, path: str, body: Any, seconds: float) -> dict[str, Any]:
        """One JSON document there, one back."""
        parts = urlsplit(self.url)
        assert parts.hostname
        class_ = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = class_(parts.hostname, parts.port, timeout=CONNECT_SECONDS)  # `checked` knows that it can be
        begun = False
        try:
            connection.connect()
            assert connection.sock is not None
            connection.sock.settimeout(seconds)
            connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in _KEEPALIVE:
                connection.sock.setsockopt(socket.IPPROTO_TCP, option, value)
            begun = True
            data = None if body is None else json.dumps(body).encode()
            connection.request(method, f"{parts.path}{path}", data, self._headers(data is not None))
            response = connection.getresponse()
            answer = response.read(_LONGEST)
        except (OSError, http.client.HTTPException) as error:
            raise AwayError(str(error) or type(error).__name__, begun=begun) from None
        finally:
            connection.close()
        return self._document(response.status, answer)

    def _headers(self, has_body: bool) -> dict[str, str]:
        headers = {"User-Agent": f"hsstore/{__version__}", "Accept": "application/json"}
        if has_body:
            headers["Content-Type"] = "application/json"
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        return headers

    def _document(self, status: int, answer: bytes) -> dict[str, Any]:
        said = f"HTTP {status} {' '.join(answer[:200].decode(errors='replace').split())}".strip()
        if status in (401, 403):
            raise unauthorized(self.url)
        if status in _AWAY:
            raise AwayError(said)
        if status >= 500:
            raise FailedError(said)
        if status != 200:
            raise RefusedError(said)
        try:
            document = msgspec.json.decode(answer)  # unlike json.loads it takes no half of a surrogate pair
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise FailedError(f"no JSON: {said}") from None
        if not isinstance(document, dict):
            raise FailedError(f"no JSON object: {said}")
        return document


def checked(url: str) -> str:
    """Without the slash or `/v1` at its end. Raises `UsageError`."""
    hint = "give http://HOST:PORT of a server"
    if not url.isprintable() or any(c.isspace() for c in url):
        raise UsageError(f"--url {url!a} is none: it holds a space or another character of no address", hint=hint)
    try:
        parts = urlsplit(url)
        _ = parts.port
        (parts.hostname or "").encode("idna")  # a part of the name that is empty, too long or no international one
        parts.path.encode("ascii")
    except ValueError as error:
        raise UsageError(f"--url {url!a} is none: {error}", hint=hint) from None
    if parts.username or parts.password:
        raise UsageError(
            "--url holds a password", hint="put the key into a file for --token-file, or into HSSTORE_TOKEN"
        )
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise UsageError(f"--url {url} is no http or https address", hint=hint)
    return url.rstrip("/").removesuffix("/v1").rstrip("/")
