"""What every test relies on."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def interruptible() -> None:
    """A shell starts background jobs with SIGINT ignored, processes that tests start would inherit that: no Ctrl-C."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def state_of_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test writes into the ledger of the user who runs it; processes that tests start inherit this."""
    before = os.environ.get("HSSTORE_STATE_DIR")
    os.environ["HSSTORE_STATE_DIR"] = str(tmp_path_factory.mktemp("state"))
    yield
    if before is None:
        del os.environ["HSSTORE_STATE_DIR"]
    else:
        os.environ["HSSTORE_STATE_DIR"] = before
