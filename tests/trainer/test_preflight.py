"""Store and verifier must be the same model, and a run that cannot start is refused in a sentence."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hsstore.errors import ConflictError, NotFoundError
from tests.trainer import small_run
from tests.trainer.conftest import World
from trainer.preflight import check_verifier, preflight
from trainer.verifier import read_config

# speculators pulls in extensions made with an old SWIG; nothing of ours.
pytestmark = pytest.mark.filterwarnings("ignore:builtin type .* has no __module__ attribute:DeprecationWarning")


def test_the_model_the_states_came_from_is_taken(world: World, tmp_path: Path) -> None:
    preflight(small_run.options(world.verifier, world.store, tmp_path / "run"))


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("hidden_size", 128, "hidden_size 128; .* has 64"),
        ("vocab_size", 999, "vocab_size 999; .* has 500"),
        ("n_layers", 32, "num_hidden_layers 32; .* has 6"),
        ("config_sha256", "0" * 64, "SHA-256 0000000000000000; .* has "),
        ("layers", ("final",), "holds the states final"),
        ("layers", ("after_2", "after_3"), "holds the states after_2, after_3"),
    ],
)
def test_another_model_is_refused_naming_both(world: World, field: str, value: object, said: str) -> None:
    """States of one model under the head of another give targets that look like targets."""
    capture = replace(small_run.capture_of(world.verifier), **{field: value})
    with pytest.raises(ConflictError, match=said):
        check_verifier(capture, read_config(world.verifier))


@pytest.mark.parametrize("what", ["verifier", "source", "draft_config"])
def test_what_does_not_exist_is_named(world: World, tmp_path: Path, what: str) -> None:
    missing = str(tmp_path / "missing")
    with pytest.raises(NotFoundError, match="missing"):
        preflight(
            small_run.options(**{"verifier": world.verifier, "source": world.store, "out": tmp_path, what: missing})
        )
