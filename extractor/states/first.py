"""The first samples of an extraction, checked before more is captured: GPU days must not go into wrong states.

    first = FirstSamples(model, capture)
    first.add(source_index, input_ids, loss_mask, {state: rows})     # as samples come in, until `first.ready`
    outcome = first.check()                                          # seconds; `outcome.damage` stops the run

Making one and adding samples costs a copy of some rows. `check` loads what it needs and lets go of everything, the
samples included. The head is always asked; transformers' forward runs on the CPU where the model is small enough for it
to take seconds, because the GPUs are the engine's. Leaves what happens then to `extractor.capture`.

Letters: T tokens, H hidden size.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from extractor.foreign.sample import Rows
from extractor.states.agreement import Agreement
from extractor.states.check import Options, Report, check, ids_of
from extractor.states.finding import Finding
from extractor.states.sample import Checked
from extractor.verifier import Verifier, read_verifier
from extractor.weights import tensor_shapes, weight_files
from extractor.words import counted
from hsstore.records import Capture

SAMPLES, MAX_TOKENS = 4, 512
_POSITIONS = 128
_PARAMETERS_A_CORE = 180_000_000
"""Two forwards of 4 × 512 tokens are 8,200 operations a parameter: 30 s at 50 GFLOP/s a core, as a CPU gives."""
_MEMORY_SHARE = 0.5
_SEEN = 8  # times the samples that are wanted: then those without assistant tokens have to do


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What the first samples show."""

    damage: tuple[Finding, ...]
    """Anything: the capture is wrong, stop."""
    notes: tuple[Finding, ...]
    """What was not checked and why, for people."""
    summary: str
    """One line of figures."""
    seconds: float


class FirstSamples:
    """Collects, then checks once."""

    def __init__(
        self,
        model: str | Path,
        capture: Capture,
        *,
        samples: int = SAMPLES,
        max_tokens: int = MAX_TOKENS,
        trust_remote_code: bool = False,
        threads: int | None = None,
    ) -> None:
        """Reads nothing. `threads` of the arithmetic in `check`; None = as many as there are cores."""
        self._model, self._capture = str(model), capture
        self._samples, self._max_tokens = samples, max_tokens
        self._trust_remote_code, self._threads = trust_remote_code, threads
        self._kept: list[Checked] = []
        self._seen = 0

    @property
    def ready(self) -> bool:
        """Whether enough is there; a run that ends before checks what there is."""
        full = len(self._kept) >= self._samples
        return full and (all(map(_speaks, self._kept)) or self._seen >= _SEEN * self._samples)

    def add(
        self,
        source_index: int,
        input_ids: npt.NDArray[np.int32],
        loss_mask: npt.NDArray[np.uint8],
        states: Mapping[str, Rows],
    ) -> bool:
        """Copy the beginning of a sample, if it is of use: ids [T], mask [T], bfloat16 rows [T, H] by state name.

        Returns `ready`. One without assistant tokens gives its place to one that has some.
        """
        if self.ready:
            return True
        self._seen += 1
        given = Checked(source_index=source_index, input_ids=input_ids, loss_mask=loss_mask, states=states)
        if len(self._kept) >= self._samples:
            silent = next((i for i, kept in enumerate(self._kept) if not _speaks(kept)), None)
            if silent is None or not np.any(loss_mask[1 : self._max_tokens]):
                return self.ready
            del self._kept[silent]
        self._kept.append(given.cut(self._max_tokens))
        return self.ready

    def check(self) -> Outcome:
        """Compare what was added with the verifier, and forget it. Without samples nothing is found.

        Raises `NotFoundError` or `UsageError` when the model directory is gone, `MissingExtraError` without torch.
        """
        started = time.monotonic()
        samples, self._kept = self._kept, []
        if not samples:
            return Outcome(damage=(), notes=(), summary="no sample to check", seconds=0.0)
        verifier = read_verifier(self._model)
        options = Options(
            positions=_POSITIONS,
            no_forward=_too_large(verifier),
            trust_remote_code=self._trust_remote_code,
            memory_share=_MEMORY_SHARE,
            threads=self._threads,
        )
        near = ids_of(samples)
        report = check(samples, verifier, self._capture, options, lambda _sample: near)
        return Outcome(
            damage=tuple(f for f in report.findings if f.severity == "damage"),
            notes=tuple(f for f in report.findings if f.severity == "note"),
            summary=_summary(samples, report),
            seconds=time.monotonic() - started,
        )


def _speaks(sample: Checked) -> bool:
    return bool(np.any(sample.loss_mask[1:]))


def _too_large(verifier: Verifier) -> str:
    """Why no forward is tried, "" when it takes seconds."""
    files = [file for file in weight_files(verifier.path) if file.suffix == ".safetensors"]
    n = sum(math.prod(shape) for file in files for shape in tensor_shapes(file).values())
    cores = len(os.sched_getaffinity(0))
    if n <= _PARAMETERS_A_CORE * cores:
        return ""
    what = f"{n / 1e9:,.2f} billion parameters are too many for {counted(cores, 'core')} in half a minute"
    return f"{what}; `hsstore verify states STORE --device cuda` runs it where they fit"


def _summary(samples: list[Checked], report: Report) -> str:
    parts = [f"{counted(len(samples), 'sample')}, {counted(sum(s.n_tokens for s in samples), 'token')}"]
    if report.agreement:
        parts.append(_head(report.agreement))
    if report.forward:
        worst = max(report.forward.layers, key=lambda layer: layer.relative / layer.relative_bound)
        parts.append(f"largest error {worst.relative:.4f} of {worst.relative_bound:.4f} ({worst.state})")
    return "; ".join(parts)


def _head(found: Agreement) -> str:
    return f"{found.declared:.1%} of {found.n} {found.over} predicted, chance {found.chance:.1%}"
