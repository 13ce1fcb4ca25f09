"""Entry point of SGLang's group `sglang.srt.plugins`: keeps the states of the requests that ask for it.

Runs in every process of the engine; the capture itself happens in the scheduler processes. A request opts in with
`return_hidden_states=True` and a `Target` in its `custom_params`; its answer then carries a `Receipt` and no numbers.
No exception leaves a hook, since one would end the scheduler: it becomes the receipt's error. Leaves places and digests
to `capture`, the disk to `writer`.
"""

from __future__ import annotations

import functools
import logging
import multiprocessing
import os
import socket
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from extractor.sglang_plugin import CAPTURE_VARIABLE, ERRORS_VARIABLE, SPOOL_VARIABLE, targets
from extractor.sglang_plugin.capture import Capture
from extractor.sglang_plugin.delivery import Delivery
from extractor.sglang_plugin.protocol import KEY, Receipt, Target, WriteError
from extractor.sglang_plugin.spool import Spool, is_ticket
from extractor.sglang_plugin.writer import RowWriter

logger = logging.getLogger(__name__)

_capture_points: tuple[int, ...] = ()


def register() -> None:
    """Attach the hooks when asked to. A moved target ends the process: SGLang would only log an ordinary exception."""
    if os.environ.get(CAPTURE_VARIABLE) != "1":
        return
    problems = targets.moved_targets()
    serves = SPOOL_VARIABLE in os.environ and multiprocessing.parent_process() is None
    if serves:
        problems += targets.moved_targets(targets.SERVER_PARAMETERS)
    if problems:
        raise SystemExit(f"hsstore's capture hooks do not fit this SGLang: {'; '.join(problems)}")
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(targets.APPEND_PREFILL, append_prefill, HookType.AROUND)
    HookRegistry.register(targets.APPEND_DECODE, append_decode, HookType.AROUND)
    HookRegistry.register(targets.COPY_TO_CPU, copy_to_cpu, HookType.BEFORE)
    HookRegistry.register(targets.VALIDATE, validate, HookType.BEFORE)
    HookRegistry.register(targets.CONFIGURE, note_capture_points, HookType.AROUND)
    if serves:  # the process that answers HTTP
        from extractor.sglang_plugin.routes import attach

        HookRegistry.register(targets.RUN_SERVER, attach, HookType.BEFORE)


def append_prefill(
    original: Callable[..., int],
    self: Any,
    *,
    req: Any,
    logits_output: Any,
    hidden_state_offset: int,
    capture_hidden_mode: Any,
    extend_input_len: int,
    store: bool = True,
) -> int:
    """Take this request's rows out of the batch. Called for every chunk; `store` is True for the last one."""
    if not (capture_hidden_mode.is_full() and _is_ours(req)):
        return original(
            self,
            req=req,
            logits_output=logits_output,
            hidden_state_offset=hidden_state_offset,
            capture_hidden_mode=capture_hidden_mode,
            extend_input_len=extend_input_len,
            store=store,
        )
    end = hidden_state_offset + extend_input_len
    try:
        if _is_writer_rank():
            _take(req, logits_output, hidden_state_offset, end, store)
    except Exception as error:  # one sample must not end the scheduler
        logger.exception("capture of request %s failed", req.rid)
        _fail(req, error)
    return end


def append_decode(original: Callable[..., None], *, req: Any, hidden_states: Any, start: int, accept_len: int) -> None:
    """Drop the states of generated tokens: a sample is its prompt."""
    if not _is_ours(req):
        original(req=req, hidden_states=hidden_states, start=start, accept_len=accept_len)


def copy_to_cpu(self: Any, return_logprob: bool, return_hidden_states: bool = True) -> None:
    """Overlap scheduling: SGLang copies `hidden_states` off the device in this method, but not `last_hidden_states`."""
    output = self.logits_output
    if not return_hidden_states or output is None or output.last_hidden_states is None:
        return
    from sglang.srt.managers.utils import _async_d2h

    output.last_hidden_states = _async_d2h(output.last_hidden_states)


def validate(self: Any, obj: Any, input_ids: Sequence[int] | None) -> None:
    """Refuse what ends the whole engine in 0.5.23: an empty prompt inside a batch, an id outside the vocabulary."""
    if input_ids is None:
        return
    if len(input_ids) == 0:
        raise ValueError("the prompt is empty")
    vocab_size = self.model_config.vocab_size
    lowest, highest = min(input_ids), max(input_ids)
    if lowest < 0 or highest >= vocab_size:
        raise ValueError(f"token id {lowest if lowest < 0 else highest} lies outside the vocabulary of {vocab_size}")


def note_capture_points(original: Callable[..., None], *, model: Any, **arguments: Any) -> None:
    """Remember where the loaded model really takes its states: the meaning of the ids asked for differs by family."""
    global _capture_points
    original(model=model, **arguments)
    found = (getattr(module, "layers_to_capture", None) for module in model.modules())
    points = {int(layer) for layers in found for layer in layers or ()}
    _capture_points = tuple(sorted(points))


def _is_ours(req: Any) -> bool:
    params = req.sampling_params.custom_params
    return req.return_hidden_states is True and isinstance(params, dict) and KEY in params


def _is_writer_rank() -> bool:
    """Every tensor-parallel rank holds the same full rows; the one that answers the request writes them."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    return bool(parallel.attn_tp_rank == 0 and parallel.attn_cp_rank == 0)


def _take(req: Any, logits_output: Any, start: int, end: int, store: bool) -> None:
    capture = getattr(req, "hsstore_capture", None)
    if capture is None:
        target = Target.from_params(req.sampling_params.custom_params)
        assert target is not None
        _refuse_foreign(target)
        capture = req.hsstore_capture = Capture(target)
    # A request retracted after its prefill is prefilled again; its rows are already on their way.
    if capture.done or req.is_retracted or (req.finished() and req.inflight_middle_chunks <= 0):
        return
    if logits_output.last_hidden_states is None:
        raise RuntimeError("the engine delivered no final states; enable_return_aux_hidden_states must be on")
    capture.add(
        logits_output.hidden_states[start:end].to("cpu"),
        logits_output.last_hidden_states[start:end].to("cpu"),
        _writer().put,
    )
    if store:
        receipt = capture.receipt(
            prompt_tokens=len(req.origin_input_ids), cached_tokens=req.cached_tokens, points=_capture_points
        )
        _answer(req, receipt)


def _fail(req: Any, error: Exception) -> None:
    """Put the error into the answer, and take no further chunk of this request."""
    capture = getattr(req, "hsstore_capture", None)
    if capture is not None:
        capture.done = True
    _answer(req, Receipt(0, {}, _capture_points, error=f"{type(error).__name__}: {error}"))


def _answer(req: Any, receipt: Receipt) -> None:
    if req.customized_info is None:
        req.customized_info = {}
    req.customized_info[KEY] = [msgspec.to_builtins(receipt)]


@functools.cache
def _writer() -> RowWriter:
    """The one writer of this scheduler process, started by the first row."""
    if (spool := os.environ.get(SPOOL_VARIABLE)) is None:
        return RowWriter(_report)
    delivery = Delivery(Spool.of(spool))
    return RowWriter(delivery.report, write=delivery.write, sweep=delivery.sweep)


def _refuse_foreign(target: Target) -> None:
    """A server writes only what its rules for clients cover; an engine's own process has no clients."""
    if (SPOOL_VARIABLE in os.environ) != is_ticket(target.ticket):
        raise ValueError("a request to a server has a ticket, one to an engine of one's own has none")


def _report(error: WriteError) -> None:
    """Tell the parent of a failed write. The receipt has left already, so this is the only way."""
    logger.error("request %d: writing %s failed: %s", error.request, error.path, error.reason)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
            channel.setblocking(False)  # a full channel already carries errors enough
            channel.sendto(msgspec.json.encode(error), os.environ[ERRORS_VARIABLE])
    except OSError as failure:
        logger.error("and could not be reported: %s", failure)
