"""The EAGLE-3 drafter: speculators' model class with the verifier's weights in it, and one training forward.

Responsible for: building `Eagle3DraftModel` of speculators 0.9.0 from a verifier's tensors and a vocabulary, what is
frozen, in which dtype it computes, which attention and loss run on which device. Leaves the layer's shape to
`draft_layer`, rows and packing to `data` and `batching`, gradients and steps to `loop`, the proof to `audit`.

Where speculators 0.9.0 as it is would go wrong without an error, and what is done here:

- it freezes `lm_head`; the origin's recipe trains it (`train_lm_head`, the default), decided before DDP wraps it;
- it applies the final norm to the targets; states that have it already (`norm="post"`) must not get it twice:
  `AlreadyNormed` keeps the weight where it was and passes its input through;
- its rows near the end of a document are scored at step k against a row k further on, which may be another document's.
  m_k[j] = m[j+k] is all its forward knows, so no mask can express document[j] = document[j+k] exactly.
  `without_crossings` takes the stricter side: the first K−1 rows of every document but the first of a pack count at
  no step. Chats begin with untrained template tokens, so nothing changes for them; packed plain text loses up to K−1
  rows per document.
  `cond_acc_k`'s denominator still holds the last rows of a document that were right so far, as it does there.

Letters: S rows of a pack, H hidden size, A auxiliary states, V verifier vocabulary, V_d draft vocabulary, K TTT steps.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from hsstore.errors import ConflictError, MissingExtraError, UsageError, extra_hint
from trainer.draft_layer import DraftLayer, default_layer, llama_config
from trainer.verifier import VerifierFacts, VerifierWeights
from trainer.vocabulary import Vocabulary

if TYPE_CHECKING:
    from speculators.models.eagle3 import Eagle3DraftModel
    from transformers import LlamaConfig

# Verifiers whose final norm multiplies by 1 + w; the drafter's copy multiplies by w, so it gets 1 + w as its weight.
ONE_PLUS_WEIGHT = frozenset(("gemma", "gemma2", "gemma3", "gemma3_text", "qwen3_5", "qwen3_5_text", "recurrent_gemma"))
MEAN_EPSILON = 1e-5  # speculators divides by Σ mask + this; taken out again to get sums that add up over ranks

FLEX_BLOCK = 128  # flex attention's masks are made of such blocks, and speculators appends a step's keys block by block

Pair = tuple[torch.Tensor, torch.Tensor]


class AlreadyNormed(torch.nn.Identity):
    """The final norm of a verifier whose stored states have it: its weight, frozen and unused."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight, requires_grad=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterOptions:
    """What a drafter is and how it computes. The defaults are the origin run's and load into every engine."""

    layers: tuple[int, ...]
    """k of each auxiliary state `after_k`, in the order in which they are concatenated."""
    norm: Literal["post", "pre"]
    """Whether the stored `final` states are after or before the verifier's final norm."""
    draft_vocab_size: int | None = 32_000
    """V_d; None for the whole verifier vocabulary."""
    ttt_steps: int = 3
    """K."""
    step_decay: float = 1.0
    """γ: step k weighs γ^k."""
    train_lm_head: bool = True
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    norm_output: bool = False
    attention: Literal["auto", "sdpa", "simple_flex_attention"] = "auto"
    """auto: flex on CUDA; sdpa on the CPU, where flex has no backward."""
    compute_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Of activations and frozen weights; trained weights are float32 either way. float32 is for comparisons: on a CPU
    with bfloat16 units a step takes 1.5 times as long (0.81 against 0.53 s for 512 rows of SmolLM2's size)."""
    layer: DraftLayer | None = None
    """None: the default for the verifier's family."""

    def __post_init__(self) -> None:
        if not self.layers:
            raise UsageError("a drafter needs at least one auxiliary state")
        if self.ttt_steps < 1:
            raise UsageError(f"{self.ttt_steps} TTT steps: at least 1 is needed")


def layer_ids(names: Sequence[str]) -> tuple[int, ...]:
    """`("after_2", "after_15", "final")` → `(2, 15)`: the auxiliary states of a capture."""
    return tuple(int(name.removeprefix("after_")) for name in names if name.startswith("after_"))


def default_layers(n_layers: int) -> tuple[int, ...]:
    """k of the three states EAGLE-3 takes by default, design.md §6."""
    return (2, n_layers // 2, n_layers - 3)


def draft_config(facts: VerifierFacts, options: DrafterOptions, device: torch.device) -> LlamaConfig:
    """The drafter's decoder layer as transformers spells it."""
    require_speculators()
    return llama_config(facts, options.layer or default_layer(facts), _attention(options, device))


def build_drafter(
    weights: VerifierWeights,
    vocabulary: Vocabulary,
    options: DrafterOptions,
    device: torch.device | str = "cpu",
    *,
    seed: int = 0,
) -> Eagle3DraftModel:
    """A drafter ready for its first step: fresh layer and fc from `seed`, the rest the verifier's.

    `weights.lm_head` may hold all V rows or just the V_d of the vocabulary. The caller's random state is untouched.
    """
    device = torch.device(device)
    _check_fit(weights, vocabulary, options)
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(seed)
        model = empty_drafter(weights.facts, options, device)
    if not vocabulary.full:
        model.load_vocab_mappings(torch.from_numpy(vocabulary.t2d), torch.from_numpy(vocabulary.d2t))
    head = weights.lm_head
    if len(head) != vocabulary.draft_size:
        head = head[torch.from_numpy(vocabulary.t2d)]
    with torch.no_grad():
        model.embed_tokens.weight.copy_(weights.embed)
        model.verifier_lm_head.weight.copy_(head)
        model.lm_head.weight.copy_(head)
        model.verifier_norm.weight.copy_(weights.norm)
        if weights.facts.model_type in ONE_PLUS_WEIGHT:
            model.verifier_norm.weight.add_(1.0)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(device, torch.float32 if parameter.requires_grad else _dtype(options))
    return model.to(device).train()


def empty_drafter(facts: VerifierFacts, options: DrafterOptions, device: torch.device | str) -> Eagle3DraftModel:
    """The drafter without the verifier's weights (they are NaN), on the current default device, meta included.

    `device` is where it will run; it decides the attention. Nothing is read from disk or asked of a hub.
    """
    require_speculators()
    from speculators import SpeculatorsConfig, VerifierConfig
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    _check_options(facts, options)
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=draft_config(facts, options, torch.device(device)),
        draft_vocab_size=options.draft_vocab_size or facts.vocab_size,
        norm_before_residual=options.norm_before_residual,
        norm_before_fc=options.norm_before_fc,
        norm_output=options.norm_output,
        eagle_aux_hidden_state_layer_ids=list(options.layers),
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=options.ttt_steps)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=list(facts.architectures)),
        ),
    )
    model = Eagle3DraftModel(config)
    if options.norm == "post":
        model.verifier_norm = AlreadyNormed(model.verifier_norm.weight.detach())
    model.lm_head.weight.requires_grad_(options.train_lm_head)  # before DDP, which looks only once
    return model


def forward(
    model: torch.nn.Module, batch: Mapping[str, torch.Tensor], options: DrafterOptions
) -> tuple[torch.Tensor, dict[str, Pair]]:
    """One pack through K steps: the loss to differentiate, and metrics as (sum, total) that add up over packs.

    `batch` as `shift_batch` and packing leave it: `hidden_states` [1, S, A·H], `verifier_last_hidden_states` [1, S, H],
    `input_ids`, `document_ids` (−1 on padding), `loss_mask`, `position_ids`, each [1, S]. `model` may be wrapped in
    DDP. Metrics: `loss_k` over trained rows, `full_acc_k`, `cond_acc_k`; sums and totals also add up over ranks.
    """
    device = batch["hidden_states"].device
    dtype = _dtype(options)
    rows = batch["input_ids"].shape[1]
    if rows % FLEX_BLOCK and _attention(options, device) == "simple_flex_attention":
        raise UsageError(f"a pack of {rows} rows: flex attention needs a multiple of {FLEX_BLOCK}")
    mask = without_crossings(batch["document_ids"], batch["loss_mask"].to(torch.bool), options.ttt_steps)
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=dtype is torch.bfloat16):
        _, loss, raw = model(
            hidden_states=batch["hidden_states"].to(dtype),
            verifier_last_hidden_states=batch["verifier_last_hidden_states"].to(dtype),
            input_ids=batch["input_ids"].to(torch.int64),
            document_ids=batch["document_ids"].to(torch.int64),
            loss_mask=mask,
            position_ids=batch["position_ids"].to(torch.int64),
            ttt_steps=options.ttt_steps,
            ttt_step_loss_decay=options.step_decay,
            loss_config=loss_config(device.type),
        )
    return loss, _pairs(raw, options.ttt_steps)


def without_crossings(document_ids: torch.Tensor, loss_mask: torch.Tensor, ttt_steps: int) -> torch.Tensor:
    """The mask without the rows that an earlier document's rows would be scored against, both [1, S]."""
    mask = loss_mask.clone()
    for k in range(1, ttt_steps):
        mask[:, k:] &= document_ids[:, k:] == document_ids[:, :-k]
    return mask


@functools.cache
def loss_config(device_type: str) -> Any:
    """Forward KL in the implementation the device has: triton kernels on CUDA, plain torch elsewhere."""
    require_speculators()
    from speculators.losses import resolve_loss_config

    return resolve_loss_config("kl_div", "fused" if device_type == "cuda" else "eager")


def require_speculators() -> None:
    """Import speculators or say which extra brings it."""
    try:
        import speculators  # noqa: F401
    except ImportError as error:
        raise MissingExtraError(f"building a drafter needs speculators: {error}", hint=extra_hint("train")) from None


def _pairs(raw: Mapping[str, torch.Tensor], ttt_steps: int) -> dict[str, Pair]:
    """speculators' `X_sum`, `X_total`; its loss is a mean with total 1, which would not add up over packs."""
    pairs: dict[str, Pair] = {}
    for k in range(ttt_steps):
        rows = raw[f"full_acc_{k}_total"]
        pairs[f"loss_{k}"] = (raw[f"loss_{k}_sum"] * (rows + MEAN_EPSILON), rows)
        for name in (f"full_acc_{k}", f"cond_acc_{k}"):
            pairs[name] = (raw[f"{name}_sum"], raw[f"{name}_total"])
    return pairs


def _attention(options: DrafterOptions, device: torch.device) -> str:
    if options.attention != "auto":
        return options.attention
    return "simple_flex_attention" if device.type == "cuda" else "sdpa"


def _dtype(options: DrafterOptions) -> torch.dtype:
    return torch.bfloat16 if options.compute_dtype == "bfloat16" else torch.float32


def _check_options(facts: VerifierFacts, options: DrafterOptions) -> None:
    size = options.draft_vocab_size or facts.vocab_size
    if not 2 <= size <= facts.vocab_size:  # one token has probability 1: no loss, and nothing moves
        raise UsageError(
            f"a draft vocabulary of {size} does not fit the verifier's {facts.vocab_size} tokens",
            hint=f"--draft-vocab takes 2 to {facts.vocab_size}",
        )
    wrong = [k for k in options.layers if not 1 <= k <= facts.n_layers]
    if wrong or len(set(options.layers)) != len(options.layers):
        raise UsageError(f"auxiliary states {list(options.layers)} do not fit a verifier of {facts.n_layers} layers")


def _check_fit(weights: VerifierWeights, vocabulary: Vocabulary, options: DrafterOptions) -> None:
    """Sizes that would otherwise surface as a shape error of some copy."""
    vocabulary.check()
    facts = weights.facts
    if vocabulary.verifier_size != facts.vocab_size:
        raise ConflictError(
            f"the vocabulary is for {vocabulary.verifier_size} tokens, {facts.where} has {facts.vocab_size}"
        )
    if vocabulary.draft_size != (options.draft_vocab_size or facts.vocab_size):
        raise ConflictError(
            f"the vocabulary has {vocabulary.draft_size} draft ids, asked for {options.draft_vocab_size}"
        )
    if len(weights.lm_head) not in (facts.vocab_size, vocabulary.draft_size):
        raise ConflictError(
            f"the head has {len(weights.lm_head)} rows, expected {facts.vocab_size} or {vocabulary.draft_size}"
        )
