"""Every family on the real engine, by the ways in which prompts reach it: relative errors against transformers.

Responsible for the prompts of each way, for running them, and for the table of what came out. Leaves checkpoints to
`families`, how engines start to `zygote`, the bound and its assertion to `test_families`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from extractor.engines.base import Ticket
from extractor.engines.sglang import SglangEngine
from hsstore.errors import IncompleteError, UsageError
from tests.extractor.sglang.conftest import Staged, assert_true, error_of, float32
from tests.extractor.sglang.families import CONTEXT, FAMILIES, GPT_OSS, HIDDEN, VOCABULARY, Family

BOUND = 0.003
"""Of the relative error: rounding to bfloat16 alone, which the stored rows have undergone, gives 0.0017."""

CHUNK = 64
POOL = 1024
LONGEST = CONTEXT - 7
LAYERS = (2, 4, 6)
TRAP_LAYERS = ((2, 3, 5), (3, 4, 6))
"""k whose 0-based layer ids begin with 1, and k whose ids do not: under EAGLE3's rule they mean different things."""
OPTIONS: Mapping[str, Any] = {
    "device": "cpu",
    "chunked_prefill_size": CHUNK,
    "max_total_tokens": POOL,
    "in_flight": 32,
}

ANY = "any"
PLAIN = "plain"
MIXED = "mixed batch"
CHUNKED = f"longer than chunked_prefill_size {CHUNK}"
SHARED = "shared prefixes, cache on"
TP = "tp 2"
DP = "dp 2"
WAYS = (PLAIN, MIXED, CHUNKED, SHARED, TP, DP)


Start = Callable[..., SglangEngine]
"""Model directory, layers, options → the engine, running."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One line of the table."""

    family: str
    architecture: str
    way: str
    backend: str = ""
    rows: int = 0
    errors: Mapping[str, float]
    """Relative error over all rows, by state."""
    worst: float = 0.0
    """Largest error of one state of one sample."""
    reason: str = ""
    """Why nothing was compared."""


RESULTS: list[Cell] = []
"""What this process has compared, for the summary of a test run."""


def _bases() -> np.ndarray:
    return np.random.default_rng(11).integers(0, VOCABULARY, (16, LONGEST)).astype(np.int32)


def prompts(way: str) -> list[np.ndarray]:
    """Prompts of a way; no two have a row in common unless they share a prefix on purpose."""
    base = _bases()
    if way == PLAIN:
        return [base[0][:20], base[1][:64], base[2][:1]]
    if way == MIXED:  # the long one keeps the engine busy while the others queue up behind it
        lengths = (200, 17, 3, 60, 33, 1, 48, 9, 25, 64, 40, 5, 12, 30, 2)
        return [ids[:n] for ids, n in zip(base, lengths, strict=False)]
    if way == CHUNKED:
        return [ids[:n] for ids, n in zip(base, (LONGEST, 65, 128, 129, 200), strict=False)]
    if way == SHARED:
        tails = [base[i][:n] for i, n in ((6, 10), (7, 30), (8, 1), (9, 80))]
        prefixed = [np.concatenate([base[5][:48], tail]) for tail in tails]
        return [*prefixed, prefixed[1], prefixed[1][:60], base[5][:48]]
    lengths = (150, 64, 65, 1, 33, 90, 20, 120, 7, 77)
    return [ids[:n] for ids, n in zip(base, lengths, strict=False)]


def options(way: str, **more: Any) -> dict[str, Any]:
    how = {TP: {"tp": 2}, DP: {"dp": 2}}.get(way, {"disable_radix_cache": False})
    return {**OPTIONS, **how, **more}


class Reference:
    """transformers' own float32 forward of a family, each prompt once."""

    def __init__(self, network: Any) -> None:
        self.network = network
        self._known: dict[bytes, list[np.ndarray]] = {}

    def states(self, ids: np.ndarray) -> list[np.ndarray]:
        """float32 [T, H] after 0, 1, … layers; the last one after the final norm."""
        import torch

        key = ids.tobytes()
        if key not in self._known:
            with torch.inference_mode():
                found = self.network(torch.from_numpy(ids.astype(np.int64))[None], output_hidden_states=True)
            self._known[key] = [state[0].float().numpy() for state in found.hidden_states]
        return self._known[key]

    def state(self, ids: np.ndarray, name: str) -> np.ndarray:
        return self.states(ids)[-1 if name == "final" else int(name.removeprefix("after_"))]


def names(layers: Iterable[int]) -> tuple[str, ...]:
    return (*(f"after_{k}" for k in layers), "final")


def way_of(layers: Iterable[int]) -> str:
    """Name of the line for other layers."""
    ks = tuple(layers)
    return f"{MIXED}, k = {', '.join(map(str, ks))} (ids {', '.join(str(k - 1) for k in ks)})"


def compare(
    family: Family, way: str, engine: SglangEngine, reference: Reference, layers: Sequence[int] = LAYERS
) -> Cell:
    """Send the prompts of a way through the engine, and compare what was written."""
    samples = prompts(way)
    with tempfile.TemporaryDirectory() as directory:
        staged = Staged(Path(directory), samples, names(layers), HIDDEN)
        assert_true(_capture(engine, way, staged), staged)
        found = {name: [float32(staged.states(name, job)) for job in staged.jobs] for name in staged.files}
    true = {name: [reference.state(ids, name) for ids in samples] for name in found}
    return Cell(
        family=family.name,
        architecture=family.architecture,
        way=way if tuple(layers) == LAYERS else way_of(layers),
        backend=engine.info.flags["attention_backend"],
        rows=sum(len(ids) for ids in samples),
        errors={name: error_of(np.concatenate(found[name]), np.concatenate(true[name])) for name in found},
        worst=max(error_of(a, b) for name in found for a, b in zip(found[name], true[name], strict=True)),
    )


def _capture(engine: SglangEngine, way: str, staged: Staged) -> list[Ticket]:
    if way == PLAIN:  # each alone
        return [ticket for job in staged.jobs for ticket in engine.capture([job])]
    return list(engine.capture(staged.jobs))


def cells(family: Family, start: Start, model: Path, reference: Reference) -> Iterator[Cell]:
    """Every way. One start for all ways of one rank, with the prefix cache on; two ranks have it off, the default."""
    with closing(start(model, **options(PLAIN))) as engine:
        assert engine.info.flags["chunked_prefill_size"] == str(CHUNK)
        for way in (PLAIN, MIXED, CHUNKED, SHARED):
            yield compare(family, way, engine, reference)
    for way in (TP, DP):
        with closing(start(model, **options(way))) as engine:
            yield compare(family, way, engine, reference)


def trap_cell(family: Family, start: Start, model: Path, reference: Reference, layers: tuple[int, ...]) -> Cell:
    """Mixed batches with other layers."""
    with closing(start(model, layers)) as engine:
        return compare(family, MIXED, engine, reference, layers)


def gpt_oss_cell(start: Start, model: Path) -> Cell:
    """SGLang's own words for why it does not start."""
    try:
        with closing(start(model)):
            raise AssertionError("gpt-oss runs on a CPU: compare it like the others")
    except IncompleteError as error:
        reason = str(error).partition("AssertionError: ")[2].partition(" during its start")[0]
    return Cell(family=GPT_OSS.name, architecture=GPT_OSS.architecture, way="every way", errors={}, reason=reason)


def dp_attention_cell(start: Start, model: Path) -> Cell:
    try:
        with closing(start(model, enable_dp_attention=True, tp=2, dp=2)):
            raise AssertionError("data-parallel attention runs on a CPU: compare it like the other ways")
    except UsageError as error:
        return Cell(family=ANY, architecture="-", way="data-parallel attention", errors={}, reason=error.message)


def lines(results: Iterable[Cell]) -> list[str]:
    """The table as text."""
    order = [*(family.name for family in (*FAMILIES, GPT_OSS)), ANY]
    head = f"{'family':<15} {'way':<38} {'backend':<13} {'rows':>5}  relative error by state"
    out = [head]
    for cell in sorted(results, key=lambda cell: order.index(cell.family)):
        figures = "  ".join(f"{name} {error:.5f}" for name, error in cell.errors.items())
        rows = str(cell.rows) if cell.rows else "-"
        what = figures or f"not run: {cell.reason}"
        out.append(f"{cell.family:<15} {cell.way:<38} {cell.backend or '-':<13} {rows:>5}  {what}")
    return out
