"""The first samples of a run, judged by the verifier's own weights before anything is committed.

Reads their rows back from the staged files, as they will be committed. Leaves the judgement to `extractor.states`.

Letters: T tokens of a sample, H hidden size.
"""

from __future__ import annotations

import os

import numpy as np
import numpy.typing as npt

from extractor.engines.base import Job
from extractor.settings import Settings
from extractor.states.first import FirstSamples
from hsstore.console import note
from hsstore.errors import DamagedError
from hsstore.records import Capture


class FirstLook:
    """A `FirstLook` (extractor.capture) by `FirstSamples`."""

    def __init__(self, settings: Settings, model: str, capture: Capture) -> None:
        self._row = capture.hidden_size
        self._samples = FirstSamples(
            model,
            capture,
            samples=settings.check_first,
            trust_remote_code=settings.trust_remote_code,
            threads=_threads(settings),
        )

    @property
    def satisfied(self) -> bool:
        return self._samples.ready

    def show(self, job: Job, loss_mask: npt.NDArray[np.uint8]) -> None:
        rows = {state: self._rows(path, job) for state, path in job.files.items()}
        self._samples.add(job.source_index, job.input_ids, loss_mask, rows)

    def check(self) -> None:
        """Raises `DamagedError` naming everything that is wrong."""
        outcome = self._samples.check()
        for finding in outcome.notes:
            note(f"first samples: {finding}")
        if outcome.damage:
            raise DamagedError(
                f"the first states are wrong: {'; '.join(map(str, outcome.damage))}",
                hint="nothing of them was committed. See that engine, --model and --layers are what they should be;"
                " --check-first 0 extracts all the same",
            )
        note(f"the first states are right: {outcome.summary} ({outcome.seconds:.1f} s)")

    def _rows(self, path: str, job: Job) -> npt.NDArray[np.uint16]:
        """[T, H] bfloat16 of a sample."""
        n_rows = len(job.input_ids)
        with open(path, "rb") as file:
            data = os.pread(file.fileno(), n_rows * self._row * 2, job.row * self._row * 2)
        return np.frombuffer(data, "<u2").reshape(n_rows, self._row)


def _threads(settings: Settings) -> int | None:
    """Of the run's own engine when it computes in this process: one number holds for all of it."""
    threads = settings.engine_options.get("threads", "")
    return int(threads) if threads.isdecimal() and int(threads) > 0 else None
