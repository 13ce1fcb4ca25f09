"""Store and verifier must be the same model, and a run that cannot start is refused in a sentence."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from hsstore.errors import ConflictError, NotFoundError, UsageError
from tests.trainer import small_run
from tests.trainer.conftest import World
from trainer import preflight as preflight_module
from trainer.preflight import check_verifier, check_weights, preflight
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


def test_other_weights_under_the_same_config_are_refused(world: World, tmp_path: Path) -> None:
    """A finetune has the sizes and the config.json of its origin, and other states."""
    other = tmp_path / "other"
    small_run.write_model(other, seed=1)
    capture = small_run.capture_of(world.verifier)
    check_verifier(capture, read_config(other))
    with pytest.raises(ConflictError, match=f"weights of SHA-256 {capture.weights_sha256[:16]}; those in .*other have"):
        check_weights(capture, read_config(other))


def test_weights_digested_by_samples_are_compared_so(world: World) -> None:
    check_weights(
        replace(small_run.capture_of(world.verifier), flags={"weights_digest": "sampled"}), read_config(world.verifier)
    )


@pytest.mark.parametrize("why", ["are not read for that", "there are none"])
def test_weights_that_cannot_be_compared_are_said(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], why: str
) -> None:
    other = Path(shutil.copytree(world.verifier, tmp_path / "other"))
    monkeypatch.setattr(preflight_module, "MOST_BYTES_TO_DIGEST", 1)
    if why == "there are none":
        (other / "model.safetensors").unlink()
    check_weights(small_run.capture_of(world.verifier), read_config(other))
    assert why in capsys.readouterr().err


def test_another_tokenizer_is_refused(world: World, tmp_path: Path) -> None:
    other = Path(shutil.copytree(world.verifier, tmp_path / "other"))
    (other / "tokenizer.json").write_text("{}")
    with pytest.raises(ConflictError, match="a tokenizer of SHA-256 2222222222222222"):
        check_verifier(small_run.capture_of(world.verifier), read_config(other))


@pytest.mark.parametrize("change", [{"seed": 1 << 63}, {"max_seq_len": 1 << 21}])
def test_what_no_plan_can_be_made_of_is_refused_early(world: World, tmp_path: Path, change: dict[str, int]) -> None:
    with pytest.raises(UsageError):
        preflight(small_run.options(world.verifier, world.store, tmp_path / "run", **change))


def test_a_directory_is_no_draft_config(world: World, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is a directory"):
        preflight(small_run.options(world.verifier, world.store, tmp_path / "run", draft_config=str(tmp_path)))
