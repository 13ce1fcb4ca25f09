"""The sidecar of a run: what made these answers. Written before the first of them, complete at the end.

It says which model, input and parameters; which engines in which versions, one entry a run; and how many of what came
out. Responsible for what a resume must share with the run that it continues. Leaves digests to `extractor.input` and
the numbers to `run`.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from extractor.generate.scan import Scan
from extractor.generate.sources.base import SourceInfo
from extractor.modelfiles import json_object, read
from extractor.verifier import Verifier
from hsstore import __version__, durable
from hsstore.errors import ConflictError, FormatError, UsageError

FORMAT = "hsstore generate 1"
_IDENTITY = ("model", "input", "parameters")
_NAMES_ONLY = {"name", "revision", "lines", "bytes"}
"""A renamed model or file is no other one: digests decide."""
_OPTIONS = {"template_arguments": "--template-arg"}


def model_of(verifier: Verifier, weights_sha256: str, digest: Literal["full", "sampled", "none"]) -> dict[str, Any]:
    return {
        "name": verifier.name,
        "revision": verifier.revision,
        "architecture": verifier.architecture,
        "weights_sha256": weights_sha256,
        "weights_digest": digest,
        "config_sha256": verifier.config_sha256,
        "tokenizer_sha256": verifier.tokenizer_sha256,
        "chat_template_sha256": verifier.chat_template_sha256,
    }


def input_of(found: Scan) -> dict[str, Any]:
    return {"name": found.name, "sha256": found.sha256, "bytes": found.bytes, "lines": found.lines}


class Record:
    """The sidecar at `path`."""

    def __init__(self, path: Path, identity: dict[str, Any], runs: list[dict[str, Any]]) -> None:
        """`identity`: model, input and parameters of this run; `runs`: those before it."""
        self._path, self._identity, self._runs = path, identity, runs

    def begin(self, info: SourceInfo, given: dict[str, Any]) -> None:
        """Write down who answers from now on. Raises `ConflictError` when it is another model than before."""
        for run in self._runs:
            if isinstance(run, dict) and run.get("served") and info.served and run["served"] != info.served:
                raise ConflictError(
                    f"{self._path} was begun by another run, a resume would mix two: model at the servers:"
                    f" {run['served']} → {info.served}",
                    hint="give servers of the original model, or another --out",
                )
        entry = {"begun": _now(), "hsstore": __version__, "given": given} | asdict(info)
        self._runs.append(entry)
        self._write("running", {})

    def end(self, counts: dict[str, Any]) -> None:
        """The run came through."""
        if self._runs:
            self._runs[-1]["ended"] = _now()
        self._write("complete", counts)

    def _write(self, status: str, counts: dict[str, Any]) -> None:
        document = {"format": FORMAT, "status": status, **self._identity, "counts": counts, "runs": self._runs}
        durable.replace(self._path, json.dumps(document, indent=2, ensure_ascii=False).encode() + b"\n")


def load(path: Path) -> dict[str, Any] | None:
    """The sidecar of an earlier run, None without one. Raises `UsageError` or `FormatError` for what is none."""
    if not path.exists():
        return None
    document = json_object(read(path), path)
    if document.get("format") != FORMAT:
        raise FormatError(f"{path} is of format {document.get('format')!r}, expected {FORMAT!r}")
    shapes = {**dict.fromkeys(_IDENTITY, dict), "runs": list, "counts": dict}
    for name, shape in shapes.items():
        if not isinstance(document.get(name), shape):
            raise UsageError(f"{path}: {name} is missing or no {shape.__name__}", hint="give another --out")
    return document


def refuse_other(path: Path, old: dict[str, Any], new: dict[str, Any]) -> None:
    """Raise `ConflictError` naming every difference between two identities, if there is one."""
    lines = [
        f"{_label(part, name)}: {_show(before)} → {_show(now)}"
        for part in _IDENTITY
        for name in sorted({*old[part], *new[part]} - _NAMES_ONLY)
        if (before := old[part].get(name)) != (now := new[part].get(name))
    ]
    if lines:
        raise ConflictError(
            f"{path} was begun by another run, a resume would mix two: {'; '.join(lines)}",
            hint="give the original model, prompts and options, or another --out",
        )


def _label(part: str, name: str) -> str:
    if part == "parameters":
        return _OPTIONS.get(name, f"--{name.replace('_', '-')}")
    return "prompts file" if part == "input" else f"model's {name.replace('_sha256', '').replace('_', ' ')}"


def _show(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if len(text) == 64 and all(c in "0123456789abcdef" for c in text):
        return text[:12]
    return text or "none"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
