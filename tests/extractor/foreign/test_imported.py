"""An imported store is a store: verified, shown, planned, gathered, and trained on, on either side of the norm."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hsstore.cli import run
from hsstore.digest import sample_uid
from hsstore.plan import PlanParameters
from hsstore.records import SampleEntry
from hsstore.source import open_source
from hsstore.store import Store
from tests import stores
from tests.extractor.foreign import data

pytestmark = pytest.mark.filterwarnings("ignore:builtin type .* has no __module__ attribute:DeprecationWarning")
N_SAMPLES = 24


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A random verifier, and its states imported from files of SpecForge (`post`) and of speculators 0.4 (`pre`).

    `wrong` are the files before the norm, taken for ones after it.
    """
    from tests.trainer import small_run

    root = tmp_path_factory.mktemp("imported")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = small_run.write_model(root / "verifier")
    torch.set_num_threads(1)
    with torch.no_grad():
        model.model.norm.weight.copy_(torch.linspace(0.5, 1.5, small_run.HIDDEN))  # a norm that matters
    model.save_pretrained(root / "verifier")
    rng = np.random.default_rng(0)
    captured = [
        _capture(model, i, rng.integers(0, 100, int(rng.integers(5, 50)), dtype=np.int32)) for i in range(N_SAMPLES)
    ]
    data.write_specforge(root / "post-files", [c["post"] for c in captured])
    data.write_speculators_pt(root / "pre-files", [c["pre"] for c in captured])
    common = ["--model", str(root / "verifier"), "--layers", "2,3,5", "--validation-fraction", "0.2"]
    assert run(["import", "specforge", str(root / "post-files"), "--out", str(root / "post"), *common]) == 0
    assert run(["import", "speculators", str(root / "pre-files"), "--out", str(root / "pre"), *common]) == 0
    wrong = ["--out", str(root / "wrong"), "--norm", "post"]
    assert run(["import", "speculators", str(root / "pre-files"), *wrong, *common]) == 0
    return {name: root / name for name in ("verifier", "post", "pre", "wrong")}


def _capture(model: Any, number: int, ids: np.ndarray[Any, np.dtype[np.int32]]) -> dict[str, stores.Sample]:
    """One sample's states by a forward; `pre` is what goes into the final norm."""
    before: list[torch.Tensor] = []
    hook = model.model.norm.register_forward_pre_hook(lambda _module, arguments: before.append(arguments[0]))
    with torch.no_grad():
        out = model.model(torch.from_numpy(ids.astype(np.int64))[None], output_hidden_states=True)
    hook.remove()
    finals = {"post": out.last_hidden_state, "pre": before[0]}
    mask = (np.arange(len(ids)) >= len(ids) // 4).astype(np.uint8)
    samples = {}
    for norm, final in finals.items():
        tensors = [*(out.hidden_states[k] for k in (2, 3, 5)), final]
        states = {
            name: t[0].to(torch.bfloat16).contiguous().view(torch.int16).numpy().view(np.uint16)
            for name, t in zip(data.LAYERS, tensors, strict=True)
        }
        samples[norm] = stores.Sample(SampleEntry(sample_uid(ids, mask), number, 0, len(ids)), ids, mask, states)
    return samples


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_it_is_verified_and_shown(world: dict[str, Path], capsys: pytest.CaptureFixture[str], norm: str) -> None:
    assert run(["verify", "manifest", str(world[norm]), "--full"]) == 0
    capsys.readouterr()
    assert run(["info", str(world[norm]), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["capture"]["norm"], document["n_samples"]) == (norm, N_SAMPLES)
    assert run(["ls", str(world[norm])]) == 0
    assert run(["show", str(world[norm]), "0"]) == 0


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_its_batches_hold_its_rows(world: dict[str, Path], norm: str) -> None:
    source = open_source(str(world[norm]))
    plan = source.make_plan(PlanParameters(max_seq_len=64, seed=0, split="all"))
    seen = set()
    with Store.open(world[norm]) as store:
        for number in range(source.epoch_info(plan.plan_id, 0).n_batches):
            tensors = source.read_batch(plan.plan_id, 0, number).tensors
            edges = tensors["cu_seqlens"].tolist()
            for k, i in enumerate(tensors["source_index"].tolist()):
                rows = tensors["hidden.final"][edges[k] : edges[k + 1]]
                np.testing.assert_array_equal(rows, store.hidden(i, "final"))
                seen.add(i)
    source.close()
    assert len(seen) == N_SAMPLES


def test_both_sides_of_the_norm_train_alike(world: dict[str, Path], tmp_path: Path) -> None:
    """The trainer applies the verifier's norm to a `pre` store only: losses of both runs agree but for bfloat16.

    With the wrong side recorded they do not, so this would show it.
    """
    from tests.trainer import small_run
    from trainer.interrupt import Stop
    from trainer.rank import run_rank

    losses = {}
    try:
        for norm in ("post", "pre", "wrong"):
            run_rank(small_run.options(world["verifier"], world[norm], tmp_path / norm), Stop())
            losses[norm] = np.array([x["loss"] for x in small_run.lines(tmp_path / norm) if "loss" in x])
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(losses["post"]) == len(losses["pre"]) > 3
    np.testing.assert_allclose(losses["post"], losses["pre"], rtol=0.02)
    assert float(np.abs(losses["wrong"] / losses["post"] - 1).min()) > 0.05
