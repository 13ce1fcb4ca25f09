"""The verifier in running SGLang servers: one or many URLs, as one engine.

Same states and same capture record as an engine of one's own (`sglang`), when flags agree. Responsible for the options,
for asking each server what it is before any sample is sent, and for servers that must be alike. Leaves samples in
flight to `http_pool`, one server to `http_link`.

Letters: H hidden size.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from extractor.engines.base import EngineInfo, Job, Ticket, Transfer
from extractor.engines.http_client import VerifierClient, unreachable
from extractor.engines.http_link import Link, Wanted, check_model, disagreements
from extractor.engines.http_pool import Dispatch, Member
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


class HttpSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Options of `--engine-option` for servers."""

    in_flight: int = 64
    """Requests sent to each server and not yet answered."""
    start_seconds: float = 10.0
    """How long to wait for a server that is not there yet."""
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
        if twice := sorted({url for url in urls if list(urls).count(url) > 1}):
            raise UsageError(f"--url {twice[0]} is given twice", hint="name each server once")
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
        self._members: list[Member] = []
        for url in urls:
            seconds = self._settings.stall_seconds
            client = VerifierClient(url, token=token, answer_seconds=seconds, context=context)
            link = Link(client, wanted, transfer)
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
        for member in self._members:
            member.end()

    def _start(self) -> EngineInfo:
        """Handshake with every server. One that is not there may come later, as long as another one is."""
        failures: dict[str, TransientError] = {}
        deadline = time.monotonic() + self._settings.start_seconds
        for member in self._members:
            try:
                self._wait_for(member, deadline)
            except TransientError as error:
                failures[member.link.url] = error
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

    def _wait_for(self, member: Member, deadline: float) -> None:
        told = False
        while True:
            try:
                self._check(member.link)
                return
            except TransientError:
                if time.monotonic() + _POLL_SECONDS > deadline:
                    raise
            if not told:
                note(f"waiting for {member.link.url}")
                told = True
            time.sleep(_POLL_SECONDS)

    def _check(self, link: Link) -> None:
        """Raise `UsageError` for a server that is not for this run, or not like the first one."""
        info = link.handshake()
        found = check_model(
            info,
            link.url,
            config_sha256=self._verifier.config_sha256,
            weights_sampled=self._weights_sampled,
            dtype=self._dtype,
        )
        if found:
            raise UsageError(
                f"{link.url} does not serve {self._verifier.name} as this run needs it: {'; '.join(found)}",
                hint=f"start it with `hsstore verifier --model {self._verifier.path}`, or give its own --model",
            )
        if self._first is None:
            if info.model.unknown:
                warn(f"{link.url} cannot tell the digests of its model ({info.model.unknown}); check the states")
            self._first = info
        elif differences := disagreements(self._first, info):
            raise UsageError(
                f"{link.url} is not like the other servers, their rows would mix: {'; '.join(differences)}",
                hint="start all servers of one store with the same flags and the same SGLang",
            )
        elif info.ready.longest_tokens < self._first.ready.longest_tokens:
            if self._up:
                raise UsageError(
                    f"{link.url} takes at most {info.ready.longest_tokens} tokens now,"
                    f" {self.info.longest_tokens} at the start of the run",
                    hint="start it with the --max-total-tokens and --context-length that it had",
                )
            self._first = msgspec.structs.replace(self._first, ready=info.ready)

    @cached_property
    def _weights_sampled(self) -> str:
        return weights_sha256(weight_files(self._verifier.path), sampled=True)


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
    return settings
