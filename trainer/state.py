"""state.json of a checkpoint, and whether a run may go on from it.

Responsible for: everything of a checkpoint that is no tensor, which checkpoint is the latest, what a resumed run must
share with the one it continues. Free of torch, so a refusal takes no time. Leaves the tensors and the order of writing
to `checkpoint`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hsstore.digest import sha256_file
from hsstore.errors import ConflictError, DamagedError, LockedError, NotFoundError
from hsstore.records import load_sealed
from trainer.options import TrainOptions, flag
from trainer.schedule import Cursor

FORMAT = 1
STATE = "state.json"
LATEST = "latest"
METRICS = "metrics.jsonl"
LOCK = "run.lock"
_HINT = "resume with the former value, or start another run with another --out"


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
    weights_sha256: str
    """Of the verifier's tensors that the drafter holds: embedding, head rows of the draft vocabulary, norm."""


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
    files: dict[str, tuple[int, str]] = dataclasses.field(default_factory=dict)
    """(bytes, SHA-256) of each tensor file; filled in by `save`."""
    self_sha256: str = ""


def directory(out: str | Path) -> Path:
    return Path(out) / "checkpoints"


@contextlib.contextmanager
def alone(options: TrainOptions) -> Iterator[None]:
    """Be the only one who writes the run in `out`, which is made. Raises `LockedError` when there is another.

    The kernel drops the lock with the process, however that ends; ranks that outlive their launcher still hold it.
    """
    out = Path(options.out)
    _check_there(options)
    out.mkdir(parents=True, exist_ok=True)
    with open(out / LOCK, "ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LockedError(f"another run writes {out}", hint="wait for it to end, or give another --out") from None
        yield


def latest(out: str | Path) -> Path | None:
    """The checkpoint to go on from: the one `latest` names, else the newest; None when there never was one.

    Raises `DamagedError` when there was one that lost its state: to start over in silence would drop its metrics.
    """
    root = directory(out)
    complete = sorted(p for p in root.glob("step_*") if (p / STATE).is_file())
    try:
        name = (root / LATEST).read_bytes().decode(errors="replace").strip()
    except FileNotFoundError:
        return complete[-1] if complete else None
    if re.fullmatch(r"step_\d+", name):
        if root / name in complete:
            return root / name
        if (root / name).is_dir():
            raise DamagedError(f"{root / name} has no {STATE}", hint=_older(root))
    if not complete:
        hint = f"start another run with another --out, or remove {root} to start this one again"
        raise DamagedError(f"{root / LATEST} names {name[:40]!r}, and no checkpoint is there", hint=hint)
    return complete[-1]


def read_state(path: Path) -> TrainState:
    """The state of a checkpoint whose tensor files are all there. Raises `DamagedError` naming what is not."""
    hint = _older(path.parent)
    state = load_sealed(path / STATE, TrainState, hint=hint)
    for name, (expected, _) in state.files.items():
        found = (path / name).stat().st_size if (path / name).exists() else None
        if found != expected:
            what = "is missing" if found is None else f"has {found} bytes"
            raise DamagedError(f"{path / name} {what}, its checkpoint was saved with {expected}", hint=hint)
    return state


def check_files(path: Path, state: TrainState) -> None:
    """Read all tensor files. Raises `DamagedError` for the first whose bytes are not those that were saved."""
    for name, (_, expected) in state.files.items():
        if sha256_file(path / name) != expected:
            raise DamagedError(f"{path / name} does not match its SHA-256 in {STATE}", hint=_older(path.parent))


def _older(root: Path) -> str:
    return f"write the name of an older checkpoint into {root / LATEST}, or start another run with another --out"


def check_options(path: Path, state: TrainState, options: TrainOptions) -> None:
    """Raise `ConflictError` naming the first option in which this run differs from the one that was saved."""
    pinned = options.pinned()
    # The schedule decides which others count: the horizon of a constant one is not compared.
    for name in sorted(pinned.keys() | state.options.keys(), key=lambda name: (name != "schedule", name)):
        was, now = state.options.get(name), pinned.get(name)
        if was != now:
            raise ConflictError(f"{path} was trained with {flag(name)} {was}, this run has {now}", hint=_HINT)


def check_identity(path: Path, state: TrainState, identity: Identity) -> None:
    """Raise `ConflictError` naming the first thing in which data or verifier differ from what was trained on."""
    for name, what in _IDENTITY.items():
        was, now = getattr(state.identity, name), getattr(identity, name)
        if was != now:
            raise ConflictError(f"{path} was trained with {what} {was[:16]}, this run has {now[:16]}", hint=_HINT)


def to_resume(options: TrainOptions) -> tuple[Path, TrainState] | None:
    """The checkpoint that the options ask to go on from, or None to start at step 0.

    Raises `ConflictError` when `out` holds a run and nobody asked to resume it, or with other options.
    """
    path = latest(options.out)
    if not options.resume:
        if path is not None:
            hint = "add --resume to continue it, or give another --out"
            raise ConflictError(f"{options.out} holds a run at {path.name}", hint=hint)
        _refuse_metrics(Path(options.out) / METRICS)
        return None
    _check_there(options)
    if path is None:
        return None
    state = read_state(path)
    check_options(path, state, options)
    return path, state


def _check_there(options: TrainOptions) -> None:
    if options.resume and not Path(options.out).is_dir():
        raise NotFoundError(f"{options.out} does not exist, so there is nothing to resume", hint="leave out --resume")


def _refuse_metrics(file: Path) -> None:
    """A new run begins with an empty file: what somebody else wrote there must not go."""
    if file.exists() and (not file.is_file() or file.stat().st_size):
        raise ConflictError(
            f"{file} exists, and no checkpoint is there",
            hint="give another --out; or, for a run that ended before its first checkpoint, add --resume to repeat it",
        )


_IDENTITY = {
    "manifest_id": "a store of manifest",
    "plan_id": "the plan",
    "capture_sha256": "states captured as",
    "vocabulary_sha256": "the draft vocabulary",
    "verifier_sha256": "a verifier of config",
    "weights_sha256": "a verifier of weights",
}
