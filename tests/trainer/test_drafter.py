"""The drafter against speculators' own path, and the traps of that path."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from hsstore.errors import ConflictError, NotFoundError, UsageError
from tests.models import smollm2
from tests.trainer.tiny import CONFIG, HIDDEN, VOCAB, sample, write_verifier
from trainer.draft_layer import ACTIVATIONS, ROPE_TYPES, DraftLayer, default_layer, read_draft_config
from trainer.drafter import (
    AlreadyNormed,
    DrafterOptions,
    build_drafter,
    empty_drafter,
    forward,
    layer_ids,
    loss_config,
    without_crossings,
)
from trainer.verifier import load_verifier, read_config
from trainer.vocabulary import Vocabulary, build_vocabulary

# speculators pulls in extensions made with an old SWIG; nothing of ours.
pytestmark = pytest.mark.filterwarnings("ignore:builtin type .* has no __module__ attribute:DeprecationWarning")

DATA = Path(__file__).parent / "data"
DRAFT = 20
OPTIONS = {"layers": (2, 3, 4), "draft_vocab_size": DRAFT, "compute_dtype": "float32"}


def vocabulary(verifier_size: int = VOCAB, draft_size: int = DRAFT) -> Vocabulary:
    return build_vocabulary(np.random.default_rng(3).integers(0, 9, verifier_size), draft_size)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    directory = tmp_path_factory.mktemp("verifier")
    write_verifier(directory)
    return load_verifier(directory)


def collate(samples, rows, dtype=torch.float32):
    """speculators' own shift and packing."""
    from speculators.models.eagle3.data import shift_batch
    from speculators.train.data import CollateFn

    batch = CollateFn(rows, HIDDEN, 3, dtype=dtype)([shift_batch(dict(s)) for s in samples])
    return {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}


def chats():
    """Three samples that begin untrained, as chat templates make them."""
    return [sample(12, range(5, 12), 1), sample(7, range(4, 6), 2), sample(15, [6, 7, 8, 13, 14], 3)]


@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_equals_speculators_own_path(tiny, steps, norm):
    """Several documents and padding; what the class itself says of the same pack, number for number."""
    options = DrafterOptions(norm=norm, ttt_steps=steps, **OPTIONS)
    model = build_drafter(tiny, vocabulary(), options)
    batch = collate(chats(), 40)
    loss, metrics = forward(model, batch, options)
    _, expected, raw = model(**batch, ttt_steps=steps, loss_config=loss_config("cpu"))
    assert loss.item() == expected.item()
    for k in range(steps):
        part, total = metrics[f"loss_{k}"]
        assert float(part / total) == pytest.approx(float(raw[f"loss_{k}_sum"]), rel=1e-6)
        assert total.item() == batch["loss_mask"][:, k:].sum().item() > 0
        for name in (f"full_acc_{k}", f"cond_acc_{k}"):
            assert metrics[name][0] == raw[f"{name}_sum"]
            assert metrics[name][1] == raw[f"{name}_total"]
    assert set(metrics) == {f"{n}_{k}" for n in ("loss", "full_acc", "cond_acc") for k in range(steps)}


def test_the_built_model_is_the_one_speculators_builds(tiny, tmp_path):
    """Its own constructor reads a verifier directory; our tensors must have come to the same places."""
    from speculators.models.eagle3 import Eagle3DraftModel

    write_verifier(tmp_path)
    voc = vocabulary()
    options = DrafterOptions(norm="pre", **OPTIONS)
    ours = build_drafter(tiny, voc, options)
    theirs = Eagle3DraftModel.from_training_args(
        ours.config.transformer_layer_config,
        t2d=torch.from_numpy(voc.t2d),
        d2t=torch.from_numpy(voc.d2t),
        draft_vocab_size=DRAFT,
        norm_before_residual=False,
        ttt_steps=3,
        verifier_name_or_path=str(tmp_path),
        target_layer_ids=[2, 3, 4],
        draft_attn_impl="sdpa",
    )
    state = ours.state_dict()
    assert set(state) == set(theirs.state_dict())
    for name in ("embed_tokens", "lm_head", "verifier_lm_head", "verifier_norm"):
        assert torch.equal(state[f"{name}.weight"], theirs.state_dict()[f"{name}.weight"]), name
    for name in ("t2d", "d2t"):
        assert torch.equal(state[name], theirs.state_dict()[name])


def test_a_pack_counts_what_its_documents_count_alone(tiny):
    """Packing must not change what is learnt: sums over the pack are the sums over its documents."""
    options = DrafterOptions(norm="post", **OPTIONS)
    model = build_drafter(tiny, vocabulary(), options)
    _, packed = forward(model, collate(chats(), 40), options)
    alone = [forward(model, collate([s], len(s["input_ids"]) + 5), options)[1] for s in chats()]
    for name, (part, total) in packed.items():
        assert float(part) == pytest.approx(sum(float(m[name][0]) for m in alone), rel=1e-4), name
        assert float(total) == sum(float(m[name][1]) for m in alone), name
    assert float(packed["loss_2"][1]) > 0


def test_no_row_is_scored_against_another_document(tiny):
    """Documents that begin trained: speculators scores rows of the one before them at steps k ≥ 1; we do not."""
    first, second = sample(9, range(9), 4), sample(9, range(9), 5)
    options = DrafterOptions(norm="post", **OPTIONS)
    model = build_drafter(tiny, vocabulary(), options)
    batch = collate([first, second], 16)
    other = {k: v.clone() for k, v in batch.items()}
    other["verifier_last_hidden_states"][:, 8:10] += 1  # targets of the second document's first K − 1 rows
    ours, theirs = forward(model, batch, options)[1], forward(model, other, options)[1]
    for name in (f"{n}_{k}" for n in ("loss", "full_acc") for k in range(3)):
        assert [float(v) for v in ours[name]] == [float(v) for v in theirs[name]], name
    raw = [model(**b, ttt_steps=3, loss_config=loss_config("cpu"))[1].item() for b in (batch, other)]
    assert raw[0] != raw[1], "the case is vacuous unless speculators' own loss sees those targets"


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
def test_the_attention_of_gpus_sees_what_that_of_cpus_sees(tiny):
    """Both kinds of mask, over three steps and two documents; flex runs forward on a CPU, though not backward."""
    batch = collate([sample(60, range(9, 60), 1), sample(50, range(20, 50), 2)], 128)
    said = []
    for attention in ("sdpa", "simple_flex_attention"):
        options = DrafterOptions(norm="post", attention=attention, **OPTIONS)
        with torch.no_grad():
            metrics = forward(build_drafter(tiny, vocabulary(), options), batch, options)[1]
        said.append({name: (float(part), float(total)) for name, (part, total) in metrics.items()})
    for name, pair in said[0].items():
        assert pair == pytest.approx(said[1][name], rel=1e-5), name
    with pytest.raises(UsageError, match="needs a multiple of 128"):
        forward(build_drafter(tiny, vocabulary(), options), collate(chats(), 40), options)


def test_crossing_rows_by_hand():
    documents = torch.tensor([[0, 0, 0, 1, 2, 2, 2, 2, -1]])
    mask = torch.tensor([[1, 1, 1, 1, 1, 1, 1, 1, 0]], dtype=torch.bool)
    assert without_crossings(documents, mask, 1).equal(mask)
    assert without_crossings(documents, mask, 2).long().tolist() == [[1, 1, 1, 0, 0, 1, 1, 1, 0]]
    assert without_crossings(documents, mask, 3).long().tolist() == [[1, 1, 1, 0, 0, 0, 1, 1, 0]]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_documents_without_trained_tokens_teach_nothing(tiny, dtype):
    """An all-masked document, and a pack of padding only: a finite zero, and zero gradients on every trained part."""
    options = DrafterOptions(norm="post", **{**OPTIONS, "compute_dtype": dtype})
    model = build_drafter(tiny, vocabulary(), options)
    untrained = collate([sample(8, [], 6)], 16)
    padding = {**untrained, "document_ids": torch.full((1, 16), -1)}
    for batch in (untrained, padding):
        model.zero_grad()
        loss, metrics = forward(model, batch, options)
        loss.backward()
        assert loss.item() == 0
        assert all(float(total) == 0 for name, (_, total) in metrics.items() if not name.startswith("cond"))
        for name, parameter in model.named_parameters():
            assert parameter.grad is None or not parameter.grad.any(), name
    trained = collate([sample(8, range(3, 8), 6), sample(8, [], 7)], 16)
    alone = collate([sample(8, range(3, 8), 6)], 16)
    assert forward(model, trained, options)[0].item() == pytest.approx(forward(model, alone, options)[0].item())


def test_trained_float32_frozen_bfloat16_and_every_trained_part_learns(tiny):
    options = DrafterOptions(norm="post", layers=(2, 3, 4), draft_vocab_size=DRAFT)
    model = build_drafter(tiny, vocabulary(), options)
    forward(model, collate(chats(), 40, torch.bfloat16), options)[0].backward()
    for name, parameter in model.named_parameters():
        assert parameter.dtype == (torch.float32 if parameter.requires_grad else torch.bfloat16), name
        assert (parameter.grad is not None and bool(parameter.grad.any())) == parameter.requires_grad, name


def test_bfloat16_is_close_to_float32(tiny):
    losses = []
    for dtype in ("float32", "bfloat16"):
        options = DrafterOptions(norm="post", **{**OPTIONS, "compute_dtype": dtype})
        losses.append(forward(build_drafter(tiny, vocabulary(), options), collate(chats(), 40), options)[0].item())
    assert losses[0] == pytest.approx(losses[1], rel=0.02)


def test_the_head_starts_as_the_verifiers_rows_and_is_trained_on_request(tiny):
    voc = vocabulary()
    for train in (True, False):
        model = build_drafter(tiny, voc, DrafterOptions(norm="post", train_lm_head=train, **OPTIONS))
        rows = tiny.lm_head[torch.from_numpy(voc.selected)].float()
        assert torch.equal(model.lm_head.weight, rows)
        assert torch.equal(model.verifier_lm_head.weight, rows)
        assert model.lm_head.weight.requires_grad is train
        assert model.lm_head.weight.data_ptr() != model.verifier_lm_head.weight.data_ptr()


def test_the_seed_decides_the_fresh_weights_and_nothing_else_moves(tiny):
    """All ranks and every resumed run must start alike, whatever was drawn before."""
    options = DrafterOptions(norm="post", **OPTIONS)
    before = torch.random.get_rng_state()
    one = build_drafter(tiny, vocabulary(), options, seed=1).state_dict()
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.rand(3)
    same = build_drafter(tiny, vocabulary(), options, seed=1).state_dict()
    other = build_drafter(tiny, vocabulary(), options, seed=2).state_dict()
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["fc.weight"], other["fc.weight"])


def test_the_whole_vocabulary_needs_no_maps(tiny):
    voc = build_vocabulary(np.ones(VOCAB, dtype=np.int64))
    options = DrafterOptions(norm="post", **{**OPTIONS, "draft_vocab_size": None})
    model = build_drafter(tiny, voc, options)
    assert model.lm_head.weight.shape == (VOCAB, HIDDEN)
    assert np.isfinite(forward(model, collate(chats(), 40), options)[0].item())


def test_a_verifier_norm_of_one_plus_w(tmp_path):
    """Gemma's norm multiplies by 1 + w: taken over as w, every target would be mis-scaled."""
    written = write_verifier(tmp_path, config={**CONFIG, "model_type": "gemma3_text"})
    model = build_drafter(load_verifier(tmp_path), vocabulary(), DrafterOptions(norm="pre", **OPTIONS))
    assert torch.equal(model.verifier_norm.weight, written["norm"].float() + 1)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"layers": (2, 3, 9)}, UsageError, "do not fit a verifier of 8 layers"),
        ({"layers": (2, 2, 4)}, UsageError, "do not fit"),
        ({"layers": ()}, UsageError, "at least one"),
        ({"ttt_steps": 0}, UsageError, "at least 1"),
        ({"draft_vocab_size": DRAFT + 1}, ConflictError, "20 draft ids, asked for 21"),
    ],
)
def test_options_that_do_not_fit(tiny, change, error, words):
    with pytest.raises(error, match=words):
        build_drafter(tiny, vocabulary(), DrafterOptions(norm="post", **{**OPTIONS, **change}))


def test_another_verifiers_vocabulary(tiny):
    with pytest.raises(ConflictError, match="for 60 tokens"):
        build_drafter(tiny, vocabulary(60), DrafterOptions(norm="post", **OPTIONS))


def test_layer_names():
    assert layer_ids(("after_2", "after_15", "after_27", "final")) == (2, 15, 27)


class TestLayer:
    """The drafter's layer is the verifier's where that is a Llama's, and written out where it is not."""

    def test_of_a_llama(self, tiny):
        layer = default_layer(tiny.facts)
        assert (layer.num_attention_heads, layer.num_key_value_heads, layer.head_dim) == (4, 2, 4)
        assert layer.intermediate_size == 24
        assert layer.rope_parameters == {"rope_type": "default", "rope_theta": 5000.0}

    def test_of_latent_attention(self):
        layer = default_layer(read_config(DATA / "kimi_k2.5_nested.json"))
        assert (layer.num_attention_heads, layer.num_key_value_heads, layer.head_dim) == (64, 64, 128)
        assert layer.rope_parameters == {"rope_type": "default", "rope_theta": 50_000.0}

    def test_without_a_dense_width(self, tmp_path):
        (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in CONFIG.items() if k != "intermediate_size"}))
        with pytest.raises(UsageError, match="--draft-config"):
            default_layer(read_config(tmp_path))

    def test_from_a_file(self, tiny, tmp_path):
        """In the spelling other trainers use, with what they write besides."""
        given = {
            "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "draft_vocab_size": 20,
            "hidden_size": HIDDEN, "vocab_size": VOCAB, "num_hidden_layers": 1, "num_attention_heads": 2,
            "num_key_value_heads": 1, "head_dim": 8, "intermediate_size": 12, "rope_theta": 7.0, "rms_norm_eps": 1e-3,
        }  # fmt: skip
        (tmp_path / "draft.json").write_text(json.dumps(given))
        layer = read_draft_config(tmp_path / "draft.json", tiny.facts)
        assert layer == DraftLayer(
            num_attention_heads=2, num_key_value_heads=1, head_dim=8, intermediate_size=12, rms_norm_eps=1e-3,
            rope_parameters={"rope_type": "default", "rope_theta": 7.0}, max_position_embeddings=256,
        )  # fmt: skip
        model = build_drafter(tiny, vocabulary(), DrafterOptions(norm="post", layer=layer, **OPTIONS))
        assert model.layers[0].self_attn.k_proj.weight.shape == (8, 2 * HIDDEN)

    @pytest.mark.parametrize(
        ("change", "error", "words"),
        [
            ({"head_dims": 8}, UsageError, "did you mean head_dim"),
            ({"hidden_size": 17}, ConflictError, "hidden_size is 17, expected 16"),
            ({"num_hidden_layers": 2}, ConflictError, "num_hidden_layers is 2, expected 1"),
            ({"head_dim": None}, UsageError, "lacks head_dim"),
        ],
    )
    def test_from_a_file_that_does_not_fit(self, tiny, tmp_path, change, error, words):
        given = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "intermediate_size": 12, **change}
        (tmp_path / "draft.json").write_text(json.dumps({k: v for k, v in given.items() if v is not None}))
        with pytest.raises(error, match=words):
            read_draft_config(tmp_path / "draft.json", tiny.facts)

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"head_dim": "x"}, "head_dim is 'x', expected a positive integer"),
            ({"head_dim": 0}, "head_dim is 0"),
            ({"head_dim": 7}, "head_dim is 7, expected an even number"),
            ({"head_dim": 64.7}, "head_dim is 64.7"),
            ({"num_attention_heads": None}, "num_attention_heads is None"),
            ({"num_attention_heads": [1]}, r"num_attention_heads is \[1\]"),
            ({"num_attention_heads": 3}, "num_attention_heads is 3, expected a divisor of hidden_size 16"),
            ({"num_attention_heads": True}, "num_attention_heads is True"),
            ({"num_key_value_heads": 0}, "num_key_value_heads is 0"),
            ({"num_attention_heads": 9, "num_key_value_heads": 2}, "num_key_value_heads is 2, expected a divisor"),
            ({"intermediate_size": -1}, "intermediate_size is -1"),
            ({"rms_norm_eps": "q"}, "rms_norm_eps is 'q'"),
            ({"rms_norm_eps": -1}, "rms_norm_eps is -1"),
            ({"rope_theta": "x"}, "rope_theta is 'x'"),
            ({"rope_scaling": 5}, "rope_scaling is 5"),
            ({"rope_scaling": {"rope_type": "nope"}}, "rope_type is 'nope', expected one of default, linear"),
            ({"rope_scaling": {"rope_type": "linear"}}, "factor is missing"),
            ({"rope_scaling": {"rope_type": "yarn", "factor": 2, "beta_fast": "x"}}, "beta_fast is 'x'"),
            ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0]}}, "short_factor is .* list of 4"),
            ({"hidden_act": "foo"}, "hidden_act is 'foo', expected one of gelu"),
            ({"attention_bias": "false"}, "attention_bias is 'false', expected true or false"),
            ({"mlp_bias": 0}, "mlp_bias is 0"),
        ],
    )
    def test_values_are_checked_never_converted(self, tiny, tmp_path, change, words):
        given = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "intermediate_size": 12, **change}
        file = tmp_path / "draft.json"
        file.write_text(json.dumps(given))
        with pytest.raises(UsageError, match=words) as caught:
            read_draft_config(file, tiny.facts)
        assert str(file) in caught.value.message
        assert caught.value.hint

    def test_a_file_too_deep_to_read(self, tiny, tmp_path):
        (tmp_path / "draft.json").write_text('{"a":' * 100_000)
        with pytest.raises(UsageError, match="too deeply"):
            read_draft_config(tmp_path / "draft.json", tiny.facts)
        with pytest.raises(UsageError, match="cannot read"):
            read_draft_config(tmp_path, tiny.facts)

    def test_the_names_are_those_transformers_knows(self):
        from transformers.activations import ACT2FN
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        assert set(ACT2FN) >= ACTIVATIONS
        assert {*ROPE_INIT_FUNCTIONS, "default"} >= set(ROPE_TYPES)

    @pytest.mark.parametrize(
        "rope",
        [
            {"rope_type": "linear", "factor": 2.0},
            {"rope_type": "dynamic", "factor": 2.0},
            {"rope_type": "yarn", "factor": 2.0},
            {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
             "original_max_position_embeddings": 64},
            {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "factor": 2.0},
        ],
        ids=lambda rope: rope["rope_type"],
    )  # fmt: skip
    def test_a_rope_that_is_accepted_can_be_built(self, tiny, tmp_path, rope):
        given = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "intermediate_size": 12}
        (tmp_path / "draft.json").write_text(json.dumps({**given, "rope_theta": 7.0, "rope_scaling": rope}))
        layer = read_draft_config(tmp_path / "draft.json", tiny.facts)
        with torch.device("meta"):
            empty_drafter(tiny.facts, DrafterOptions(norm="pre", layer=layer, **OPTIONS), "cpu")

    def test_one_draft_token_is_too_few(self, tiny):
        """Its probability is 1 whatever the weights are, so no step would move them."""
        with pytest.raises(UsageError, match="draft vocabulary of 1 does not fit") as caught:
            empty_drafter(tiny.facts, DrafterOptions(norm="pre", **{**OPTIONS, "draft_vocab_size": 1}), "cpu")
        assert "takes 2 to" in caught.value.hint

    def test_from_no_file(self, tiny, tmp_path):
        with pytest.raises(NotFoundError, match="no draft config"):
            read_draft_config(tmp_path / "none.json", tiny.facts)


@pytest.mark.model
def test_targets_of_the_real_model_agree_with_its_logits():
    """The norm trap: with the wrong variant a drafter learns another model's distribution and nothing errors."""
    ids = torch.tensor([[1, 504, 3575, 282, 4649, 314, 7042, 30, 657, 314, 253, 2066, 351, 253, 1743, 4180, 28, 284]])
    final, logits, pre = _final_states(smollm2(), ids)
    weights = load_verifier(smollm2())
    assert weights.places.tied
    voc = build_vocabulary(np.ones(weights.facts.vocab_size, dtype=np.int64))
    options = {"layers": (2, 15, 27), "draft_vocab_size": None, "compute_dtype": "float32"}
    truth = logits.argmax(-1)
    for norm, states, other in (("post", final, pre), ("pre", pre, final)):
        model = build_drafter(weights, voc, DrafterOptions(norm=norm, **options))
        with torch.no_grad():
            targets = model.verifier_lm_head(model.verifier_norm(states))
            wrong = model.verifier_lm_head(model.verifier_norm(other))
        assert isinstance(model.verifier_norm, AlreadyNormed) == (norm == "post")
        assert torch.equal(targets.argmax(-1), truth)
        assert not torch.equal(wrong.argmax(-1), truth), "the case is vacuous unless the wrong norm shows"


def _final_states(directory: Path, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(after the final norm, logits, before it) of a float32 forward."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    before: list[torch.Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda _, inputs: before.append(inputs[0].detach()))
    with torch.no_grad():
        out = model(ids, output_hidden_states=True)
    return out.hidden_states[-1], out.logits, before[0]
