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
from typing import Any

import numpy as np

from extractor.engines.base import EngineInfo, Job, Ticket
from extractor.engines.receipts import columns_of, failed_ticket, good_ticket, refusal
from extractor.sglang_plugin.arrivals import Arrivals
from extractor.sglang_plugin.process import EngineProcess
from extractor.sglang_plugin.protocol import Answer, Failed, Ready, Receipt, Request, Start, Target
from extractor.sglang_plugin.settings import DTYPES, SglangSettings, layer_numbers, parse_options
from extractor.verifier import Verifier, read_verifier
from hsstore.errors import HsstoreError, MissingExtraError, UsageError, extra_hint

CPU_POOL_TOKENS = (16384, 32768)  # least and most for the KV cache on a CPU, unless the caller wants another size


@dataclass(frozen=True, slots=True, kw_only=True)
class Pending:
    """A job whose answer has not come."""

    job: Job
    target: Target


class SglangEngine:
    """An `Engine` (extractor.engines.base) that owns one SGLang engine process."""

    def __init__(
        self,
        model_path: str | Path,
        *,
        layers: Sequence[str],
        dtype: str = "auto",
        trust_remote_code: bool = False,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """Start the engine and see one token through. `options`: those of `SglangSettings`, or flags of SGLang.

        Raises `UsageError` for what cannot be captured, `IncompleteError` when the engine does not come up.
        """
        if find_spec("sglang") is None:
            raise MissingExtraError("the sglang engine needs the package sglang", hint=extra_hint("extract"))
        if dtype not in DTYPES:
            raise UsageError(f"dtype {dtype!r} is unknown, expected {', '.join(DTYPES)}")
        settings = parse_options(options or {})
        verifier = read_verifier(str(model_path))
        self._layers = tuple(layers)
        self._points = layer_numbers(layers, verifier.n_layers) or (1,)  # SGLang gives `final` only beside another
        self._columns = columns_of(self._points)
        self._row_bytes = 2 * verifier.hidden_size
        self._settings = settings
        self._numbers = itertools.count()
        self._n_ranks = 1
        self._process = EngineProcess(
            self._start(verifier, settings, dtype, trust_remote_code), log_level=settings.log_level
        )
        self._arrivals = Arrivals(
            self._process.write_errors, row_bytes=self._row_bytes, seconds=settings.confirm_seconds
        )
        try:
            self.info = self._started(self._process.receive(settings.start_seconds))
            for rank in range(self._n_ranks):
                self._probe(rank)
            self._process.came_up()
        except BaseException:  # Ctrl-C included
            self._process.close()
            raise

    def _start(self, verifier: Verifier, settings: SglangSettings, dtype: str, trust_remote_code: bool) -> Start:
        arguments = {
            "model_path": str(verifier.path),
            "dtype": dtype,
            "trust_remote_code": trust_remote_code,
            "tp_size": settings.tp,
            "dp_size": settings.dp,
            "skip_tokenizer_init": True,
            "enable_return_aux_hidden_states": True,
            "disable_radix_cache": True,  # cached tokens have no states; where it is on, no prompt shares any (salt)
            "log_level": settings.log_level,
            "chunked_prefill_size": settings.chunked_prefill_size,
            "max_total_tokens": settings.max_total_tokens,
            **settings.flags,
        }
        return Start(
            engine={name: value for name, value in arguments.items() if value is not None},
            layers=self._points,
            architecture=verifier.architecture,
            device=settings.device,
            cpu_pool_tokens=cpu_pool_tokens(verifier),
        )

    def _started(self, message: object) -> EngineInfo:
        if isinstance(message, Failed):
            raise self._start_error(message)
        assert isinstance(message, Ready)
        self._n_ranks = message.n_ranks
        return EngineInfo(
            engine="sglang",
            version=message.version,
            norm="post",
            compute_dtype=message.compute_dtype,
            longest_tokens=message.longest_tokens,
            flags=message.flags,
        )

    def _start_error(self, failed: Failed) -> HsstoreError:
        if failed.usage:
            return UsageError(failed.reason, hint=failed.hint)
        if failed.missing_extra:
            return MissingExtraError(failed.reason, hint=extra_hint("extract"))
        return self._process.lost(f"failed with {failed.reason}")

    def _probe(self, rank: int) -> None:
        """Send one token through a rank. Hooks that do not run, or take other layers, show before any sample does."""
        files = {name: str(self._process.directory / f"probe.{name}") for name in self._layers}
        for path in files.values():
            with open(path, "wb") as file:
                file.truncate(self._row_bytes)
        pending: dict[int, Pending] = {}
        self._send(Job(source_index=-1, input_ids=np.zeros(1, np.int32), row=0, files=files), pending, rank)
        while (answer := self._next_answer(pending)) is None:
            pass
        entry, receipt = answer
        if receipt.error:
            raise self._process.lost(f"failed on a probe of one token, {receipt.error},")
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
            if reason := refusal(job, self.info.longest_tokens):
                yield failed_ticket(job, reason, retry=False)
                continue
            self._send(job, pending)
            while len(pending) >= self._settings.in_flight:
                yield from self._tickets(pending)
        while pending:
            yield from self._tickets(pending)

    def close(self) -> None:
        """End the engine and every process of it. Safe to call again."""
        self._process.close()

    def _send(self, job: Job, pending: dict[int, Pending], rank: int | None = None) -> None:
        target = Target(next(self._numbers), len(job.input_ids), job.row, job.files, self._columns)
        self._process.send(Request(target, np.ascontiguousarray(job.input_ids, "<i4").tobytes(), rank))
        pending[target.request] = Pending(job=job, target=target)

    def _next_answer(self, pending: dict[int, Pending]) -> tuple[Pending, Receipt] | None:
        """The next answer; None for one that an abandoned `capture` asked for."""
        message = self._process.receive(self._settings.stall_seconds)
        assert isinstance(message, Answer)
        entry = pending.pop(message.request, None)
        return None if entry is None else (entry, message.receipt)

    def _tickets(self, pending: dict[int, Pending]) -> Iterator[Ticket]:
        answer = self._next_answer(pending)
        if answer is None:
            return
        entry, receipt = answer
        if receipt.error:
            yield failed_ticket(entry.job, receipt.error)
        else:
            self._arrivals.confirm(entry.target, receipt)
            yield good_ticket(entry.job, receipt, confirmed=True)


def cpu_pool_tokens(verifier: Verifier) -> int:
    """Size of the KV cache on a CPU: the longest context, within reason."""
    least, most = CPU_POOL_TOKENS
    return max(least, min(verifier.context_tokens, most))
