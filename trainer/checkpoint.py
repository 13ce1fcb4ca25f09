"""Checkpoints of a run: written whole or not at all.

Responsible for: the directory, the order of writing, how many are kept. Leaves the tensors to
`torch.distributed.checkpoint` and what is no tensor to `state`.

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
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint.state_dict_loader as dcp_loader
import torch.distributed.checkpoint.state_dict_saver as dcp_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from hsstore import durable
from hsstore.console import human_bytes
from hsstore.digest import sha256_file
from hsstore.errors import DamagedError, HsstoreError, NoSpaceError, from_os_error
from hsstore.records import canonical, sealed
from trainer.distributed import Ranks
from trainer.state import LATEST, STATE, TrainState, check_files, directory

SAVING = ".saving-"
_PARTS = StateDictOptions(ignore_frozen_params=True, strict=False)


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
        check_space(out, model)
        building.mkdir()
    ranks.barrier()
    model_part, optimizer_part = get_state_dict(model, optimizer, options=_PARTS)
    parts = {"model": model_part, "optimizer": optimizer_part}
    try:
        with _one_process_is_meant():
            dcp_saver.save(parts, storage_writer=FileSystemWriter(building), no_dist=ranks.world == 1)
    except CheckpointException as error:
        if ranks.first:
            shutil.rmtree(building, ignore_errors=True)
        raise _named(error, building) from error
    if ranks.first:
        _publish(building, final, state)
        _prune(root, keep)
    ranks.barrier()
    return final


def load(path: Path, state: TrainState, model: torch.nn.Module, optimizer: torch.optim.Optimizer, ranks: Ranks) -> None:
    """Read the tensors back into model and optimizer, whatever number of ranks saved them.

    Raises `DamagedError` for files that are not what was saved: a flipped bit would train on as a weight.
    """
    if ranks.first:
        check_files(path, state)
    ranks.barrier()
    model_part, optimizer_part = get_state_dict(model, optimizer, options=_PARTS)
    parts: dict[str, Any] = {"model": model_part, "optimizer": optimizer_part}
    try:
        with _one_process_is_meant():
            dcp_loader.load(parts, storage_reader=FileSystemReader(path), no_dist=ranks.world == 1)
    except (Exception, CheckpointException) as error:
        hint = f"write the name of an older checkpoint into {path.parent / LATEST}"
        raise DamagedError(f"{path} cannot be loaded: {_cause(error)}", hint=hint) from error
    set_state_dict(
        model, optimizer, model_state_dict=parts["model"], optim_state_dict=parts["optimizer"], options=_PARTS
    )


def check_space(out: str | Path, model: torch.nn.Module) -> None:
    """Raise `NoSpaceError` unless a checkpoint fits: weights and Adam's two moments, float32, trained parameters only.

    torch's writer answers a full disk with a failed assertion, so it is asked before.
    """
    needed = 12 * sum(p.numel() for p in model.parameters() if p.requires_grad)
    free = shutil.disk_usage(out).free
    if free < needed:
        raise NoSpaceError(
            f"a checkpoint needs {human_bytes(needed)}, {out} has {human_bytes(free)} free",
            hint="free some space, then continue with --resume; the checkpoints already there are whole",
        )


def _publish(building: Path, final: Path, state: TrainState) -> None:
    paths = sorted(building.iterdir())
    with ThreadPoolExecutor(4) as pool:  # hashlib releases the GIL
        digests = pool.map(sha256_file, paths)
        files = {p.name: (p.stat().st_size, digest) for p, digest in zip(paths, digests, strict=True)}
    for name in files:
        durable.fsync_file(building / name)
    durable.write_new(building / STATE, canonical(sealed(dataclasses.replace(state, files=files))))
    durable.fsync_dir(building)
    if final.exists():  # of a run that went on from an older checkpoint; out of the way without a long gap
        os.rename(final, building.with_name(building.name + ".former"))
    os.rename(building, final)
    durable.fsync_dir(final.parent)
    durable.replace(final.parent / LATEST, final.name.encode() + b"\n")


def _prune(root: Path, keep: int) -> None:
    complete = sorted(p for p in root.glob("step_*") if (p / STATE).is_file())
    named = (root / LATEST).read_text().strip()
    for old in complete[:-keep]:
        if old.name != named:
            shutil.rmtree(old)


def _named(error: CheckpointException, where: Path) -> HsstoreError:
    """What stopped a save, as one of our errors. torch's class is no `Exception` and hides the cause."""
    causes = [cause for cause, _ in error.failures.values()]
    for cause in causes:
        if isinstance(cause, OSError):
            return from_os_error(OSError(cause.errno, cause.strerror, cause.filename or str(where)))
    return HsstoreError(f"saving {where} failed: {causes[0] if causes else error}")


def _cause(error: BaseException) -> str:
    """One line of what torch met."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"


@contextlib.contextmanager
def _one_process_is_meant() -> Iterator[None]:
    """Silence torch's guess that a run of one rank has forgotten to start its process group."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        yield
