"""Checkpoints of a run: written whole or not at all, refused when they belong to another run.

Responsible for: the directory, what is in it, which one is the latest, how many are kept, what a resumed run must
share with the one it continues. Leaves the tensors to `torch.distributed.checkpoint` and the cursor's meaning to
`schedule`.

    OUT/checkpoints/step_00000011/   state.json, .metadata, __0_0.distcp …
    OUT/checkpoints/latest           the newest one's name
    OUT/checkpoints/.saving-…        an attempt that a crash left; removed by the next save

A checkpoint is made under its temporary name, fsynced, renamed, and only then named by `latest`: `kill -9` at any
instant leaves the former one usable. Frozen weights are the verifier's and stay out; so is the random state, because
nothing in a step draws from it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint.state_dict_loader as dcp_loader
import torch.distributed.checkpoint.state_dict_saver as dcp_saver
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from hsstore import durable
from hsstore.errors import ConflictError, DamagedError, NotFoundError
from hsstore.records import canonical, check_format, decode
from trainer.distributed import Ranks
from trainer.options import TrainOptions, flag
from trainer.schedule import Cursor

FORMAT = 1
STATE = "state.json"
LATEST = "latest"
SAVING = ".saving-"
_PARTS = StateDictOptions(ignore_frozen_params=True, strict=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What a run was trained on: all of it must be equal when the run is resumed."""

    plan_id: str
    manifest_id: str
    capture_sha256: str
    """Of the store's capture record."""
    vocabulary_sha256: str
    """Of the draft vocabulary's maps."""
    verifier_sha256: str
    """Of the verifier's config.json."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainState:
    """state.json: everything of a run that is no tensor."""

    format: int = FORMAT
    step: int
    """Steps done."""
    cursor: Cursor
    tokens: int
    """Rows trained on so far, over all ranks."""
    identity: Identity
    options: dict[str, Any]
    """The pinned ones, by name."""
    world: int
    threads: int
    seconds: float
    """Time in training steps so far."""
    first: dict[str, float]
    """Validation before the first step, for the last line of the run."""
    last: dict[str, float]
    """Last validation."""
    validated_at: int
    """Step of the last validation."""
    files: dict[str, int] = dataclasses.field(default_factory=dict)
    """Bytes of each tensor file; filled in by `save`."""


def directory(out: str | Path) -> Path:
    return Path(out) / "checkpoints"


def latest(out: str | Path) -> Path | None:
    """The checkpoint to go on from: the one `latest` names, else the newest; None when there is none."""
    root = directory(out)
    complete = sorted(p for p in root.glob("step_*") if (p / STATE).is_file())
    try:
        named = root / (root / LATEST).read_text().strip()
    except FileNotFoundError:
        named = None
    if named in complete:
        return named
    return complete[-1] if complete else None


def read_state(path: Path) -> TrainState:
    """The state of a checkpoint whose tensor files are all there. Raises `DamagedError` naming what is not."""
    data = (path / STATE).read_bytes()
    check_format(data, path / STATE)
    state = decode(data, TrainState, path / STATE)
    for name, expected in state.files.items():
        found = (path / name).stat().st_size if (path / name).exists() else None
        if found != expected:
            what = "is missing" if found is None else f"has {found} bytes"
            raise DamagedError(
                f"{path / name} {what}, its checkpoint was saved with {expected}",
                hint=f"write the name of an older checkpoint into {path.parent / LATEST}",
            )
    return state


def check_resumable(path: Path, state: TrainState, identity: Identity, options: TrainOptions) -> None:
    """Raise `ConflictError` naming the first thing in which this run differs from the one that was saved."""
    hint = "resume with the former value, or start another run with another --out"
    for name, what in _IDENTITY.items():
        was, now = getattr(state.identity, name), getattr(identity, name)
        if was != now:
            raise ConflictError(f"{path} was trained with {what} {was[:16]}, this run has {now[:16]}", hint=hint)
    pinned = options.pinned()
    for name in sorted(pinned.keys() | state.options.keys()):
        was, now = state.options.get(name), pinned.get(name)
        if was != now:
            raise ConflictError(f"{path} was trained with {flag(name)} {was}, this run has {now}", hint=hint)


def save(
    out: str | Path,
    state: TrainState,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    ranks: Ranks,
    *,
    keep: int,
) -> Path:
    """Write a checkpoint; all ranks take part. The tensors are spread over the ranks' files."""
    root = directory(out)
    name = f"step_{state.step:08d}"
    building, final = root / f"{SAVING}{name}", root / name
    if ranks.first:
        durable.make_dirs(root.absolute())
        for leftover in root.glob(f"{SAVING}*"):
            shutil.rmtree(leftover)
        building.mkdir()
    ranks.barrier()
    model_part, optimizer_part = get_state_dict(model, optimizer, options=_PARTS)
    parts = {"model": model_part, "optimizer": optimizer_part}
    with _one_process_is_meant():
        dcp_saver.save(parts, storage_writer=FileSystemWriter(building), no_dist=ranks.world == 1)
    if ranks.first:
        _publish(building, final, state)
        _prune(root, keep)
    ranks.barrier()
    return final


def load(path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, ranks: Ranks) -> None:
    """Read the tensors back into model and optimizer, whatever number of ranks saved them."""
    model_part, optimizer_part = get_state_dict(model, optimizer, options=_PARTS)
    parts: dict[str, Any] = {"model": model_part, "optimizer": optimizer_part}
    with _one_process_is_meant():
        dcp_loader.load(parts, storage_reader=FileSystemReader(path), no_dist=ranks.world == 1)
    set_state_dict(
        model, optimizer, model_state_dict=parts["model"], optim_state_dict=parts["optimizer"], options=_PARTS
    )


def check_free(out: str | Path, *, resume: bool) -> None:
    """Raise `ConflictError` when a new run would mix its files with those of another one."""
    found = latest(out)
    if found is not None and not resume:
        raise ConflictError(
            f"{out} holds a run at {found.name}", hint="add --resume to continue it, or give another --out"
        )
    if resume and not Path(out).is_dir():
        raise NotFoundError(f"{out} does not exist, so there is nothing to resume", hint="leave out --resume")


def _publish(building: Path, final: Path, state: TrainState) -> None:
    files = {p.name: p.stat().st_size for p in sorted(building.iterdir())}
    for name in files:
        durable.fsync_file(building / name)
    durable.write_new(building / STATE, canonical(dataclasses.replace(state, files=files)))
    durable.fsync_dir(building)
    if final.exists():  # the same step saved again: equal content, so either may stay
        shutil.rmtree(final)
    os.rename(building, final)
    durable.fsync_dir(final.parent)
    durable.replace(final.parent / LATEST, final.name.encode() + b"\n")


def _prune(root: Path, keep: int) -> None:
    complete = sorted(p for p in root.glob("step_*") if (p / STATE).is_file())
    named = (root / LATEST).read_text().strip()
    for old in complete[:-keep]:
        if old.name != named:
            shutil.rmtree(old)


@contextlib.contextmanager
def _one_process_is_meant() -> Iterator[None]:
    """Silence torch's guess that a run of one rank has forgotten to start its process group."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        yield


_IDENTITY: Mapping[str, str] = {
    "manifest_id": "a store of manifest",
    "plan_id": "the plan",
    "capture_sha256": "states captured as",
    "vocabulary_sha256": "the draft vocabulary",
    "verifier_sha256": "a verifier of config",
}
