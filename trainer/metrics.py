"""Counts of a step, summed over ranks before anything is divided; the lines they become.

Responsible for: adding, dividing, the simulated acceptance length, the JSONL file (whole lines, cut back on resume)
and the console line. Leaves the counting to speculators' model.

Letters: K TTT steps.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hsstore import durable
from trainer.distributed import Ranks

Floats = dict[str, tuple[float, float]]
"""(sum, total) by metric name, e.g. `full_acc_0` → (right rows, counted rows)."""


def add(sums: Floats, more: Mapping[str, tuple[float, float]]) -> None:
    """Add `more` to `sums` in place."""
    for name, (value, total) in more.items():
        a, b = sums.get(name, (0.0, 0.0))
        sums[name] = (a + value, b + total)


def over_ranks(own: Floats, ranks: Ranks, names: Sequence[str]) -> dict[str, float]:
    """Σ sum / Σ total over all ranks by name, in the order of `names`; NaN where nothing was counted."""
    flat = ranks.sum_floats([x for name in names for x in own.get(name, (0.0, 0.0))])
    return {name: flat[2 * i] / flat[2 * i + 1] if flat[2 * i + 1] else math.nan for i, name in enumerate(names)}


def names(ttt_steps: int) -> list[str]:
    """Every metric of K steps, in the order they are printed."""
    return [f"{kind}_{k}" for kind in ("loss", "full_acc", "cond_acc") for k in range(ttt_steps)]


def acceptance_length(ratios: Mapping[str, float], ttt_steps: int) -> float:
    """Simulated: 1 + Σ_k full_acc_k, tokens per verifier pass under greedy decoding over the draft vocabulary."""
    return 1.0 + sum(ratios[f"full_acc_{k}"] for k in range(ttt_steps))


class JsonLines:
    """An append-only file of one JSON document per line. Only rank 0 has one."""

    def __init__(self, path: Path, *, keep_to_step: int) -> None:
        """Open, dropping what comes after `keep_to_step` (a resumed run makes it again) and a torn last line."""
        self.path = path
        kept = _lines_to(path, keep_to_step) if path.exists() else []
        durable.replace(path, b"".join(kept))
        self._file = open(path, "ab")  # noqa: SIM115 (closed by `close`)

    def write(self, document: Mapping[str, Any]) -> None:
        clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in document.items()}
        self._file.write(json.dumps(clean).encode() + b"\n")
        self._file.flush()

    def sync(self) -> None:
        """Make what was written durable, before a checkpoint says it happened."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def _lines_to(path: Path, step: int) -> list[bytes]:
    kept = []
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            document = json.loads(line)
        except ValueError:
            break  # torn by a kill; whatever a checkpoint vouches for was fsynced before it
        step_of = document.get("step") if isinstance(document, dict) else None
        if not isinstance(step_of, int) or step_of > step or not line.endswith(b"\n"):
            break
        kept.append(line)
    return kept


def console_line(ratios: Mapping[str, float], ttt_steps: int) -> str:
    """`loss_0 3.112 full_acc_0 0.231 · loss_1 … cond_acc_1 0.190 · … · accept 1.34`."""
    parts = []
    for k in range(ttt_steps):
        kinds = ("loss", "full_acc", "cond_acc") if k else ("loss", "full_acc")  # at step 0 the two are one
        parts.append(" ".join(f"{kind}_{k} {_number(ratios[f'{kind}_{k}'])}" for kind in kinds))
    return " · ".join([*parts, f"accept {acceptance_length(ratios, ttt_steps):.2f}"])


def _number(value: float) -> str:
    return f"{value:.3f}" if math.isfinite(value) else "–"
