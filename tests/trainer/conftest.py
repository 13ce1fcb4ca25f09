"""A verifier and a store for all trainer tests that train, made once."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.trainer import small_run


@dataclass(frozen=True)
class World:
    """What a small run needs."""

    verifier: Path
    store: Path
    model: Any
    """The verifier itself, in float32."""


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    root = tmp_path_factory.mktemp("world")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # imports of transformers
        model = small_run.write_model(root / "verifier")
    small_run.write_store(root / "store", root / "verifier", model)
    return World(root / "verifier", root / "store", model)


@pytest.fixture
def train(world: World, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Train in this process, as one rank: `train(out="a", lr=…)` → Outcome; torch's settings are put back."""
    import torch

    from trainer.interrupt import Stop
    from trainer.rank import run_rank

    threads = torch.get_num_threads()

    def run(out: str = "run", *, source: Any = None, stop: Stop | None = None, **changes: Any) -> Any:
        values = small_run.options(world.verifier, source or world.store, tmp_path / out, **changes)
        return run_rank(values, stop or Stop())

    yield run
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)
