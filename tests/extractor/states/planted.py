"""Stores of SmolLM2's true states, with or without a fault planted in them, written through the real writer.

The truth comes from transformers' own `output_hidden_states`, not from the hooks that the check uses. Leaves what each
fault must be called to the tests.

Letters: T tokens, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from extractor.chat import ChatTokenizer
from extractor.engines.base import EngineInfo
from extractor.fingerprint import capture_of
from extractor.verifier import read_verifier
from hsstore.digest import sample_uid
from hsstore.layout import assign
from hsstore.modeldigest import weight_files, weights_sha256
from hsstore.records import Capture, SampleEntry, Split
from hsstore.writer import StoreWriter
from tests.stores import input_summary

LAYERS = ("after_2", "after_15", "after_27", "final")
N_LAYERS = 30
ANSWERS = (  # the model's own words: it predicts most of them
    (
        "Explain gravity to a ten year old.",
        "Gravity is like gravity. Imagine you have a blanket. Now, imagine you're going to float on it. But why does it"
        " float? That's because of gravity. Gravity pulls things down towards the ground. So, in science, gravity is"
        " like a big hug that helps things move around.",
    ),
    (
        "Summarize the history of the printing press in a few sentences.",
        "The printing press was invented by Johannes Brahms, a German composer and Johannesstherapie, inventor of the"
        " musical production, in 1745.",
    ),
    (
        "What is inflation, in simple words?",
        "Inflation is a phenomenon where the general price level of the economy gets artificially inflated, making it"
        " seem like the economy is growing at a faster rate than it actually is. This can be misleading and false.",
    ),
    (
        "Write one sentence about autumn.",
        "The gentle warmth of autumn brings a glimmer of life to the landscapes that surround us, as the leaves of all"
        " colors swirl in a vibrant tapestry of color.",
    ),
)


@dataclass(frozen=True)
class Truth:
    """One sample and every state of it: `after_0` … `after_30` (before the norm), `final` (after it)."""

    ids: Any
    """int32 [T]"""
    mask: Any
    """uint8 [T]"""
    states: dict[str, Any]
    """uint16 [T, H] bfloat16 patterns of a float32 forward."""

    def with_states(self, **states: Any) -> Truth:
        return replace(self, states=self.states | states)


def chats() -> list[list[dict[str, str]]]:
    return [[{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in ANSWERS]


def encoded(model: Path) -> list[tuple[Any, Any]]:
    """(ids, mask) of the conversations."""
    tokenizer = ChatTokenizer.load(model)
    tokens = [tokenizer.encode_chat(chat) for chat in chats()]
    return [(t.ids.astype(np.int32), t.mask) for t in tokens]


def load(model: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()


def truth(model: Any, ids: Any, mask: Any) -> Truth:
    """Every state of one sample."""
    import torch

    before: list[Any] = []
    hook = model.model.norm.register_forward_pre_hook(lambda _m, args: before.append(args[0]))
    with torch.inference_mode():
        out = model(input_ids=torch.from_numpy(ids.astype(np.int64))[None], output_hidden_states=True)
    hook.remove()
    named = {f"after_{k}": h for k, h in enumerate(out.hidden_states[:-1])}
    named |= {f"after_{len(named)}": before[0], "final": out.hidden_states[-1]}
    return Truth(ids, mask, {name: patterns(h[0]) for name, h in named.items()})


def patterns(values: Any) -> Any:
    import torch

    return values.to(torch.bfloat16).view(torch.int16).numpy().view("u2").copy()


def capture(model: Path, **fields: Any) -> Capture:
    """What a float32 run of the transformers engine records."""
    info = EngineInfo(
        engine="transformers", version="5", norm="post", compute_dtype="float32", longest_tokens=99, flags={}
    )
    digest = weights_sha256(weight_files(model), sampled=False)
    layers = fields.pop("layers", LAYERS)
    return replace(capture_of(read_verifier(str(model)), layers, digest, "full", info), **fields)


def write(root: Path, samples: Sequence[Truth], made_by: Capture) -> Path:
    """A complete store of these states. Shards of 256 rows: two or three samples each."""
    entries = [SampleEntry(sample_uid(s.ids, s.mask), i, 0, len(s.ids)) for i, s in enumerate(samples)]
    split = Split(salt="s", validation_fraction=0.1)
    summary = input_summary(len(samples))
    writer = StoreWriter.create(
        root, capture=made_by, split=split, samples=entries, input_summary=summary, shard_rows=256, chunk_rows=16
    )
    for shard, placed in enumerate(assign(entries, 256)):
        tokens = {e.source_index: (samples[e.source_index].ids, samples[e.source_index].mask) for e in placed}
        staged = writer.stage(shard, placed, tokens)
        for state, path in staged.files.items():
            with open(path, "r+b") as file:
                for e in placed:
                    rows = samples[e.source_index].states[state]
                    file.seek(e.row * rows.shape[1] * 2)
                    file.write(rows.tobytes())
        assert staged.commit() is not None
    writer.finish()
    return root
