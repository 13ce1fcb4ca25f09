"""Choosing who answers: running servers, or an engine of our own. Imports nothing heavy before it must."""

from __future__ import annotations

from extractor.chat import ChatTokenizer
from extractor.engines import choose_engine
from extractor.generate.settings import Sampling, Settings
from extractor.generate.sources.base import Source
from extractor.verifier import Verifier


def name_of(settings: Settings) -> str:
    """`servers`, `sglang` or `transformers`. Raises `MissingExtraError` for what is not installed."""
    return "servers" if settings.urls else choose_engine(settings.engine)


def start_source(name: str, settings: Settings, verifier: Verifier, chat: ChatTokenizer, sampling: Sampling) -> Source:
    """Ready to answer. Raises `UsageError` for what it cannot do, `IncompleteError` when it does not come up."""
    if name == "servers":
        from extractor.generate.sources.servers import Servers

        return Servers(settings, verifier, chat, sampling)
    if name == "sglang":
        from extractor.generate.sources.sglang import Sglang

        return Sglang(settings, verifier, chat, sampling)
    from extractor.generate.sources.transformers import Transformers

    return Transformers(settings, verifier, chat, sampling)
