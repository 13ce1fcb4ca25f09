"""The verifier in the real SGLang engine: on GPUs in production, on a CPU everywhere.

States go from SGLang's scheduler process straight into the staged files; this side sends ids and places, checks every
answer, and yields a ticket only when the rows in the file have the digest they had when captured. Leaves the process to
`sglang_plugin.process`, the capture to `sglang_plugin.hooks`.

Letters: T tokens of a sample, H hidden size.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np

from extractor.engines.base import EngineInfo, Job, Ticket
from extractor.sglang_plugin.arrivals import Arrivals
from extractor.sglang_plugin.process import EngineProcess
from extractor.sglang_plugin.protocol import FINAL, Answer, Failed, Ready, Receipt, Request, Start, Target
from extractor.sglang_plugin.verifier import layer_numbers, read_config
from hsstore.errors import HsstoreError, MissingExtraError, UsageError, extra_hint

MAX_ATTEMPTS = 3
CPU_POOL_TOKENS = 16384  # KV cache on a CPU, unless the model's context or the caller wants another size
LARGEST_CPU_CONTEXT = 32768
RESERVED = {  # flags the capture rests on
    "enable_return_aux_hidden_states",
    "speculative_algorithm",
    "return_aux_hidden_state_layer_ids",
    "speculative_draft_model_path",
    "disable_radix_cache",
    "skip_tokenizer_init",
    "allow_auto_truncate",
    "pp_size",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pending:
    """A job whose answer has not come."""

    job: Job
    target: Target
    attempt: int


class SglangEngine:
    """An `Engine` (extractor.engines.base) that owns one SGLang engine process."""

    def __init__(
        self,
        model_path: str | Path,
        *,
        layers: Sequence[str],
        dtype: Literal["bfloat16", "float32"] = "bfloat16",
        device: Literal["auto", "cpu", "cuda"] = "auto",
        max_total_tokens: int | None = None,
        chunked_prefill_size: int | None = None,
        tp: int = 1,
        flags: Mapping[str, Any] | None = None,
        in_flight: int = 64,
        log_level: str = "error",
        start_seconds: float = 3600.0,
        stall_seconds: float = 900.0,
        confirm_seconds: float = 300.0,
    ) -> None:
        if find_spec("sglang") is None:
            raise MissingExtraError("the sglang engine needs the package sglang", hint=extra_hint("extract"))
        if reserved := RESERVED & set(flags or ()):
            raise UsageError(f"the engine flag {', '.join(sorted(reserved))} is set by the extraction itself")
        config = read_config(Path(model_path))
        self._layers = tuple(layers)
        self._points = layer_numbers(layers, config.n_layers) or (1,)  # SGLang gives `final` only beside another
        self._columns = {f"after_{k}": column for column, k in enumerate(self._points)} | {"final": FINAL}
        self._hidden_size = config.hidden_size
        self._in_flight = in_flight
        self._stall_seconds = stall_seconds
        self._numbers = itertools.count()
        arguments = {
            "model_path": str(Path(model_path).resolve()),
            "dtype": dtype,
            "tp_size": tp,
            "skip_tokenizer_init": True,
            "enable_return_aux_hidden_states": True,
            "disable_radix_cache": True,  # cached tokens have no states
            "log_level": log_level,
            "chunked_prefill_size": chunked_prefill_size,
            "max_total_tokens": max_total_tokens,
            **(flags or {}),
        }
        start = Start(
            {name: value for name, value in arguments.items() if value is not None},
            self._points,
            config.architecture,
            device,
            max(CPU_POOL_TOKENS, min(config.context_tokens, LARGEST_CPU_CONTEXT)),
        )
        self._process = EngineProcess(start, log_level=log_level)
        self._arrivals = Arrivals(self._process.write_errors, row_bytes=2 * config.hidden_size, seconds=confirm_seconds)
        try:
            self.info = self._started(self._process.receive(start_seconds), dtype)
            self._probe()
        except BaseException:  # Ctrl-C included
            self._process.kill()
            raise

    def _started(self, message: object, dtype: str) -> EngineInfo:
        if isinstance(message, Failed):
            raise self._start_error(message)
        assert isinstance(message, Ready)
        return EngineInfo(
            engine="sglang",
            version=message.version,
            norm="post",
            compute_dtype=dtype,
            longest_tokens=message.longest_tokens,
            flags=message.flags,
        )

    def _start_error(self, failed: Failed) -> HsstoreError:
        if failed.usage:
            return UsageError(failed.reason, hint="use --engine transformers")
        if failed.missing_extra:
            return MissingExtraError(failed.reason, hint=extra_hint("extract"))
        return self._process.lost(f"did not start: {failed.reason}")

    def _probe(self) -> None:
        """Send one token the whole way. Hooks that do not run, or take other layers, show before any sample does."""
        files = {name: str(self._process.directory / f"probe.{name}") for name in self._layers}
        for path in files.values():
            with open(path, "wb") as file:
                file.truncate(2 * self._hidden_size)
        pending: dict[int, Pending] = {}
        self._send(Job(source_index=-1, input_ids=np.zeros(1, np.int32), row=0, files=files), pending)
        while (answer := self._next_answer(pending)) is None:
            pass
        entry, receipt = answer
        if receipt.error:
            raise self._process.lost(f"did not capture a probe of one token: {receipt.error}")
        if receipt.capture_points != self._points:
            raise UsageError(
                f"SGLang takes the states of this model after layers {receipt.capture_points}, expected {self._points}",
                hint="use --engine transformers",
            )
        self._arrivals.confirm(entry.target, receipt)

    def capture(self, jobs: Iterable[Job]) -> Iterator[Ticket]:
        """One request a sample, at most `in_flight` at a time; tickets in the order in which they are confirmed."""
        self._arrivals.forget()
        pending: dict[int, Pending] = {}
        for job in jobs:
            if reason := self._refusal(job):
                yield failed_ticket(job, reason)
                continue
            self._send(job, pending)
            while len(pending) >= self._in_flight:
                yield from self._tickets(pending)
        while pending:
            yield from self._tickets(pending)

    def close(self) -> None:
        """End the engine and every process of it. Safe to call again."""
        self._process.close()

    def _refusal(self, job: Job) -> str:
        """Why a job must not be sent; ids outside the vocabulary are refused by the engine's own hook."""
        n_tokens = len(job.input_ids)
        if n_tokens == 0:
            return "the sample is empty"
        if n_tokens > self.info.longest_tokens:
            return f"{n_tokens} tokens are more than the engine's longest prompt, {self.info.longest_tokens}"
        return ""

    def _send(self, job: Job, pending: dict[int, Pending], attempt: int = 1) -> None:
        target = Target(next(self._numbers), len(job.input_ids), job.row, job.files, self._columns)
        self._process.send(Request(target, np.ascontiguousarray(job.input_ids, "<i4").tobytes()))
        pending[target.request] = Pending(job=job, target=target, attempt=attempt)

    def _next_answer(self, pending: dict[int, Pending]) -> tuple[Pending, Receipt] | None:
        """The next answer; None for one that an abandoned `capture` asked for."""
        message = self._process.receive(self._stall_seconds)
        assert isinstance(message, Answer)
        entry = pending.pop(message.request, None)
        return None if entry is None else (entry, message.receipt)

    def _tickets(self, pending: dict[int, Pending]) -> Iterator[Ticket]:
        answer = self._next_answer(pending)
        if answer is None:
            return
        entry, receipt = answer
        if receipt.retry and entry.attempt < MAX_ATTEMPTS:
            self._send(entry.job, pending, entry.attempt + 1)
        elif receipt.error:
            yield failed_ticket(entry.job, receipt.error)
        else:
            assert receipt.n_rows == len(entry.job.input_ids)
            self._arrivals.confirm(entry.target, receipt)
            yield Ticket(source_index=entry.job.source_index, n_rows=receipt.n_rows, crc32c=receipt.crc32c)


def failed_ticket(job: Job, reason: str) -> Ticket:
    return Ticket(source_index=job.source_index, n_rows=0, crc32c={}, error=reason)
