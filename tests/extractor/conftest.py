"""Models of the extractor's tests, made once a session."""

from __future__ import annotations

from pathlib import Path

import pytest

from extractor.chat import ChatTokenizer
from extractor.quiet import transformers
from tests.extractor.tiny import byte_tokenizer, write_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch

    torch.set_num_threads(1)
    transformers()
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="session")
def smollm2_model() -> Path:
    from tests.models import smollm2

    return smollm2()


@pytest.fixture(scope="session")
def smollm2_chat(smollm2_model: Path) -> ChatTokenizer:
    return ChatTokenizer.load(smollm2_model)


@pytest.fixture(scope="session")
def byte_chat() -> ChatTokenizer:
    transformers()
    return ChatTokenizer(byte_tokenizer())
