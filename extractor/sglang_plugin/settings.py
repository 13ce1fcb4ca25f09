"""How the engine is to be run, from options as text (`--engine-option name=value`) or as values.

Responsible for their names, types and defaults. Leaves to `flags` which of SGLang's own may be given, to `host` what
depends on device and model family.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from extractor.sglang_plugin.flags import check_free, check_values
from hsstore.errors import UsageError

DTYPES = ("auto", "bfloat16", "float16", "float32")


class SglangSettings(msgspec.Struct, frozen=True, kw_only=True):
    device: str = "auto"
    """`auto` (CUDA when there is some), `cpu` or `cuda`."""
    tp: int = 1
    """Tensor-parallel ranks: one model over several devices."""
    dp: int = 1
    """Data-parallel ranks: copies of the model, each on `tp` devices; samples are spread over them."""
    max_total_tokens: int | None = None
    """Size of the KV cache in tokens."""
    chunked_prefill_size: int | None = None
    """Most tokens of one forward; -1 turns chunks off."""
    in_flight: int = 64
    """Requests sent and not yet answered; the engine forms its batches from them."""
    log_level: str = "error"
    """SGLang's; with `info` or `debug` its log goes to the terminal, else into a file shown when it fails."""
    start_seconds: float = 3600.0
    """How long the engine may take to load."""
    stall_seconds: float = 900.0
    """How long it may say nothing while it works."""
    confirm_seconds: float = 300.0
    """How long captured rows may take to their files."""
    flags: dict[str, Any] = {}
    """Further keyword arguments of `sglang.Engine`."""


OPTIONS = tuple(name for name in SglangSettings.__struct_fields__ if name != "flags")


def parse_options(options: Mapping[str, Any], *, captures: bool = True) -> SglangSettings:
    """Ours by name, every other option a flag of SGLang. Raises `UsageError` for a wrong value or a reserved flag.

    Without `captures` flags are free that only a capture rests on.
    """
    ours = {name: value for name, value in options.items() if name in OPTIONS}
    flags = {name.replace("-", "_"): _value(value) for name, value in options.items() if name not in OPTIONS}
    if captures:
        check_free(flags)
        check_values(flags)
    try:
        settings = msgspec.convert({**ours, "flags": flags}, SglangSettings, strict=False)
    except msgspec.ValidationError as error:
        raise UsageError(f"an option of the sglang engine is wrong: {error}") from None
    if settings.device not in ("auto", "cpu", "cuda"):
        raise UsageError(f"device is auto, cpu or cuda for the sglang engine, found {settings.device!r}")
    if min(settings.in_flight, settings.tp, settings.dp) < 1:
        raise UsageError("in_flight, tp and dp are at least 1")
    if settings.chunked_prefill_size == 0:
        raise UsageError("chunked_prefill_size is the most tokens of one forward, or -1 for no chunks, found 0")
    return settings


def _value(value: Any) -> Any:
    """A flag's text as JSON when it is some (`true`, `0.8`, `[1, 2]`), else as it is."""
    if not isinstance(value, str):
        return value
    try:
        return msgspec.json.decode(value)
    except msgspec.DecodeError:
        return value


def layer_numbers(layers: Sequence[str], n_layers: int) -> tuple[int, ...]:
    """k of each `after_k` in the names, ascending. Raises `UsageError` for a state that SGLang cannot deliver."""
    numbers = set()
    for name in layers:
        match = re.fullmatch(r"after_(\d+)|final", name)
        if match is None:
            raise UsageError(f"no state is called {name!r}; expected after_1 … after_{n_layers - 1} or final")
        if match[1] is None:
            continue
        k = int(match[1])
        if not 1 <= k < n_layers:
            what = "the embedding" if k == 0 else f"the model has {n_layers} layers"
            raise UsageError(
                f"SGLang cannot capture {name} ({what}); it offers after_1 … after_{n_layers - 1} and final",
                hint="leave it out, or use --engine transformers",
            )
        numbers.add(k)
    return tuple(sorted(numbers))
