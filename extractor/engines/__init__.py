"""Choosing an engine: by name, or the best one that is installed. Imports nothing heavy before it must."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from extractor.engines.base import Engine, Transfer
from extractor.tokens import token_of
from hsstore.errors import MissingExtraError, UsageError, extra_hint

ENGINES = ("sglang", "transformers")
_EXTRAS = {"sglang": "extract", "transformers": "hf"}


def choose_engine(asked: str, of_store: str = "", urls: Sequence[str] = ()) -> str:
    """`auto` → the engine the store was begun with, else sglang when it is installed, else transformers.

    Servers at `urls` are SGLang's, whatever is installed here. Raises `MissingExtraError` for one that is not.
    """
    if urls:
        if asked not in ("auto", "sglang"):
            raise UsageError(f"--url names servers of SGLang, --engine {asked} is none", hint="leave --engine out")
        return "sglang"
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
    urls: Sequence[str] = (),
    transfer: Transfer = "auto",
    token_file: Path | None = None,
) -> Engine:
    """Load the verifier, or ask the servers at `urls` for it.

    `layers` are state names (`after_2` … `final`), `options` the engine's settings as text. `transfer` says how rows
    come from servers; their token is in `token_file`, else in HSSTORE_TOKEN.
    """
    if urls:
        from extractor.engines.http import HttpEngine

        token = token_of(token_file, os.environ)
        return HttpEngine(model, urls, layers=layers, dtype=dtype, transfer=transfer, token=token, options=options)
    if name == "sglang":
        from extractor.engines.sglang import SglangEngine

        return SglangEngine(model, layers=layers, dtype=dtype, trust_remote_code=trust_remote_code, options=options)
    from extractor.engines.transformers import TransformersEngine

    return TransformersEngine(model, layers=layers, dtype=dtype, trust_remote_code=trust_remote_code, options=options)
