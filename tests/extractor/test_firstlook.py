"""An engine that gives wrong states is found at the first samples, before a shard is committed."""

from __future__ import annotations

from typing import Any

import pytest

from extractor.engines.transformers import TransformersEngine
from tests.extractor.test_run import Cli, cli

__all__ = ["cli"]  # the fixture


@pytest.fixture
def shifted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row is that of the token before: digests, counts and tickets are all in order."""
    real = TransformersEngine._forward

    def forward(self: TransformersEngine, job: Any) -> Any:
        return {state: rows.roll(1, dims=0) for state, rows in real(self, job).items()}

    monkeypatch.setattr(TransformersEngine, "_forward", forward)


@pytest.mark.usefixtures("shifted")
def test_wrong_states_end_the_run_before_anything_is_committed(cli: Cli) -> None:
    assert cli() == 3
    assert "the first states are wrong" in cli.stderr
    assert "shifted" in cli.stderr
    assert not any((cli.out / "records").iterdir())
    assert not any((cli.out / "staging").iterdir())


@pytest.mark.usefixtures("shifted")
def test_the_look_can_be_left_out(cli: Cli) -> None:
    assert cli("--check-first", "0") == 0
    assert "first states" not in cli.stderr


def test_right_states_are_said_to_be(cli: Cli) -> None:
    """Also when the whole input has fewer samples than are asked for."""
    assert cli("--check-first", "100") == 0
    assert "the first states are right" in cli.stderr
    assert any((cli.out / "records").iterdir())
