"""hsstore-export.json: what an exported directory was made from, written before its first file.

By it an export goes on where it stopped, and only from the same state of the same store; and an import of such a
directory need not be told layers, norm and model again. The projects' own readers pass over it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hsstore import durable
from hsstore.errors import ConflictError
from hsstore.records import FORMAT, Capture, canonical, load_sealed, sealed

NAME = "hsstore-export.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportRecord:
    """hsstore-export.json, hashing itself as a store's records do."""

    format: int
    target: str
    """Format of the directory."""
    manifest_id: str
    """State of the store it was made from."""
    options: dict[str, str]
    """What was asked for that decides its contents, by option."""
    capture: Capture
    """What its states are, after all that was done to them."""
    self_sha256: str = ""


def make(target: str, manifest_id: str, options: dict[str, str], capture: Capture) -> ExportRecord:
    return sealed(ExportRecord(format=FORMAT, target=target, manifest_id=manifest_id, options=options, capture=capture))


def find(root: Path) -> ExportRecord | None:
    """The record of a directory, if it was exported. Raises `DamagedError` for one that was changed."""
    path = root / NAME
    return (
        load_sealed(path, ExportRecord, hint=f"remove {NAME}, and say by options what it says")
        if path.is_file()
        else None
    )


def begin(root: Path, record: ExportRecord) -> None:
    """Make the directory, or find the same export begun in it. Raises `ConflictError` for anything else."""
    if root.exists() and not root.is_dir():
        raise ConflictError(f"{root} is a file, expected a directory", hint="give another --out")
    old = find(root)
    if old is None:
        if root.exists() and any(root.iterdir()):
            raise ConflictError(f"{root} holds something else than an export", hint="give an empty or a new --out")
        durable.make_dirs(root.absolute())
        durable.write_new(root / NAME, canonical(record))
    elif old != record:
        raise ConflictError(
            f"{root} is another export: {'; '.join(_differences(old, record))}", hint="give another --out"
        )


def _differences(old: ExportRecord, new: ExportRecord) -> list[str]:
    pairs = [("format", old.target, new.target), ("manifest", old.manifest_id[:12], new.manifest_id[:12])]
    names = sorted({*old.options, *new.options})
    pairs += [(f"--{name}", old.options.get(name, ""), new.options.get(name, "")) for name in names]
    return [f"{name} {a or 'none'} → {b or 'none'}" for name, a, b in pairs if a != b] or ["another capture"]
