"""The audit: the origin run's figures, and a planted mistake of each kind stopped with the parameter's name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from hsstore.errors import ConflictError
from tests.trainer.tiny import VOCAB, write_verifier
from trainer.audit import FrozenSnapshot, audit, check_before_step, component_of, expectations, sources
from trainer.drafter import DrafterOptions, build_drafter, default_layers, empty_drafter
from trainer.verifier import load_verifier, read_config
from trainer.vocabulary import build_vocabulary

pytestmark = pytest.mark.filterwarnings("ignore:builtin type .* has no __module__ attribute:DeprecationWarning")

DATA = Path(__file__).parent / "data"
OPTIONS = DrafterOptions(layers=(2, 3, 4), norm="post", draft_vocab_size=20)
EXPECTED = expectations(OPTIONS)
KIMI = {
    "embed_tokens": (1_174_405_120, False),
    "verifier_lm_head": (229_376_000, False),
    "verifier_norm": (7_168, False),
    "lm_head": (229_376_000, True),
    "fc": (154_140_672, True),
    "decoder layer": (807_403_520, True),
    "decoder layer norms": (3 * 7_168, True),
    "final norm": (7_168, True),
}


@pytest.fixture(scope="module")
def verifier(tmp_path_factory):
    directory = tmp_path_factory.mktemp("verifier")
    write_verifier(directory)
    return load_verifier(directory)


@pytest.fixture
def model(verifier):
    return build_drafter(verifier, build_vocabulary(np.arange(VOCAB), 20), OPTIONS)


@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("name", ["kimi_k2_flat.json", "kimi_k2.5_nested.json"])
def test_the_origin_runs_figures(name, norm):
    """2,595 M in all and 1,191 M trained, as its own audit printed; any other head size gives other sums."""
    facts = read_config(DATA / name)
    options = DrafterOptions(layers=default_layers(facts.n_layers), norm=norm)
    with torch.device("meta"):
        drafter = empty_drafter(facts, options, "cpu")
    report = audit(drafter, expectations(options))
    assert options.layers == (2, 30, 58)
    assert {row.component: (row.parameters, row.trained) for row in report.rows} == KIMI
    assert (report.total, report.trained) == (2_594_737_152, 1_190_948_864)
    assert not report.problems
    assert all(parameter.is_meta for parameter in drafter.parameters())


def test_rows_say_where_weights_came_from(model, verifier):
    report = audit(model, EXPECTED, sources(verifier.places))
    assert report.row("embed_tokens").source == "model.safetensors: model.embed_tokens.weight"
    assert report.row("lm_head").source == "starts as rows of model.safetensors: lm_head.weight"
    assert report.row("fc").source == "fresh, from the seed"
    assert [row.component for row in report.rows] == list(KIMI)
    assert report.total == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("embed_tokens.weight", "embed_tokens.weight is trained, expected frozen"),
        ("verifier_lm_head.weight", "verifier_lm_head.weight is trained, expected frozen"),
        ("verifier_norm.weight", "verifier_norm.weight is trained, expected frozen"),
        ("lm_head.weight", "lm_head.weight is frozen, expected trained"),
        ("fc.weight", "fc.weight is frozen, expected trained"),
        ("layers.0.self_attn.k_proj.weight", "layers.0.self_attn.k_proj.weight is frozen, expected trained"),
        ("layers.0.hidden_norm.weight", "layers.0.hidden_norm.weight is frozen, expected trained"),
        ("norm.weight", "norm.weight is frozen, expected trained"),
    ],
)
def test_a_planted_mistake_stops_with_its_name(model, name, words):
    check_before_step(model, EXPECTED)
    parameter = model.get_parameter(name)
    parameter.requires_grad_(not parameter.requires_grad)
    with pytest.raises(ConflictError, match=rf"freeze audit: {words}$"):
        check_before_step(model, EXPECTED)
    assert audit(model, EXPECTED).problems == (words,)


def test_a_frozen_head_is_a_mistake_only_when_it_was_to_be_trained(verifier):
    options = DrafterOptions(layers=(2, 3, 4), norm="post", draft_vocab_size=20, train_lm_head=False)
    model = build_drafter(verifier, build_vocabulary(np.arange(VOCAB), 20), options)
    check_before_step(model, expectations(options))
    with pytest.raises(ConflictError, match=r"lm_head.weight is frozen"):
        check_before_step(model, EXPECTED)


def test_weights_that_nobody_loaded(verifier):
    """speculators fills what a verifier should give with NaN; training on it would only show as a NaN loss."""
    with pytest.raises(ConflictError, match=r"embed_tokens.weight was never loaded"):
        check_before_step(empty_drafter(verifier.facts, OPTIONS, "cpu"), EXPECTED)


def test_a_parameter_of_no_known_part(model):
    model.adapter = torch.nn.Linear(2, 2)
    with pytest.raises(ConflictError, match=r"'adapter.weight' belongs to no known part"):
        audit(model, EXPECTED)
    assert component_of("layers.0.mlp.up_proj.weight") == "decoder layer"


def test_names_without_the_wrapper_of_ddp(model):
    wrapper = torch.nn.Module()
    wrapper.module = model
    check_before_step(wrapper, EXPECTED)
    model.fc.weight.requires_grad_(False)
    with pytest.raises(ConflictError, match=r": fc.weight is frozen"):
        check_before_step(wrapper, EXPECTED)


def step(model: torch.nn.Module) -> None:
    """A step that moves every trained parameter."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(1e-3)


def test_after_a_good_step(model):
    snapshot = FrozenSnapshot(model)
    step(model)
    snapshot.check_after_first_step(model)


def test_a_frozen_bit_that_moved(model):
    snapshot = FrozenSnapshot(model)
    step(model)
    model.embed_tokens.weight.data.view(torch.int16)[7, 3] ^= 1
    with pytest.raises(ConflictError, match=r": embed_tokens.weight is frozen but moved in the first step$"):
        snapshot.check_after_first_step(model)


def test_a_trained_parameter_that_did_not_move(model):
    snapshot = FrozenSnapshot(model)
    kept = model.fc.weight.detach().clone()
    step(model)
    model.fc.weight.data.copy_(kept)
    with pytest.raises(ConflictError, match=r": fc.weight is trained but did not move in the first step$"):
        snapshot.check_after_first_step(model)


def test_a_step_into_nan(model):
    snapshot = FrozenSnapshot(model)
    step(model)
    model.norm.weight.data[2] = torch.nan
    with pytest.raises(ConflictError, match=r": norm.weight holds NaN or infinity after the first step$"):
        snapshot.check_after_first_step(model)
