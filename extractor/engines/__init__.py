"""Choosing an engine: by name, or the best one that is installed. Imports nothing heavy before it must."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from extractor.engines.base import Engine
from hsstore.errors import MissingExtraError, UsageError, extra_hint

ENGINES = ("sglang", "transformers")
_SGLANG_OWN = ("device", "max_total_tokens", "chunked_prefill_size", "tp", "in_flight", "log_level", "start_seconds")
_EXTRAS = {"sglang": "extract", "transformers": "hf"}


def choose_engine(asked: str, of_store: str = "") -> str:
    """`auto` → the engine the store was begun with, else sglang when it is installed, else transformers.

    Raises `MissingExtraError` for one that is not installed.
    """
    if asked == "auto":
        asked = of_store or next((name for name in ENGINES if find_spec(name)), "transformers")
    if asked not in ENGINES:
        raise UsageError(f"there is no engine {asked!r}, expected auto, {' or '.join(ENGINES)}")
    missing = [package for package in (asked, "torch") if find_spec(package) is None]
    if missing:
        raise MissingExtraError(f"the {asked} engine needs {missing[0]}", hint=extra_hint(_EXTRAS[asked]))
    return asked


def start_engine(
    name: str,
    model: Path,
    *,
    layers: tuple[str, ...],
    dtype: str,
    trust_remote_code: bool = False,
    options: Mapping[str, str] | None = None,
) -> Engine:
    """Load the verifier. `layers` are state names (`after_2` … `final`), `options` the engine's settings as text."""
    settings = dict(options or {})
    if name == "sglang":
        from extractor.engines.sglang import SglangEngine

        return SglangEngine(model, layers=layers, dtype=dtype, **_sglang_arguments(settings, trust_remote_code))
    from extractor.engines.transformers import TransformersEngine

    return TransformersEngine(model, layers=layers, dtype=dtype, trust_remote_code=trust_remote_code, options=settings)


def _sglang_arguments(options: dict[str, str], trust_remote_code: bool) -> dict[str, Any]:
    """Options the engine class names itself; every other one is a flag of SGLang's ServerArgs."""
    values = {name.replace("-", "_"): _value(text) for name, text in options.items()}
    own = {name: values.pop(name) for name in _SGLANG_OWN if name in values}
    flags = values | ({"trust_remote_code": True} if trust_remote_code else {})
    return {**own, "flags": flags}


def _value(text: str) -> Any:
    """`3` → 3, `true` → True, `{"a": 1}` → a dict; anything that is no JSON stays text."""
    try:
        return json.loads(text)
    except ValueError:
        return text
