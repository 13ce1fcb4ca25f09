"""The verifier in running SGLang servers: one or many URLs, as one engine.

Same states and same capture record as an engine of one's own (`sglang`), when flags agree. Responsible for the options,
for asking each server what it is before any sample is sent, and for servers that must be alike. Leaves samples in
flight to `http_pool`, one server to `http_link`.

Letters: H hidden size.
"""

from __future__ import annotations

import math
import queue
import ssl
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from extractor.engines.base import EngineInfo, Job, Ticket, Transfer
from extractor.engines.http_client import VerifierClient, unreachable
from extractor.engines.http_link import Link, Wanted, check_model, disagreements
from extractor.engines.http_pool import Dispatch, Member, Task
from extractor.sglang_plugin.protocol import ServerInfo
from extractor.sglang_plugin.settings import DTYPES, layer_numbers
from extractor.verifier import read_verifier
from extractor.weights import weight_files
from hsstore.answers import TransientError
from hsstore.console import note, warn
from hsstore.errors import UsageError
from hsstore.modeldigest import weights_sha256

TRANSFERS = ("auto", "shared", "fetch")
_POLL_SECONDS = 0.5
_SILENT_SECONDS = 30.0  # a server that is busy with other clients answers so late
_TELL_SECONDS = 5.0
_MOST_SECONDS = 1e7  # sockets take no longer ones than about 2e9
_Answered = tuple[str, ServerInfo | BaseException]
"""A URL, and what its handshake gave."""


class HttpSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Options of `--engine-option` for servers."""

    in_flight: int = 64
    """Requests sent to each server and not yet answered."""
    start_seconds: float = 10.0
    """How long to wait for a server that is not there yet; one that takes connections has 30 s at least."""
    stall_seconds: float = 900.0
    """How long one answer may take."""
    confirm_seconds: float = 300.0
    """How long captured rows may take to their files."""
    outage_seconds: float = 600.0
    """How long to go on when no server answers."""


class HttpEngine:
    """An `Engine` (extractor.engines.base) whose verifier is elsewhere."""

    def __init__(
        self,
        model_path: str | Path,
        urls: Sequence[str],
        *,
        layers: Sequence[str],
        dtype: str = "auto",
        transfer: Transfer = "auto",
        token: str | None = None,
        context: ssl.SSLContext | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """Ask every server what it is, and see one token through it. `context`: whom to trust, beside the system's.

        Raises `UsageError` for a server that is none, or not one for this model, layers and dtype, `UnauthorizedError`
        for a token that is refused, `IncompleteError` when no server is there.
        """
        self._settings = parse_options(options or {})
        if transfer not in TRANSFERS:
            raise UsageError(f"transfer is {', '.join(TRANSFERS)}, found {transfer!r}")
        if dtype not in DTYPES:
            raise UsageError(f"dtype {dtype!r} is unknown, expected {', '.join(DTYPES)}")
        self._verifier = read_verifier(str(model_path))
        self._dtype = dtype
        wanted = Wanted(
            layers=tuple(layers),
            points=layer_numbers(layers, self._verifier.n_layers) or (1,),
            row_bytes=2 * self._verifier.hidden_size,
            answer_seconds=self._settings.stall_seconds,
            confirm_seconds=self._settings.confirm_seconds,
        )
        self._first: ServerInfo | None = None
        """What the others must be like, with the shortest of their longest prompts."""
        self._up = False
        self._over = threading.Event()
        self._members: list[Member] = []
        for url in urls:
            seconds = self._settings.stall_seconds
            client = VerifierClient(url, token=token, answer_seconds=seconds, context=context)
            link = Link(client, wanted, transfer)
            if any(_place(link.url) == _place(member.link.url) for member in self._members):
                raise UsageError(f"--url {url} is given twice", hint="name each server once")
            self._members.append(Member(link=link, in_flight=self._settings.in_flight, check=self._check))
        try:
            self.info = self._start()
            self._up = True
        except BaseException:  # Ctrl-C included
            self.close()
            raise

    def capture(self, jobs: Iterable[Job]) -> Iterator[Ticket]:
        """One request a sample, spread over the servers; tickets as they come."""
        dispatch = Dispatch(self._members, self.info.longest_tokens, self._settings.outage_seconds)
        try:
            yield from dispatch.tickets(jobs)
        finally:
            dispatch.close()

    def close(self) -> None:
        """End the connections. The servers run on. Safe to call again."""
        self._over.set()
        for member in self._members:
            member.end()

    def _start(self) -> EngineInfo:
        """Handshake with every server. One that is not there may come later, as long as another one is."""
        failures: dict[str, TransientError] = {}
        for url, outcome in self._ask_all().items():
            if isinstance(outcome, TransientError):
                failures[url] = outcome
            else:
                self._judge(url, outcome)
        if self._first is None:
            raise unreachable(", ".join(failures), next(iter(failures.values())))
        for member in self._members:
            if member.link.url in failures:
                member.lost(failures[member.link.url].message)
        ready = self._first.ready
        return EngineInfo(
            engine="sglang",
            version=ready.version,
            norm="post",
            compute_dtype=ready.compute_dtype,
            longest_tokens=ready.longest_tokens,
            flags=ready.flags,
        )

    def _ask_all(self) -> dict[str, ServerInfo | TransientError]:
        """All servers at once, in the order of their URLs: what each is, or why it does not say so in time."""
        seconds = max(self._settings.start_seconds, _SILENT_SECONDS)
        started = time.monotonic()
        answers: queue.SimpleQueue[_Answered] = queue.SimpleQueue()
        for member in self._members:
            member.start(_asking(member.link, started + self._settings.start_seconds, self._over, answers))
        found: dict[str, ServerInfo | TransientError] = {}
        told = False
        while silent := [member.link for member in self._members if member.link.url not in found]:
            passed = time.monotonic() - started
            if passed > seconds:
                break
            if passed > _TELL_SECONDS and not told:
                note(f"waiting for {', '.join(link.url for link in silent)}")
                told = True
            try:
                url, outcome = answers.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                continue
            if not isinstance(outcome, ServerInfo | TransientError):
                raise outcome
            found[url] = outcome
        for link in silent:
            found[link.url] = TransientError(f"{link.url} takes connections, and says nothing for {seconds:.0f} s")
            link.client.shutdown()
        return {member.link.url: found[member.link.url] for member in self._members}

    def _check(self, link: Link) -> None:
        self._judge(link.url, link.handshake())

    def _judge(self, url: str, info: ServerInfo) -> None:
        """Raise `UsageError` for a server that is not for this run, or not like the first one."""
        found = check_model(
            info,
            url,
            config_sha256=self._verifier.config_sha256,
            weights_sampled=self._weights_sampled,
            dtype=self._dtype,
        )
        if found:
            raise UsageError(
                f"{url} does not serve {self._verifier.name} as this run needs it: {'; '.join(found)}",
                hint=f"start it with `hsstore verifier --model {self._verifier.path}`, or give its own --model",
            )
        if self._first is None:
            if info.model.unknown:
                warn(f"{url} cannot tell the digests of its model ({info.model.unknown}); check the states")
            self._first = info
        elif differences := disagreements(self._first, info):
            raise UsageError(
                f"{url} is not like the other servers, their rows would mix: {'; '.join(differences)}",
                hint="start all servers of one store with the same flags and the same SGLang",
            )
        elif info.ready.longest_tokens < self._first.ready.longest_tokens:
            if self._up:
                raise UsageError(
                    f"{url} takes at most {info.ready.longest_tokens} tokens now,"
                    f" {self.info.longest_tokens} at the start of the run",
                    hint="start it with the --max-total-tokens and --context-length that it had",
                )
            self._first = msgspec.structs.replace(self._first, ready=info.ready)

    @cached_property
    def _weights_sampled(self) -> str:
        return weights_sha256(weight_files(self._verifier.path), sampled=True)


def _asking(link: Link, deadline: float, over: threading.Event, answers: queue.SimpleQueue[_Answered]) -> Task:
    """Handshake again and again until the server is there, `deadline` has passed, or it is all over."""

    def task() -> None:
        outcome: ServerInfo | BaseException | None = None
        while outcome is None:
            try:
                outcome = link.handshake()
            except TransientError as error:
                if time.monotonic() + _POLL_SECONDS > deadline or over.wait(_POLL_SECONDS):
                    outcome = error
            except BaseException as error:  # noqa: BLE001 - raised in the caller's thread
                outcome = error
        answers.put((link.url, outcome))

    return task


def parse_options(options: Mapping[str, Any]) -> HttpSettings:
    """Raises `UsageError` for a wrong value, or for an option that belongs to the server."""
    names = HttpSettings.__struct_fields__
    if others := sorted(set(options) - set(names)):
        raise UsageError(
            f"the engine option {others[0]} is the server's: with --url there are {', '.join(names)}",
            hint="give it to `hsstore verifier … -- FLAGS` when you start the server",
        )
    try:
        settings = msgspec.convert(dict(options), HttpSettings, strict=False)
    except msgspec.ValidationError as error:
        raise UsageError(f"an engine option is wrong: {error}") from None
    if settings.in_flight < 1:
        raise UsageError("in_flight is at least 1")
    for name in names:
        value = getattr(settings, name)
        if name.endswith("_seconds") and not (math.isfinite(value) and 0 < value <= _MOST_SECONDS):
            raise UsageError(f"{name} is a number of seconds above 0, at most {_MOST_SECONDS:.0f}, found {value}")
    return settings


def _place(url: str) -> tuple[str, str | None, int | None, str]:
    """The same for two spellings of one URL."""
    parts = urlsplit(url)
    port = parts.port or {"http": 80, "https": 443}[parts.scheme]
    return parts.scheme, parts.hostname, port, parts.path
