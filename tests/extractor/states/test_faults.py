"""Every planted fault is refused by the numbers, with its name: the digests of the stores here are all right."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from extractor.foreign import finalnorm
from extractor.states.layers import Comparison
from extractor.states.reference import Reference
from extractor.states.sample import Checked
from extractor.verifier import read_verifier
from tests.extractor.states import planted
from tests.extractor.states.conftest import Compare, Verify, World
from tests.extractor.states.planted import LAYERS, Truth, capture, write

pytestmark = pytest.mark.model
HEAD = "--head-only"


def moved(rows: np.ndarray, by: int) -> np.ndarray:
    """Row t holds the state of token t + by; what is missing at the end is repeated."""
    at = np.clip(np.arange(len(rows)) + by, 0, len(rows) - 1)
    return rows[at]


def test_a_sound_store_is_accepted(world: World, tmp_path: Path, verify: Verify) -> None:
    """Every state within the rounding of the stored copy, most tokens predicted, on either side of the norm."""
    store = write(tmp_path / "post", world.samples, capture(world.model))
    found = verify(store, world.model)
    assert (found.code, found.damage(), found.notes()) == (0, {}, "")
    assert set(found.states) == set(LAYERS)
    assert all(line["relative"] < 0.0025 and line["relative_bound"] == 0.003 for line in found.states.values())
    assert found.summary["samples"] == [0, 1, 2, 3]
    rates = found.summary["head"]["rates"]
    assert rates["as it is"] > max(0.5, 1.5 * rates["norm applied again"])
    assert found.summary["equal_digests"] == ["weights", "config.json", "tokenizer", "chat template"]
    before = [s.with_states(final=s.states["after_30"]) for s in world.samples]
    pre = write(tmp_path / "pre", before, capture(world.model, norm="pre"))
    found = verify(pre, world.model)
    assert (found.code, found.damage(), found.notes()) == (0, {}, "")


@pytest.mark.parametrize("by", [1, -1])
def test_another_layer_convention(world: World, tmp_path: Path, verify: Verify, by: int) -> None:
    """after_2 holds what after_3 should be, and so on: the ids of one dialect read as the other's."""
    ks = {f"after_{k}": f"after_{k + by}" for k in (2, 15, 27)}
    wrong = [s.with_states(**{name: s.states[other] for name, other in ks.items()}) for s in world.samples]
    found = verify(write(tmp_path / "s", wrong, capture(world.model)), world.model)
    assert found.code == 3
    assert set(found.damage()) == {"layer"}
    for name, other in ks.items():
        assert f"{name} holds what {other} should be" in found.damage()["layer"]
    assert found.states["final"]["ok"]


@pytest.mark.parametrize("options", [(), (HEAD,)], ids=["forward", "head"])
@pytest.mark.parametrize("declared", ["post", "pre"])
def test_the_other_side_of_the_norm(
    world: World, tmp_path: Path, verify: Verify, declared: str, options: tuple[str, ...]
) -> None:
    samples = world.samples
    if declared == "post":
        samples = [s.with_states(final=s.states["after_30"]) for s in samples]
    found = verify(write(tmp_path / "s", samples, capture(world.model, norm=declared)), world.model, *options)
    side = "before" if declared == "post" else "after"
    assert found.code == 3
    assert set(found.damage()) == {"norm"}
    assert f"final is {side} the norm though the capture says {declared}" in found.damage()["norm"].replace(
        "not after", "before"
    )


@pytest.mark.parametrize("options", [(), (HEAD,)], ids=["forward", "head"])
def test_a_norm_applied_twice(world: World, tmp_path: Path, verify: Verify, options: tuple[str, ...]) -> None:
    norm = finalnorm.of_model(read_verifier(str(world.model)))
    twice = [s.with_states(final=norm.apply(s.states["final"])) for s in world.samples]
    found = verify(write(tmp_path / "s", twice, capture(world.model)), world.model, *options)
    assert found.code == 3
    assert set(found.damage()) == {"norm"}
    assert "applied to final more than once" in found.damage()["norm"]


@pytest.mark.parametrize(("by", "options"), [(1, ()), (1, (HEAD,)), (-1, (HEAD,))])
def test_rows_shifted_by_one(world: World, tmp_path: Path, verify: Verify, by: int, options: tuple[str, ...]) -> None:
    wrong = [s.with_states(**{name: moved(s.states[name], by) for name in LAYERS}) for s in world.samples]
    found = verify(write(tmp_path / "s", wrong, capture(world.model)), world.model, *options)
    assert found.code == 3
    assert set(found.damage()) == {"shift"}
    which = "a later" if by > 0 else "an earlier"
    assert f"rows are shifted by one: each row holds the state of {which} token" in found.damage()["shift"]
    assert found.damage()["shift"].lstrip().startswith("final:" if options else "after_2,after_15,after_27,final:")


@pytest.mark.parametrize("options", [(), (HEAD,)], ids=["forward", "head"])
def test_rows_of_another_sample(world: World, tmp_path: Path, verify: Verify, options: tuple[str, ...]) -> None:
    """One sample of four holds its neighbour's rows, as far as it has rows for them."""
    longer, shorter = world.samples[0], world.samples[1]
    n = len(shorter.ids)
    wrong = [longer, Truth(shorter.ids, shorter.mask, {k: v[:n] for k, v in longer.states.items()}), *world.samples[2:]]
    found = verify(write(tmp_path / "s", wrong, capture(world.model)), world.model, *options)
    assert found.code == 3
    assert set(found.damage()) == {"sample"}
    assert "holds the rows of sample 0 [1]" in found.damage()["sample"]


def test_the_weights_of_another_revision(world: World, tmp_path: Path, verify: Verify) -> None:
    """Every matrix differs by 3 %, as after a little training: the head still predicts, the forward does not agree."""
    found = verify(write(tmp_path / "s", world.perturbed, capture(world.model)), world.model)
    assert found.code == 3
    assert set(found.damage()) == {"weights"}
    assert "near what this model gives, not equal: other weights" in found.damage()["weights"]


@pytest.mark.parametrize("options", [(), (HEAD,)], ids=["forward", "head"])
def test_ids_of_another_tokenizer(world: World, tmp_path: Path, verify: Verify, options: tuple[str, ...]) -> None:
    """The verifier ran on ids that are no language of its: all states are right, and worthless."""
    found = verify(write(tmp_path / "s", world.permuted, capture(world.model)), world.model, *options)
    assert found.code == 3
    kind, words = ("agreement", "ids of another tokenizer") if options else ("tokenizer", "does not expect such ids")
    assert set(found.damage()) == {kind}
    assert words in found.damage()[kind]
    assert all(line["ok"] for line in found.states.values())


@pytest.mark.parametrize("options", [(), (HEAD,)], ids=["forward", "head"])
def test_ids_that_are_not_those_of_the_states(
    world: World, tmp_path: Path, verify: Verify, options: tuple[str, ...]
) -> None:
    """The states are of the text, the ids beside them are of another vocabulary."""
    wrong = [Truth(p.ids, s.mask, s.states) for p, s in zip(world.permuted, world.samples, strict=True)]
    found = verify(write(tmp_path / "s", wrong, capture(world.model)), world.model, *options)
    assert found.code == 3
    assert found.damage().keys() & {"tokenizer", "agreement"}
    assert "another tokenizer" in " ".join(found.damage().values())


def test_ids_outside_the_vocabulary(world: World, tmp_path: Path, verify: Verify) -> None:
    ids = world.samples[0].ids.copy()
    ids[5] = 50_000
    wrong = [Truth(ids, world.samples[0].mask, world.samples[0].states), *world.samples[1:]]
    made_by = capture(world.model, vocab_size=60_000)
    found = verify(write(tmp_path / "s", wrong, made_by), world.model)
    assert found.code == 3
    assert "vocabulary 60000, the model 49152: captured from another model" in found.damage()["model"]


def partial(world: World, name: str, fault: str) -> tuple[Truth, str]:
    """The last nine rows of a state, or its first one, are wrong; and what they are to be called."""
    sample, other = world.samples[2], world.samples[0]
    rows, n = sample.states[name].copy(), len(sample.ids)
    last = slice(n - 9, n)
    after = f"after_{int(name.removeprefix('after_')) + 1}"
    if fault == "zero":
        rows[last] = 0
    elif fault == "layer":
        rows[last] = sample.states[after][last]
    elif fault == "shift":
        rows[last] = sample.states[name][n - 10 : n - 1]
    elif fault == "other":
        rows[last] = other.states[name][30:39]
    else:
        rows[last] = sample.states[name][last] ^ np.uint16(0x8000)
    called = {
        "zero": f"rows {n - 9}-{n - 1} of {n} are zeros",
        "layer": f"rows {n - 9}-{n - 1} of {n} hold what {after} should be",
        "shift": f"rows {n - 9}-{n - 1} of {n} are shifted by one: each row holds the state of an earlier token",
        "other": f"rows {n - 9}-{n - 1} of {n} hold rows of sample 0",
        "noise": f"rows {n - 9}-{n - 1} are nothing that this model gives at any layer",
    }
    return sample.with_states(**{name: rows}), called[fault]


FAULTS = ("zero", "layer", "shift", "other", "noise")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_last_rows_of_a_sample(world: World, compare: Compare, dtype: str) -> None:
    """A tenth of one sample, as a chunk of a prefill is: hidden behind the outlier of row 0 in every sum, named all the
    same, in every state, by sample and rows."""
    kinds = {"zero": "rows", "layer": "layer", "shift": "shift", "other": "sample", "noise": "rows"}
    for name in LAYERS[:3]:
        for fault in FAULTS:
            wrong, called = partial(world, name, fault)
            found = compare([*world.samples[:2], wrong, world.samples[3]], compute_dtype=dtype)
            damage = [f for f in found.findings if f.severity == "damage"]
            assert [(f.kind, f.states, f.samples) for f in damage] == [(kinds[fault], (name,), (2,))], (name, fault)
            assert called in damage[0].detail
            assert [layer.state for layer in found.layers if not layer.ok] == [name]
            assert found.failed == {2}


@pytest.mark.parametrize("row", [0, 1, 40])
def test_a_single_row_of_zeros(world: World, compare: Compare, row: int) -> None:
    rows = world.samples[2].states["after_15"].copy()
    rows[row] = 0
    found = compare([world.samples[2].with_states(after_15=rows)], compute_dtype="bfloat16")
    assert f"row {row} of {len(rows)} is zeros" in found.findings[0].detail


def test_a_unit_of_the_value_that_is_an_outlier(world: World, compare: Compare) -> None:
    """Two engines round 24,960 to neighbouring bfloat16 values: sound, also where that is the only row."""
    rows = world.samples[2].states["after_15"].copy()
    largest = np.abs((rows[0].astype(np.uint32) << 16).view(np.float32)).argmax()
    rows[0, largest] += 1
    sample = world.samples[2].with_states(after_15=rows)
    assert compare([sample], compute_dtype="bfloat16").failed == set()
    assert compare([sample], compute_dtype="float32").failed == set()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_scale(world: World, compare: Compare, dtype: str) -> None:
    """All rows of `final` 1 % too long: within the noise of a row, and not of all rows."""
    import torch

    def longer(rows: np.ndarray) -> np.ndarray:
        values = torch.from_numpy(rows.view("i2")).view(torch.bfloat16).float()
        return planted.patterns(values * 1.01)

    found = compare([s.with_states(final=longer(s.states["final"])) for s in world.samples], compute_dtype=dtype)
    assert {(f.kind, f.states) for f in found.findings} == {("scale", ("final",))}
    assert "is 1.01" in found.findings[0].detail or "is 1.00" in found.findings[0].detail


def test_one_token_does_not_tell_layers_apart(world: World, compare: Compare) -> None:
    """A first token is nearly the same behind the layers that follow its outlier: undecided, not ok."""
    first = world.samples[0]
    one = Truth(first.ids[:1], first.mask[:1], {k: v[:1] for k, v in first.states.items()})
    found = compare([one], compute_dtype="bfloat16")
    assert found.failed == set()
    by_state = {layer.state: layer for layer in found.layers}
    assert not by_state["after_15"].ok
    assert by_state["after_15"].alike in ("after_14", "after_16")
    assert ("undecided", ("after_15",)) in [(f.kind, f.states) for f in found.findings]
    assert all(layer.ok for layer in compare(world.samples, compute_dtype="bfloat16").layers)


def test_tokens_routed_to_other_experts(tmp_path: Path) -> None:
    """Another order of additions in bfloat16 sends some tokens of a mixture of experts elsewhere: sound. Rows of zeros
    and of the next layer are not taken for that."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    from tests.extractor.tiny import byte_tokenizer

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 64, "num_hidden_layers": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 264}
    routing = {"num_experts": 16, "num_experts_per_tok": 2, "decoder_sparse_step": 1, "initializer_range": 0.1}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **heads, **routing))
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    eager = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16, attn_implementation="eager").eval()
    rng, mask = np.random.default_rng(0), np.ones(200, np.uint8)
    layers = ("after_2", "after_5", "final")
    samples = [planted.truth(eager, rng.integers(0, 256, 200).astype(np.int32), mask) for _ in range(3)]
    made_by = capture(tmp_path, layers=layers, compute_dtype="bfloat16")

    def failed(given: list[Truth]) -> frozenset[int]:
        checked = [
            Checked(source_index=i, input_ids=s.ids, loss_mask=mask, states={k: s.states[k] for k in layers})
            for i, s in enumerate(given)
        ]
        with Reference(read_verifier(str(tmp_path))) as running:
            found = Comparison(made_by, None, 8).run(running, checked)
        return found.failed

    assert failed(samples) == set()
    zeros, later = samples[1].states["after_5"].copy(), samples[2].states["after_5"].copy()
    zeros[190:], later[190:] = 0, samples[2].states["after_6"][190:]
    assert failed([samples[0], samples[1].with_states(after_5=zeros), samples[2].with_states(after_5=later)]) == {1, 2}
