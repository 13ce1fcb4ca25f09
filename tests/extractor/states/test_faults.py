"""Every planted fault is refused by the numbers, with its name: the digests of the stores here are all right."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from extractor.foreign import finalnorm
from extractor.verifier import read_verifier
from tests.extractor.states.conftest import Verify, World
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
