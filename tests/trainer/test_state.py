"""Which checkpoint a run goes on from, and what it refuses to go on from."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from hsstore.errors import ConflictError, DamagedError, FormatError, LockedError, NotFoundError
from hsstore.records import canonical, sealed, sha256_hex
from trainer.options import TrainOptions
from trainer.schedule import Cursor
from trainer.state import (
    Identity,
    TrainState,
    alone,
    check_files,
    check_identity,
    check_options,
    directory,
    latest,
    read_state,
    to_resume,
)

IDENTITY = Identity(
    plan_id="a" * 64,
    manifest_id="b" * 64,
    capture_sha256="c" * 64,
    vocabulary_sha256="d" * 64,
    verifier_sha256="e" * 64,
    weights_sha256="f" * 64,
)


def options(out: Path, **changes: Any) -> TrainOptions:
    return TrainOptions(**{"source": "store", "verifier": "model", "out": str(out), "resume": True, **changes})


def saved(out: Path, step: int, **changes: Any) -> Path:
    """A checkpoint with one tensor file of 3 bytes."""
    path = directory(out) / f"step_{step:08d}"
    path.mkdir(parents=True)
    (path / "__0_0.distcp").write_bytes(b"abc")
    state = TrainState(
        step=step,
        cursor=Cursor(epoch=0, bins_consumed=step),
        tokens=9,
        identity=IDENTITY,
        options=options(out).pinned(),
        world=1,
        threads=1,
        seconds=1.0,
        first={"loss_0": 3.0},
        last={},
        validated_at=0,
        files={"__0_0.distcp": (3, sha256_hex(b"abc"))},
    )
    (path / "state.json").write_bytes(canonical(sealed(replace(state, **changes))))
    return path


def test_a_state_survives_its_file(tmp_path: Path) -> None:
    path = saved(tmp_path, 3)
    state = read_state(path)
    assert (state.step, state.cursor, state.identity) == (3, Cursor(epoch=0, bins_consumed=3), IDENTITY)
    assert canonical(state) == (path / "state.json").read_bytes()


def test_latest_is_what_the_pointer_names_else_the_newest(tmp_path: Path) -> None:
    assert latest(tmp_path) is None
    first, second = saved(tmp_path, 3), saved(tmp_path, 7)
    assert latest(tmp_path) == second, "a crash between the rename and the pointer"
    (directory(tmp_path) / "latest").write_text("step_00000003\n")
    assert latest(tmp_path) == first
    (directory(tmp_path) / "latest").write_text("step_00000099\n")
    assert latest(tmp_path) == second, "a pointer to nothing"
    (second / "state.json").unlink()
    assert latest(tmp_path) == first, "a checkpoint without its state is none"


def test_a_running_save_is_no_checkpoint(tmp_path: Path) -> None:
    saved(tmp_path, 3).rename(directory(tmp_path) / ".saving-step_00000003")
    assert latest(tmp_path) is None


@pytest.mark.parametrize(("content", "said"), [(None, "is missing"), (b"ab", "has 2 bytes")])
def test_a_checkpoint_that_is_not_all_there_is_named(tmp_path: Path, content: bytes | None, said: str) -> None:
    path = saved(tmp_path, 3)
    file = path / "__0_0.distcp"
    file.unlink()
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(DamagedError, match=said) as caught:
        read_state(path)
    assert "__0_0.distcp" in caught.value.message
    assert "latest" in caught.value.hint


def test_a_checkpoint_of_another_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="format 2"):
        read_state(saved(tmp_path, 3, format=2))


@pytest.mark.parametrize("name", [field.name for field in fields(Identity)])
def test_other_data_is_refused_by_name(tmp_path: Path, name: str) -> None:
    """Going on with other data, maps or verifier trains without an error and serves nonsense."""
    path = saved(tmp_path, 3)
    state = read_state(path)
    check_identity(path, state, IDENTITY)
    with pytest.raises(ConflictError, match="0000000000000000"):
        check_identity(path, state, replace(IDENTITY, **{name: "0" * 64}))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"lr": 1e-4}, "--lr 3e-05, this run has 0.0001"),
        ({"seed": 7}, "--seed 0, this run has 7"),
        ({"epochs": 6}, "--epochs 5, this run has 6"),
        ({"train_head": False}, "--train-head True, this run has False"),
        ({"schedule": "constant", "epochs": 1}, "--schedule cosine, this run has constant"),
    ],
)
def test_another_option_is_refused_by_name(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    path = saved(tmp_path, 3)
    with pytest.raises(ConflictError) as caught:
        check_options(path, read_state(path), options(tmp_path, **change))
    assert said in caught.value.message


def test_what_does_not_change_the_numbers_may_change(tmp_path: Path) -> None:
    path = saved(tmp_path, 3)
    others = {"num_workers": 0, "log_every": 1, "source": "http://elsewhere", "nproc": 2, "keep": 9, "save_every": 1}
    assert to_resume(options(tmp_path, **others)) == (path, read_state(path))


def test_a_constant_schedule_may_go_on_for_longer(tmp_path: Path) -> None:
    path = saved(tmp_path, 3, options=options(tmp_path, schedule="constant").pinned())
    check_options(path, read_state(path), options(tmp_path, schedule="constant", epochs=50, max_steps=9))


def test_a_draft_config_counts_by_its_contents(tmp_path: Path) -> None:
    for name, text in (("a", "{}"), ("b", "{}"), ("c", "{ }")):
        (tmp_path / name).write_text(text)
    a, b, c = (options(tmp_path, draft_config=str(tmp_path / n)).pinned() for n in "abc")
    assert a == b
    assert a != c


def test_a_run_is_not_mixed_with_another(tmp_path: Path) -> None:
    saved(tmp_path, 3)
    with pytest.raises(ConflictError, match="step_00000003") as caught:
        to_resume(options(tmp_path, resume=False))
    assert "--resume" in caught.value.hint


def test_nothing_to_resume(tmp_path: Path) -> None:
    assert to_resume(options(tmp_path)) is None, "killed before the first checkpoint: start again"
    with pytest.raises(NotFoundError, match="nothing to resume"):
        to_resume(options(tmp_path / "nowhere"))


def test_a_flipped_bit_in_a_tensor_file_is_found(tmp_path: Path) -> None:
    """Its size says nothing, and it would train on as a weight."""
    path = saved(tmp_path, 3)
    check_files(path, read_state(path))
    (path / "__0_0.distcp").write_bytes(b"abb")
    with pytest.raises(DamagedError, match=r"__0_0\.distcp does not match its SHA-256") as caught:
        check_files(path, read_state(path))
    assert "older checkpoint" in caught.value.hint


@pytest.mark.parametrize("damage", [lambda b: b[:-20], lambda b: b.replace(b'"step":3', b'"step":4'), lambda b: b""])
def test_a_damaged_state_is_found(tmp_path: Path, damage: Any) -> None:
    path = saved(tmp_path, 3)
    file = path / "state.json"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(DamagedError, match=r"state\.json") as caught:
        read_state(path)
    assert "older checkpoint" in caught.value.hint


@pytest.mark.parametrize("named", [b"step_00000003", b"step_00000009", b"\xff\x00"])
def test_a_run_that_lost_its_checkpoint_does_not_start_over(tmp_path: Path, named: bytes) -> None:
    path = saved(tmp_path, 3)
    (path / "state.json").unlink()
    (path.parent / "latest").write_bytes(named)
    for resume in (True, False):
        with pytest.raises(DamagedError):
            to_resume(options(tmp_path, resume=resume))


def test_a_pointer_that_is_no_name_is_passed_over(tmp_path: Path) -> None:
    path = saved(tmp_path, 3)
    (path.parent / "latest").write_bytes(b"\xff\x00../")
    assert latest(tmp_path) == path


def test_metrics_of_somebody_else_are_not_emptied(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("5\n")
    with pytest.raises(ConflictError, match=r"metrics\.jsonl exists") as caught:
        to_resume(options(tmp_path, resume=False))
    assert "--resume" in caught.value.hint
    assert to_resume(options(tmp_path)) is None


def test_two_runs_do_not_write_one_directory(tmp_path: Path) -> None:
    mine = options(tmp_path / "run", resume=False)
    with alone(mine), pytest.raises(LockedError, match="another run writes"), alone(mine):
        pass
    with alone(mine):
        pass
