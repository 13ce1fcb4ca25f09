"""The real SGLang engine on SmolLM2, once in float32 and once in bfloat16, and what to compare its states with.

Engines are module-scoped: one dtype a test module, one engine at a time.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from extractor.engines.base import Job, Ticket
from extractor.engines.sglang import SglangEngine
from hsstore.digest import crc32c
from tests.models import smollm2

if TYPE_CHECKING:
    from tests.extractor.sglang.families import Family
    from tests.extractor.sglang.table import Reference

LAYERS = ("after_2", "after_15", "after_27", "final")
HIDDEN = 576
CHUNK_TOKENS = 64
OPTIONS = {"device": "cpu", "chunked_prefill_size": CHUNK_TOKENS, "max_total_tokens": 512, "in_flight": 16}


@pytest.fixture(scope="session")
def model() -> Path:
    return smollm2()


@pytest.fixture(scope="session")
def one_thread() -> Iterator[None]:
    """One thread a process: with two on two busy cores each waits for the other, and all takes ten times as long."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="package")
def start(one_thread: None) -> Iterator[Callable[..., SglangEngine]]:
    """Start an engine of a tiny model in float32, forked from a process that has SGLang imported."""
    from tests.extractor.sglang import table
    from tests.extractor.sglang.zygote import Zygote

    engines: list[SglangEngine] = []

    def go(model: Path, layers: tuple[int, ...] = table.LAYERS, **options: Any) -> SglangEngine:
        names = table.names(layers)
        engines.append(SglangEngine(model, layers=names, dtype="float32", options={**table.OPTIONS, **options}))
        return engines[-1]

    with Zygote() as zygote, zygote.used(pytest.MonkeyPatch):
        yield go
        for engine in engines:
            engine.close()


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Family], tuple[Path, Reference]]:
    """Checkpoint and reference of a family, made once."""
    from tests.extractor.sglang.families import build
    from tests.extractor.sglang.table import Reference

    known: dict[str, tuple[Path, Reference]] = {}

    def get(family: Family) -> tuple[Path, Reference]:
        if family.name not in known:
            directory = tmp_path_factory.mktemp("family") / "model"
            known[family.name] = directory, Reference(build(family, directory))
        return known[family.name]

    return get


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The table of families, when some of it was made."""
    from tests.extractor.sglang import table

    if table.RESULTS:
        terminalreporter.section(f"states of the SGLang engine against transformers, float32, bound {table.BOUND}")
        for line in table.lines(table.RESULTS):
            terminalreporter.write_line(line)


@pytest.fixture(scope="module")
def float32_engine(model: Path, one_thread: None) -> Iterator[SglangEngine]:
    engine = SglangEngine(model, layers=LAYERS, dtype="float32", options=OPTIONS)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def bfloat16_engine(model: Path, one_thread: None) -> Iterator[SglangEngine]:
    engine = SglangEngine(model, layers=LAYERS, dtype="bfloat16", options=OPTIONS)
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def samples(model: Path) -> list[np.ndarray]:
    """24 samples of real text, 1 to 150 tokens, in no order of length; half are longer than a chunk."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(model)
        text = Path(argparse.__file__).read_text()[:20000]
        ids = np.asarray(tokenizer(text, verbose=False)["input_ids"], np.int32)
    lengths = [1, 64, 65, 63, 128, 129, 150, 2, 100, 17, 90, 33, 149, 5, 70, 48, 110, 80, 9, 66, 140, 3, 75, 27]
    starts = np.random.default_rng(7).integers(0, len(ids) - 150, len(lengths))
    return [ids[start : start + n] for start, n in zip(starts, lengths, strict=True)]


class Staged:
    """Staged files as the writer makes them: full size, sparse; with gaps between the samples."""

    GAP = 3

    def __init__(
        self,
        directory: Path,
        samples: Sequence[np.ndarray],
        layers: Sequence[str] = LAYERS,
        hidden_size: int = HIDDEN,
    ) -> None:
        self.rows = sum(len(ids) + self.GAP for ids in samples)
        self.hidden_size = hidden_size
        self.files = {name: str(directory / name) for name in layers}
        for path in self.files.values():
            with open(path, "wb") as file:
                file.truncate(self.rows * hidden_size * 2)
        self.jobs, row = [], self.rows
        for index, ids in enumerate(samples):  # the first sample lies last
            row -= len(ids) + self.GAP
            self.jobs.append(Job(source_index=1000 + index, input_ids=ids, row=row, files=self.files))

    def states(self, name: str, job: Job) -> np.ndarray:
        """uint16 [T, H]"""
        return self.all(name)[job.row : job.row + len(job.input_ids)]

    def all(self, name: str) -> np.ndarray:
        return np.fromfile(self.files[name], np.uint16).reshape(self.rows, self.hidden_size)


def error_of(rows: np.ndarray, reference: np.ndarray) -> float:
    """Relative error over all rows."""
    return float(np.linalg.norm(rows - reference) / np.linalg.norm(reference))


def errors(staged: Staged, reference: dict[str, np.ndarray]) -> dict[str, float]:
    """Relative error by state, over all rows of all samples."""
    return {
        name: error_of(np.concatenate([float32(staged.states(name, job)) for job in staged.jobs]), reference[name])
        for name in LAYERS
    }


def assert_true(tickets: list[Ticket], staged: Staged) -> None:
    """One ticket a job, its digests those of the rows in the files."""
    assert sorted(t.source_index for t in tickets) == sorted(j.source_index for j in staged.jobs)
    jobs = {job.source_index: job for job in staged.jobs}
    for ticket in tickets:
        job = jobs[ticket.source_index]
        assert (ticket.error, ticket.n_rows) == ("", len(job.input_ids))
        assert ticket.crc32c == {name: crc32c(staged.states(name, job).tobytes()) for name in staged.files}


def float32(rows: np.ndarray) -> np.ndarray:
    """bfloat16 bits as numbers."""
    return (rows.astype(np.uint32) << 16).view(np.float32)


@pytest.fixture(scope="session")
def references(model: Path, samples: list[np.ndarray]) -> dict[str, dict[str, np.ndarray]]:
    """float32 [rows of all samples, H] by state, by dtype in which transformers computed it."""
    return {dtype: _forward(model, samples, dtype) for dtype in ("float32", "bfloat16")}


def _forward(model: Path, samples: list[np.ndarray], dtype: str) -> dict[str, np.ndarray]:
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import AutoModelForCausalLM

        network = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()
    states: dict[str, list[np.ndarray]] = {name: [] for name in LAYERS}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.inference_mode():
        for ids in samples:
            hidden = network(torch.from_numpy(ids.astype(np.int64))[None], output_hidden_states=True).hidden_states
            for name in LAYERS:
                k = -1 if name == "final" else int(name.removeprefix("after_"))
                states[name].append(hidden[k][0].float().numpy())
    torch.set_num_threads(threads)
    return {name: np.concatenate(parts) for name, parts in states.items()}
