"""Everything a run needs before its first step, and the proof that its parts belong together.

Responsible for: opening the source, plans, draft vocabulary, drafter, optimizer, DDP. Leaves the steps to `loop`.

Letters: V verifier vocabulary, V_d draft vocabulary, H hidden size, W ranks.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from hsstore.api import EpochInfo, PlanInfo
from hsstore.console import note
from hsstore.errors import UsageError
from hsstore.plan import PlanParameters
from hsstore.records import Capture, canonical, sha256_hex
from hsstore.source import BatchSource
from trainer import audit, distributed
from trainer.data import RowLayout
from trainer.distributed import Ranks
from trainer.draft_layer import read_draft_config
from trainer.drafter import DrafterOptions, build_drafter, layer_ids
from trainer.options import TrainOptions
from trainer.preflight import check_verifier, check_weights, open_run_source
from trainer.schedule import Cursor, steps_left
from trainer.state import Identity, to_resume
from trainer.verifier import VerifierFacts, VerifierWeights, load_verifier, locate, read_config
from trainer.vocabulary import Vocabulary, build_vocabulary

BETAS = (0.9, 0.95)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A run that is ready for its first step."""

    options: TrainOptions
    ranks: Ranks
    threads: int
    source: BatchSource
    train: PlanInfo
    epochs: tuple[EpochInfo, ...]
    """One for each epoch that the run can reach."""
    validation: PlanInfo | None
    """None when the store holds no validation samples."""
    validation_epoch: EpochInfo | None
    vocabulary: Vocabulary
    drafter: DrafterOptions
    model: torch.nn.Module
    net: torch.nn.Module
    """`model`, wrapped by DDP when there are several ranks."""
    optimizer: torch.optim.Optimizer
    rows: RowLayout
    identity: Identity

    @property
    def trained(self) -> list[torch.nn.Parameter]:
        return [p for p in self.model.parameters() if p.requires_grad]


def prepare(options: TrainOptions, ranks: Ranks) -> Setup:
    """Build it all. Raises what `hsstore.errors` has for a store, verifier or option that does not fit."""
    threads = distributed.use_threads(options.threads, ranks.world)
    distributed.deterministic(ranks.device)
    source = open_run_source(options)
    capture, facts = source.header.capture, read_config(options.verifier)
    check_verifier(capture, facts)
    if ranks.first:
        check_weights(capture, facts)
    train, epochs = _train_plan(source, options, ranks)
    validation, validation_epoch = _validation_plan(source, options, ranks)
    vocabulary = _vocabulary(source, options, ranks, capture)
    drafter = DrafterOptions(
        layers=layer_ids(capture.layers),
        norm=capture.norm,
        draft_vocab_size=vocabulary.draft_size,
        ttt_steps=options.ttt_steps,
        step_decay=options.ttt_decay,
        train_lm_head=options.train_head,
        compute_dtype=options.compute_dtype,
        layer=read_draft_config(options.draft_config, facts) if options.draft_config else None,
    )
    weights = load_verifier(options.verifier, t2d=vocabulary.t2d)
    weights_sha256 = _tensors_sha256(weights)
    model = _model(options, ranks, facts, weights, vocabulary, drafter)
    trained = [p for p in model.parameters() if p.requires_grad]
    return Setup(
        options=options,
        ranks=ranks,
        threads=threads,
        source=source,
        train=train,
        epochs=epochs,
        validation=validation,
        validation_epoch=validation_epoch,
        vocabulary=vocabulary,
        drafter=drafter,
        model=model,
        net=_wrap(model, ranks),
        optimizer=torch.optim.AdamW(trained, lr=options.lr, betas=BETAS, weight_decay=options.weight_decay),
        rows=RowLayout(
            max_rows=options.max_seq_len,
            layers=capture.layers[:-1],
            hidden_size=capture.hidden_size,
            guard_rows=options.ttt_steps - 1,
            fixed=ranks.device.type == "cuda",
        ),
        identity=Identity(
            plan_id=train.plan_id,
            manifest_id=source.manifest_id,
            capture_sha256=sha256_hex(canonical(capture)),
            vocabulary_sha256=vocabulary.digest,
            verifier_sha256=capture.config_sha256,
            weights_sha256=weights_sha256,
        ),
    )


def _train_plan(source: BatchSource, options: TrainOptions, ranks: Ranks) -> tuple[PlanInfo, tuple[EpochInfo, ...]]:
    plan = source.make_plan(
        PlanParameters(max_seq_len=options.max_seq_len, seed=options.seed, split="train", overflow=options.overflow)
    )
    epochs = tuple(ranks.share(_epochs(source, plan.plan_id, options, ranks.world) if ranks.first else []))
    if not sum(e.n_batches for e in epochs):
        raise UsageError(f"{options.source} has no samples to train on", hint="see `hsstore info`")
    return plan, epochs


def _epochs(source: BatchSource, plan_id: str, options: TrainOptions, world: int) -> list[EpochInfo]:
    """Those that the run can reach: planning an epoch costs time, and `max_steps` may end the run in the first."""
    found = to_resume(options)
    step, cursor = (found[1].step, found[1].cursor) if found else (0, Cursor(epoch=0, bins_consumed=0))
    infos: list[EpochInfo] = []
    for epoch in range(options.epochs):
        infos.append(source.epoch_info(plan_id, epoch))
        left = steps_left([e.n_batches for e in infos], cursor, world)
        if not infos[0].n_batches or (options.max_steps is not None and step + left >= options.max_steps):
            break
    return infos


def _validation_plan(
    source: BatchSource, options: TrainOptions, ranks: Ranks
) -> tuple[PlanInfo | None, EpochInfo | None]:
    plan = source.make_plan(PlanParameters(max_seq_len=options.max_seq_len, seed=options.seed, split="validation"))
    epoch = ranks.share(source.epoch_info(plan.plan_id, 0) if ranks.first else None)
    assert epoch is not None
    return (plan, epoch) if epoch.n_batches else (None, None)


def _vocabulary(source: BatchSource, options: TrainOptions, ranks: Ranks, capture: Capture) -> Vocabulary:
    size = min(options.draft_vocab or capture.vocab_size, capture.vocab_size)
    if ranks.first and size < options.draft_vocab:
        note(f"--draft-vocab {options.draft_vocab:,} is more than the verifier has: taking all its {size:,} tokens")
    counts = ranks.share(source.token_counts("train") if ranks.first else None)
    assert counts is not None
    return build_vocabulary(counts, size)


def _tensors_sha256(weights: VerifierWeights) -> str:
    sha = hashlib.sha256()
    for tensor in (weights.embed, weights.lm_head, weights.norm):
        sha.update(f"{tensor.dtype} {list(tensor.shape)}\n".encode())
        sha.update(tensor.contiguous().view(torch.uint8).numpy())
    return sha.hexdigest()


def _model(
    options: TrainOptions,
    ranks: Ranks,
    facts: VerifierFacts,
    weights: VerifierWeights,
    vocabulary: Vocabulary,
    drafter: DrafterOptions,
) -> torch.nn.Module:
    model: torch.nn.Module = build_drafter(weights, vocabulary, drafter, ranks.device, seed=options.seed)
    expected = audit.expectations(drafter)
    if ranks.first:
        report = audit.audit(model, expected, audit.sources(locate(options.verifier, facts)))
        _print(["freeze audit", *report.lines()])
    audit.check_before_step(model, expected)
    return model


def _wrap(model: torch.nn.Module, ranks: Ranks) -> torch.nn.Module:
    if ranks.world == 1:
        return model
    # The buffers (vocabulary maps, rotary frequencies) never change: no broadcast before each forward pass. torch 2.14
    # renames that setting and warns about the old name.
    known = inspect.signature(DistributedDataParallel).parameters
    buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    settings: dict[str, Any] = {buffers: False, "find_unused_parameters": False, "gradient_as_bucket_view": True}
    device_ids = [ranks.device.index] if ranks.device.type == "cuda" else None
    return DistributedDataParallel(model, device_ids=device_ids, **settings)


def _print(lines: Sequence[str]) -> None:
    for line in lines:
        note(line)
