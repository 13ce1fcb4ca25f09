from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from hsstore.store import Store
from tests.stores import Sample, make_samples, make_store

LENGTHS = [5, 30, 2, 17, 60, 33, 8, 9, 40, 12, 64, 3, 22, 1, 48, 51, 7, 19, 36, 28]


@pytest.fixture(scope="session")
def samples() -> list[Sample]:
    return make_samples(LENGTHS, layers=("after_2", "after_3", "final"))


@pytest.fixture(scope="session")
def shared_store(samples: list[Sample], tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A complete store that no test changes."""
    return make_store(tmp_path_factory.mktemp("shared") / "store", samples)


@pytest.fixture
def store_path(shared_store: Store, tmp_path: Path) -> Path:
    """A complete store of its own for a test that damages it; a copy, because nothing of a copy waits for the disk."""
    return Path(shutil.copytree(shared_store.root, tmp_path / "store"))
