"""One rank, in this process: exact resume, both roads, stops, failures."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hsstore import source
from hsstore.client import Patience, ServiceClient
from hsstore.errors import ConflictError, DamagedError, HsstoreError, LockedError, ServiceError
from hsstore.store import Store
from tests.server.live import serving
from tests.trainer import small_run
from tests.trainer.conftest import World
from trainer import checkpoint, step
from trainer.interrupt import Stop
from trainer.state import alone, directory, latest, read_state

# speculators pulls in extensions made with an old SWIG; nothing of ours.
pytestmark = pytest.mark.filterwarnings("ignore:builtin type .* has no __module__ attribute:DeprecationWarning")

Train = Callable[..., Any]
SHORT = {"max_steps": 8, "save_every": 3}


def lines(tmp_path: Path, out: str = "run") -> list[dict[str, Any]]:
    return small_run.lines(tmp_path / out)


def test_a_run_learns_and_says_what_it_did(train: Train, tmp_path: Path) -> None:
    outcome = train(epochs=2)
    found = lines(tmp_path)
    steps = [x for x in found if x["kind"] == "train"]
    validations = [x for x in found if x["kind"] == "validation"]
    assert outcome.status == "finished"
    assert [x["step"] for x in steps] == list(range(1, outcome.total_steps + 1))
    assert [x["step"] for x in validations] == [0, outcome.total_steps // 2, outcome.total_steps]
    assert validations[-1]["loss_0"] < 0.8 * validations[0]["loss_0"]
    assert outcome.first["loss_0"] == validations[0]["loss_0"]
    assert outcome.last["loss_0"] == validations[-1]["loss_0"]
    assert outcome.tokens == sum(x["rows"] for x in steps)
    first = steps[0]
    assert {f"{kind}_{k}" for kind in ("loss", "full_acc", "cond_acc") for k in range(3)} <= first.keys()
    assert first["loss"] == pytest.approx(first["loss_0"] + first["loss_1"] + first["loss_2"])
    assert first["acceptance_length"] == 1 + first["full_acc_0"] + first["full_acc_1"] + first["full_acc_2"]
    assert latest(tmp_path / "run") == Path(outcome.checkpoint)


@pytest.mark.parametrize("workers", [0, 2])
def test_stopped_and_resumed_is_never_stopped(train: Train, tmp_path: Path, workers: int) -> None:
    """Exact, to the last bit of every number: order, noise, optimizer, schedule and metrics all take part in it."""
    train(out="whole", **SHORT)
    assert train(out="parts", stop_at=5, num_workers=workers, **SHORT).status == "paused"
    assert train(out="parts", resume=True, num_workers=workers, **SHORT).status == "finished"
    assert lines(tmp_path, "parts") == lines(tmp_path, "whole")
    assert len(lines(tmp_path, "whole")) == 8 + 2


def test_a_store_that_grew_is_resumed_in_the_state_it_was_trained_on(
    train: Train, world: World, tmp_path: Path
) -> None:
    """Other samples would change every plan: the run goes on, to the bit, on those that it began with."""
    root = tmp_path / "growing"
    small_run.write_store(root, world.verifier, world.model, stop=4)
    before = Store.open(root)
    train(out="whole", source=root, **SHORT)
    train(out="parts", source=root, stop_at=5, **SHORT)
    small_run.write_store(root, world.verifier, world.model)
    after = Store.open(root)
    assert after.totals.n_samples > before.totals.n_samples > 0
    outcome = train(out="parts", source=root, resume=True, **SHORT)
    assert (outcome.status, outcome.manifest_id) == ("finished", before.manifest_id)
    assert lines(tmp_path, "parts") == lines(tmp_path, "whole")
    assert train(out="new", source=root, **SHORT).manifest_id == after.manifest_id


def test_a_state_that_is_not_kept_any_more_is_refused(train: Train, world: World, tmp_path: Path) -> None:
    root = tmp_path / "growing"
    small_run.write_store(root, world.verifier, world.model, stop=4)
    train(out="parts", source=root, stop_at=5, **SHORT)
    (root / "manifests" / f"{Store.open(root).manifest_id}.json").unlink()
    small_run.write_store(root, world.verifier, world.model)
    with pytest.raises(ConflictError, match="another state"):
        train(out="parts", source=root, resume=True, **SHORT)


def test_reading_by_pread_trains_the_same_drafter(train: Train, tmp_path: Path) -> None:
    train(out="mmap", **SHORT)
    train(out="pread", backend="pread", verify_reads="always", **SHORT)
    assert lines(tmp_path, "pread") == lines(tmp_path, "mmap")


class Killed(BaseException):
    """Stands for SIGKILL: nothing of ours catches it."""


def test_killed_between_checkpoints_the_steps_since_are_made_again(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(out="whole", **SHORT)
    original = step.update

    def dies(setup: Any, batch: Any, counted: int, rate: float) -> Any:
        if len(lines(tmp_path, "killed")) == 1 + 5:
            raise Killed
        return original(setup, batch, counted, rate)

    with monkeypatch.context() as patch:
        patch.setattr(step, "update", dies)
        with pytest.raises(Killed):
            train(out="killed", **SHORT)
    assert [x["step"] for x in lines(tmp_path, "killed")] == [0, 1, 2, 3, 4, 5], "two steps beyond the checkpoint"
    train(out="killed", resume=True, **SHORT)
    assert lines(tmp_path, "killed") == lines(tmp_path, "whole")


@pytest.mark.parametrize("where", ["dcp_saver.save", "_publish", "durable.replace"])
def test_killed_while_saving_the_former_checkpoint_is_used(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """At any instant of a save: before its files, before its name, before the pointer."""
    train(out="whole", **SHORT)
    owner = checkpoint
    for name in where.split(".")[:-1]:
        owner = getattr(owner, name)
    original, calls = getattr(owner, where.split(".")[-1]), []

    def dies(*arguments: Any, **named: Any) -> Any:
        if where != "durable.replace" or arguments[0].name == "latest":
            calls.append(where)
            if len(calls) == 2:
                raise Killed
        return original(*arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(owner, where.split(".")[-1], dies)
        with pytest.raises(Killed):
            train(out="killed", **SHORT)
    assert latest(tmp_path / "killed") == directory(tmp_path / "killed") / "step_00000003"
    train(out="killed", resume=True, **SHORT)
    assert lines(tmp_path, "killed") == lines(tmp_path, "whole")
    assert not list(directory(tmp_path / "killed").glob(".saving*")), "what the kill left is cleared away"


def test_the_two_roads_train_the_same_drafter(train: Train, world: World, tmp_path: Path) -> None:
    train(out="mmap", **SHORT)
    with serving(world.store) as live:
        train(out="http", source=live.url, verify_reads="always", **SHORT)
    assert lines(tmp_path, "http") == lines(tmp_path, "mmap")


def test_a_service_that_dies_ends_the_run_with_a_sentence(
    train: Train, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the service's own error, and not a step lost; not a hang, not a thread's traceback."""
    hurried = partial(ServiceClient, patience=Patience(attempts=2, total_seconds=2.0))
    monkeypatch.setattr(source, "ServiceClient", hurried)
    original = step.update
    with serving(world.store) as live:

        def dies(*arguments: Any) -> Any:
            if len(lines(tmp_path)) == 1 + 4:
                live.server.should_exit = True
                live.server.force_exit = True
                live.service.close()
            return original(*arguments)

        monkeypatch.setattr(step, "update", dies)
        with pytest.raises(ServiceError, match=r"http://127\.0\.0\.1"):
            train(source=live.url, epochs=50, num_workers=2)
    saved = latest(tmp_path / "run")
    assert saved is not None
    assert read_state(saved).step == lines(tmp_path)[-1]["step"] >= 4


def test_a_stop_saves_and_says_so(train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(out="whole", **SHORT)
    stop, original = Stop(), step.update

    def asked(*arguments: Any) -> Any:
        stop.requested = len(lines(tmp_path, "stopped")) == 1 + 3
        return original(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(step, "update", asked)
        outcome = train(out="stopped", stop=stop, **SHORT)
    assert (outcome.status, outcome.step) == ("interrupted", 4)
    assert read_state(Path(outcome.checkpoint)).step == 4
    train(out="stopped", resume=True, **SHORT)
    assert lines(tmp_path, "stopped") == lines(tmp_path, "whole")


def test_a_stop_in_a_validation_leaves_the_validation_to_be_made(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(out="whole", max_steps=4, validate_every=2)
    stop, original = Stop(), step.evaluate

    def asked(*arguments: Any) -> Any:
        stop.requested = len(lines(tmp_path, "stopped")) > 1
        return original(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(step, "evaluate", asked)
        assert train(out="stopped", stop=stop, max_steps=4, validate_every=2).step == 2
    train(out="stopped", resume=True, max_steps=4, validate_every=2)
    assert lines(tmp_path, "stopped") == lines(tmp_path, "whole")


def test_only_the_last_checkpoints_are_kept(train: Train, tmp_path: Path) -> None:
    train(max_steps=6, save_every=1, keep=3)
    assert sorted(p.name for p in directory(tmp_path / "run").glob("step_*")) == [
        "step_00000004",
        "step_00000005",
        "step_00000006",
    ]


def test_frozen_weights_are_not_in_a_checkpoint(train: Train, tmp_path: Path) -> None:
    """At full size that is 14.3 GB instead of 17."""
    from torch.distributed.checkpoint import FileSystemReader

    outcome = train(max_steps=1)
    names = FileSystemReader(outcome.checkpoint).read_metadata().state_dict_metadata.keys()
    assert any("fc.weight" in n for n in names)
    assert not [n for n in names if "embed_tokens" in n or "verifier_" in n]


def test_a_checkpoint_that_torch_cannot_read_is_damaged(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(max_steps=2, stop_at=1)
    path = latest(tmp_path / "run")
    assert path is not None
    file = next(path.glob("*.distcp"))
    file.write_bytes(bytes(file.stat().st_size))
    with pytest.raises(DamagedError, match="does not match its SHA-256"):
        train(max_steps=2, resume=True)
    monkeypatch.setattr(checkpoint, "check_files", lambda path, state: None)
    with pytest.raises(DamagedError, match="cannot be loaded"):
        train(max_steps=2, resume=True)


def test_a_directory_that_another_run_writes_is_refused(train: Train, world: World, tmp_path: Path) -> None:
    with alone(small_run.options(world.verifier, world.store, tmp_path / "run")), pytest.raises(LockedError):
        train(max_steps=1)


def test_only_the_epochs_that_are_reached_are_planned(train: Train, world: World, tmp_path: Path, capsys: Any) -> None:
    outcome = train(max_steps=1, epochs=100_000)
    assert (outcome.step, outcome.total_steps) == (1, 1)
    assert "1 step to step 1 in 1 epoch by 1 rank" in capsys.readouterr().err


def test_zero_takes_the_whole_vocabulary(train: Train) -> None:
    assert train(max_steps=1, draft_vocab=0).draft_vocab == small_run.VOCAB


def test_another_state_of_the_store_is_refused(train: Train, world: World, tmp_path: Path) -> None:
    small_run.write_store(tmp_path / "other", world.verifier, world.model, n_samples=13)
    train(max_steps=1)
    with pytest.raises(ConflictError, match="another state of the store"):
        train(max_steps=1, resume=True, source=tmp_path / "other")


def test_a_gradient_that_is_no_number_stops_the_run(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the weights have taken it in; the samples are named."""
    original = step.forward

    def broken(net: Any, batch: Any, drafter: Any) -> Any:
        loss, pairs = original(net, batch, drafter)
        return (loss * float("nan") if loss.requires_grad and len(lines(tmp_path)) == 1 + 3 else loss), pairs

    monkeypatch.setattr(step, "forward", broken)
    with pytest.raises(HsstoreError, match=r"norm is nan; the loss is nan on samples \d+"):
        train(**SHORT)
    assert read_state(latest(tmp_path / "run")).step == 3


def test_a_store_without_validation_samples_is_said(train: Train, world: World, capsys: Any, tmp_path: Path) -> None:
    small_run.write_store(tmp_path / "plain", world.verifier, world.model, n_samples=12, validation_fraction=0.0)
    outcome = train(source=tmp_path / "plain", max_steps=2)
    assert (outcome.first, outcome.last) == ({}, {})
    assert "no validation samples" in capsys.readouterr().err


def test_the_file_of_metrics_is_json_lines(train: Train, tmp_path: Path) -> None:
    train(max_steps=1)
    for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    shutil.rmtree(tmp_path / "run")
