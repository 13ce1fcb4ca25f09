"""Answers from running servers, one or many: SGLang, or whatever speaks OpenAI's chat road, such as vLLM.

Every ask goes to the server with the least to do. One that is away is set aside with growing pauses and its asks go to
the others; while none is there the run waits, and gives up after `server_wait_seconds`. A line fails only for what is
its own: refused, or an error again and again. Leaves one server to `connection`, documents to `requests`.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from extractor.chat import ChatTokenizer
from extractor.generate.settings import Sampling, Settings
from extractor.generate.sources.base import UNLIMITED, Ask, OutOfPatienceError, Reply, SourceInfo, end_ids
from extractor.generate.sources.connection import (
    AwayError,
    FailedError,
    RefusedError,
    Server,
)
from extractor.generate.sources.requests import chat_reply, chat_request, sampling_params, sglang_reply
from extractor.supervise import wait_seconds
from extractor.tokens import token_of
from extractor.verifier import Verifier
from extractor.words import counted
from hsstore.console import note, warn
from hsstore.errors import IncompleteError, UsageError

TRIES = 3
"""Errors, or connections lost in the middle, that one ask is worth."""
_TICK_SECONDS = 0.2
_JUST_NOW_SECONDS = 1.0
"""A server that failed later than that and has a request may be answering it."""
_STACK_BYTES = 512 << 10


@dataclass(slots=True, eq=False)
class _Place:
    """A server in the list, and how it does."""

    server: Server
    busy: int = 0
    failures: int = 0
    """In a row."""
    away_until: float = 0.0
    last_failure: float = 0.0
    last_words: str = ""


@dataclass(slots=True)
class _Tries:
    errors: int = 0
    losses: int = 0
    words: list[str] = field(default_factory=list)
    failed_at: list[_Place] = field(default_factory=list)
    """Servers that let it down: others are asked first."""


class Servers:
    """A `Source` (extractor.generate.sources.base)."""

    def __init__(self, settings: Settings, verifier: Verifier, chat: ChatTokenizer, sampling: Sampling) -> None:
        self._settings, self._verifier, self._chat, self._sampling = settings, verifier, chat, sampling
        key = token_of(settings.token_file, os.environ) or ""
        self._places = [_Place(Server(url, key)) for url in dict.fromkeys(settings.urls)]
        self._ends = end_ids(verifier.path, chat)
        self._asks: queue.SimpleQueue[Ask | None] = queue.SimpleQueue()
        self._replies: queue.SimpleQueue[Reply | Exception] = queue.SimpleQueue()
        self._state = threading.Condition()
        self._closed = False
        self._n_threads = self._epoch = 0
        self._last_seen = time.monotonic()
        self._warned = False
        self.group = 0
        self.in_flight = settings.in_flight * len(self._places)
        self._wait_for_servers()
        self.info = self._info()

    def submit(self, ask: Ask) -> None:
        if self._n_threads < self.in_flight:
            self._n_threads += 1
            before = threading.stack_size(_STACK_BYTES)
            threading.Thread(target=self._work, daemon=True).start()
            threading.stack_size(before)
        self._asks.put(ask)

    def collect(self, on_tokens: Callable[[int], None]) -> list[Reply]:
        replies: list[Reply] = []
        while not replies:
            try:
                found = self._replies.get(timeout=_TICK_SECONDS)
            except queue.Empty:
                self._check_patience()
                on_tokens(0)
                continue
            while True:
                if isinstance(found, Exception):
                    raise found
                replies.append(found)
                if self._replies.empty():
                    break
                found = self._replies.get()
        return replies

    def restart(self) -> None:
        """The servers are others' to start: see whether one is there again."""
        self._probe_all()
        self._last_seen = time.monotonic()

    def close(self) -> None:
        """End. Threads end with their request; none holds the process up."""
        with self._state:
            self._closed = True
            self._state.notify_all()
        for _ in range(self._n_threads):
            self._asks.put(None)

    def _check_patience(self) -> None:
        waited = time.monotonic() - self._last_seen
        with self._state:
            now = time.monotonic()
            gone = all(p.failures and (not p.busy or now - p.last_failure < _JUST_NOW_SECONDS) for p in self._places)
            if not gone or waited <= self._settings.server_wait_seconds:
                return
            self._epoch += 1  # asks in a thread's hands are let go; the loop sends them again
            self._state.notify_all()
        while not self._asks.empty():
            self._asks.get()
        raise self._nobody()

    def _nobody(self) -> OutOfPatienceError:
        said = "; ".join(f"{p.server.url}: {p.last_words}" for p in self._places)
        return OutOfPatienceError(
            f"no server answers: {said}", hint="every answer so far is kept: start one, and run the same with --resume"
        )

    def _wait_for_servers(self) -> None:
        """Until one is there, as long as patience lasts: servers of a batch job come up at their own time."""
        until = time.monotonic() + self._settings.server_wait_seconds
        tries = 0
        while True:
            try:
                return self._probe_all()
            except IncompleteError:
                tries += 1
                pause = wait_seconds(tries)
                if time.monotonic() + pause > until:
                    raise
                if tries == 1:
                    note(f"waiting for {self._places[0].server.url} (--server-wait)")
                time.sleep(pause)

    def _probe_all(self) -> None:
        """Ask each server what it is. Raises `IncompleteError` when none is there."""
        for place in self._places:
            try:
                place.server.probe(self._settings.api, self._settings.served_model)
                place.failures, place.away_until = 0, 0.0
            except AwayError as error:
                place.last_words = str(error)
                place.failures += 1
                place.away_until = time.monotonic() + wait_seconds(place.failures)
        there = [place.server for place in self._places if not place.away_until]
        if not there:
            raise self._nobody()
        for place in self._places:
            if place.away_until:
                warn(f"{place.server.url} does not answer ({place.last_words}); it is asked again later")

    def _info(self) -> SourceInfo:
        there = [place.server for place in self._places if not place.away_until]
        names = {server.model_name for server in there}
        if len(names) > 1:
            raise UsageError(
                f"the servers have different models: {', '.join(sorted(names))}", hint="give servers of one model"
            )
        if (name := names.pop()) != self._verifier.name.rpartition("/")[2]:
            warn(f"the servers call their model {name}, --model is {self._verifier.name}: see that it is the same")
        known = [server.context_tokens for server in there if server.context_tokens]
        return SourceInfo(
            engine="sglang" if there[0].api == "sglang" else "openai-compatible server",
            version=", ".join(sorted({server.version for server in there})),
            compute_dtype=there[0].details.get("dtype", ""),
            context_tokens=min([*known, self._verifier.context_tokens or UNLIMITED]),
            served=name,
            flags={
                server.url: ", ".join(f"{n}={v}" for n, v in {"model": server.model, **server.details}.items())
                for server in there
            },
        )

    def _work(self) -> None:
        while (ask := self._asks.get()) is not None:
            try:
                reply = self._answer(ask, self._epoch)
            except Exception as error:  # noqa: BLE001 - a key that is missing, a bug: the main thread raises it
                self._replies.put(error)
                continue
            if reply is not None:
                self._replies.put(reply)

    def _answer(self, ask: Ask, epoch: int) -> Reply | None:
        """One ask, whatever servers come and go meanwhile; None when it is no longer waited for."""
        tries = _Tries()
        while (place := self._take(epoch, tries.failed_at)) is not None:
            try:
                reply = self._ask(place, ask)
            except RefusedError as error:
                self._give_back(place)
                return Reply(key=ask.key, error="refused", detail=str(error))
            except AwayError as error:
                self._give_back(place, away=str(error))
                tries.losses += error.begun
                tries.failed_at.append(place)
            except UsageError:
                self._give_back(place)
                raise
            except (FailedError, ValueError) as error:
                self._give_back(place)
                tries.errors += 1
                tries.words.append(str(error))
                tries.failed_at.append(place)
            else:
                self._give_back(place)
                return reply
            if tries.errors >= TRIES:
                return Reply(key=ask.key, error="engine_error", detail=f"{place.server.url}: {tries.words[-1]}")
            if tries.losses >= TRIES:
                return Reply(key=ask.key, error="engine_lost", detail=f"{counted(TRIES, 'connection')} were lost on it")
        return None

    def _ask(self, place: _Place, ask: Ask) -> Reply:
        server, seconds = place.server, self._settings.answer_seconds
        if not server.model or place.failures:  # it was away, and may have come up as another one
            server.probe(self._settings.api, self._settings.served_model)
            if server.model_name != self.info.served:
                raise UsageError(
                    f"{server.url} serves {server.model_name} now, the answers so far are of {self.info.served}",
                    hint="every answer so far is kept: give servers of one model, and --resume",
                )
        if server.api == "sglang":
            body = {
                "input_ids": list(ask.prompt_ids),
                "sampling_params": sampling_params(ask, self._sampling, self._ends),
            }
            document = server.request("POST", "/generate", body, seconds)
            return sglang_reply(ask, document, self._sampling, self._ends, self._chat)
        body = chat_request(ask, self._sampling, server.model, self._settings.template_arguments)
        reply = chat_reply(ask, server.request("POST", "/v1/chat/completions", body, seconds))
        if reply.prompt_tokens and reply.prompt_tokens != len(ask.prompt_ids) and not self._warned:
            self._warned = True
            warn(
                f"{server.url} makes {reply.prompt_tokens} tokens of the prompt of line {ask.line}, --model"
                f" {len(ask.prompt_ids)}: its tokenizer or chat template is another one"
            )
        return reply

    def _take(self, epoch: int, failed_at: list[_Place]) -> _Place | None:
        """The server with the least to do, as soon as there is one; if it can be, none of `failed_at`."""
        with self._state:
            while not self._closed and epoch == self._epoch:
                now = time.monotonic()
                ready = [place for place in self._places if place.away_until <= now]
                if ready:
                    best = min(ready, key=lambda place: (place in failed_at, place.busy))
                    best.busy += 1
                    return best
                self._state.wait(min(place.away_until for place in self._places) - now + 0.001)
        return None

    def _give_back(self, place: _Place, away: str = "") -> None:
        with self._state:
            place.busy -= 1
            if away:
                place.last_failure = time.monotonic()
            if not away:
                place.failures, place.away_until = 0, 0.0
                self._last_seen = time.monotonic()
            elif place.away_until <= time.monotonic():  # not for each of the requests that it lost
                place.failures += 1
                place.last_words = away
                place.away_until = time.monotonic() + wait_seconds(place.failures)
            self._state.notify_all()
