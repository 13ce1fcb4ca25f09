"""Answers from an SGLang engine of our own: one process group below this one, ended with it.

Requests go over a socket as they come, the engine forms its batches itself. Leaves the process to
`extractor.sglang_plugin.process`, what happens in it to `extractor.generate.host`.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from importlib.util import find_spec

from extractor.chat import ChatTokenizer
from extractor.generate.host import Replies, Request, Said, Start
from extractor.generate.settings import Sampling, Settings
from extractor.generate.sources.base import UNLIMITED, Ask, Reply, SourceInfo, end_ids
from extractor.generate.sources.requests import sampling_params, sglang_reply
from extractor.sglang_plugin.process import EngineProcess
from extractor.sglang_plugin.protocol import Failed, Ready
from extractor.sglang_plugin.settings import parse_options
from extractor.verifier import Verifier
from hsstore.errors import HsstoreError, MissingExtraError, UsageError, extra_hint

CPU_POOL_TOKENS = (16384, 65536)
_FIXED = ("model_path", "dtype", "trust_remote_code", "tp_size", "dp_size", "skip_tokenizer_init", "log_level")
_TICK_SECONDS = 1.0


class Sglang:
    """A `Source` (extractor.generate.sources.base)."""

    def __init__(self, settings: Settings, verifier: Verifier, chat: ChatTokenizer, sampling: Sampling) -> None:
        """Start the engine. Raises `UsageError` for what it will not take, `IncompleteError` when it does not start."""
        if find_spec("sglang") is None:
            raise MissingExtraError("the sglang engine needs the package sglang", hint=extra_hint("extract"))
        self._options = parse_options(settings.engine_options, captures=False)
        if taken := sorted(set(_FIXED) & set(self._options.flags)):
            raise UsageError(
                f"the engine option {taken[0]} is not free", hint="give tp=N, dp=N, --model, --dtype or leave it out"
            )
        self._verifier, self._chat, self._sampling = verifier, chat, sampling
        self._ends = end_ids(verifier.path, chat)
        self._start = self._start_message(settings)
        self._numbers = itertools.count()
        self._pending: dict[int, Ask] = {}
        self.group = 0
        self.in_flight = settings.in_flight
        self.info = self._spawn()

    def _start_message(self, settings: Settings) -> Start:
        options = self._options
        arguments = {
            "model_path": str(self._verifier.path),
            "dtype": settings.dtype,
            "trust_remote_code": settings.trust_remote_code,
            "tp_size": options.tp,
            "dp_size": options.dp,
            # Strings that end an answer are found by the engine's own tokenizer.
            "skip_tokenizer_init": not self._sampling.stop,
            "log_level": options.log_level,
            "chunked_prefill_size": options.chunked_prefill_size,
            "max_total_tokens": options.max_total_tokens,
            **options.flags,
        }
        least, most = CPU_POOL_TOKENS
        return Start(
            engine={name: value for name, value in arguments.items() if value is not None},
            device=options.device,
            cpu_pool_tokens=max(least, min(self._verifier.context_tokens, most)),
        )

    def _spawn(self) -> SourceInfo:
        self._process = EngineProcess(
            self._start, log_level=self._options.log_level, module="extractor.generate.host", replies=Replies
        )
        try:
            message = self._process.receive(self._options.start_seconds)
            if isinstance(message, Failed):
                raise self._start_error(message)
            assert isinstance(message, Ready)
            self._process.came_up()
        except BaseException:  # Ctrl-C included
            self._process.close()
            raise
        return SourceInfo(
            engine="sglang",
            version=message.version,
            compute_dtype=message.compute_dtype,
            context_tokens=min(self._verifier.context_tokens or UNLIMITED, message.longest_tokens + 1),
            flags=message.flags,
        )

    def _start_error(self, failed: Failed) -> HsstoreError:
        if failed.usage:
            return UsageError(failed.reason, hint="correct --engine-option")
        if failed.missing_extra:
            return MissingExtraError(failed.reason, hint=extra_hint("extract"))
        return self._process.lost(f"failed with {failed.reason}")

    def submit(self, ask: Ask) -> None:
        number = next(self._numbers)
        self._pending[number] = ask
        params = sampling_params(ask, self._sampling, self._ends)
        self._process.send(Request(number, list(ask.prompt_ids), params))

    def collect(self, on_tokens: Callable[[int], None]) -> list[Reply]:
        """One reply; the engine is lost when it says nothing for `stall_seconds`."""
        until = time.monotonic() + self._options.stall_seconds
        while not self._process.has_message(_TICK_SECONDS):
            on_tokens(0)
            if time.monotonic() > until:
                raise self._process.lost(f"said nothing for {self._options.stall_seconds:.0f} s")
        message = self._process.receive(self._options.stall_seconds)
        assert isinstance(message, Said)
        ask = self._pending.pop(message.number)
        return [self._reply(ask, message)]

    def _reply(self, ask: Ask, said: Said) -> Reply:
        if said.error:
            return Reply(key=ask.key, error="refused" if said.refused else "engine_error", detail=said.error)
        try:
            return sglang_reply(ask, said.answer, self._sampling, self._ends, self._chat)
        except ValueError as error:
            return Reply(key=ask.key, error="engine_error", detail=str(error))

    def restart(self) -> None:
        self._process.close()
        self._pending.clear()
        info = self._spawn()
        if (info.version, info.compute_dtype) != (self.info.version, self.info.compute_dtype):
            self._process.close()
            raise UsageError(f"the engine came back as another one: {info}, expected {self.info}")
        self.info = info

    def close(self) -> None:
        self._process.close()
