"""SmolLM2's states of four short conversations, computed once, and the command that checks a store of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from extractor.states.layers import Comparison, Forward
from extractor.states.reference import Given, Reference
from extractor.states.sample import Checked
from extractor.verifier import read_verifier
from hsstore.cli import run
from tests.extractor.states import planted
from tests.extractor.states.planted import Truth


@dataclass(frozen=True)
class World:
    """The real model, its samples with every state, the ids that it was given permuted, another model's states."""

    model: Path
    samples: list[Truth]
    permuted: list[Truth]
    """States of ids that another tokenizer might have given."""
    perturbed: list[Truth]
    """States of the same ids by weights that differ by some percent."""


@pytest.fixture(scope="session")
def world(smollm2_model: Path) -> World:
    import numpy as np
    import torch

    torch.set_num_threads(1)
    model = planted.load(smollm2_model)
    tokens = planted.encoded(smollm2_model)
    samples = [planted.truth(model, ids, mask) for ids, mask in tokens]
    other = np.random.default_rng(1).permutation(49152).astype(np.int32)
    permuted = [planted.truth(model, other[ids], mask) for ids, mask in tokens]
    torch.manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "proj" in name:
                weight.mul_(1 + 0.03 * torch.randn_like(weight))
    return World(smollm2_model, samples, permuted, [planted.truth(model, ids, mask) for ids, mask in tokens])


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str
    findings: list[dict[str, Any]]
    states: dict[str, dict[str, Any]]
    summary: dict[str, Any]

    def damage(self) -> dict[str, str]:
        """All details by kind."""
        out: dict[str, str] = {}
        for f in self.findings:
            if f["severity"] == "damage":
                out[f["kind"]] = f"{out.get(f['kind'], '')} {','.join(f['states'])}: {f['detail']} {f['samples']}"
        return out

    def notes(self) -> str:
        return "; ".join(f"{f['kind']}: {f['detail']}" for f in self.findings if f["severity"] == "note")


Verify = Callable[..., Result]


@pytest.fixture
def verify(capsys: pytest.CaptureFixture[str]) -> Verify:
    """`hsstore verify states … --json` in this process, with one thread."""

    def call(store: Path, model: Path, *options: str) -> Result:
        capsys.readouterr()
        code = run(["verify", "states", str(store), "--model", str(model), "--threads", "1", "--json", *options])
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        lines = [json.loads(line) for line in out.splitlines()]
        found = [line for line in lines if line["type"] == "finding"]
        states = {line["state"]: line for line in lines if line["type"] == "state"}
        summary = next((line for line in lines if line["type"] == "summary"), {})
        return Result(code, out, err, found, states, summary)

    return call


Compare = Callable[..., Forward]


@pytest.fixture(scope="session")
def compare(world: World) -> Compare:
    """The comparison with the forward alone, for samples whose ids were asked before: every forward runs once."""
    kept: dict[tuple[bytes, bool], Given] = {}
    names = (*(f"after_{k}" for k in range(planted.N_LAYERS + 1)), "final")

    class Once(Reference):
        """Both passes over a sample, cut out of those of the longest one that begins with its ids."""

        rounded = False

        def forward(self, ids: Any, asked: Any, rows: Any) -> Given:
            whole = next(s.ids for s in world.samples if s.ids[: len(ids)].tobytes() == ids.tobytes())
            key = (whole.tobytes(), self.rounded)
            if key not in kept:
                kept[key] = super().forward(whole, names, rows)
            full = {name: values[: len(ids)] for name, values in kept[key].full.items()}
            return Given({name: full[name] for name in asked}, {name: values[rows] for name, values in full.items()})

    exact = Once(read_verifier(str(world.model)))
    rounded = Once(read_verifier(str(world.model)))
    Reference.to_bfloat16(rounded)
    rounded.rounded = True

    class Both(Once):
        def __init__(self) -> None:
            self.version, self.device, self._now = exact.version, exact.device, exact
            self.is_routed = exact.is_routed

        def to_bfloat16(self) -> None:
            self._now = rounded

        def forward(self, ids: Any, asked: Any, rows: Any) -> Given:
            return self._now.forward(ids, asked, rows)

    def call(samples: list[Truth], **fields: Any) -> Forward:
        checked = [
            Checked(
                source_index=i,
                input_ids=s.ids,
                loss_mask=s.mask,
                states={name: s.states[name] for name in planted.LAYERS},
            )
            for i, s in enumerate(samples)
        ]
        made_by = planted.capture(world.model, **fields)
        return Comparison(made_by, None, planted.N_LAYERS).run(Both(), checked)

    return call
