"""Small synthetic stores for tests: random states, real format, written through the real writer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hsstore.digest import sample_uid
from hsstore.layout import assign
from hsstore.records import Capture, InputSummary, SampleEntry, Split
from hsstore.store import Store
from hsstore.writer import StagedShard, StoreWriter


def capture(hidden_size: int = 8, layers: Sequence[str] = ("after_2", "after_3", "after_5", "final")) -> Capture:
    return Capture(
        model="tiny",
        architecture="LlamaForCausalLM",
        revision="",
        weights_sha256="0" * 64,
        config_sha256="1" * 64,
        tokenizer_sha256="2" * 64,
        chat_template_sha256="",
        layers=tuple(layers),
        norm="post",
        hidden_size=hidden_size,
        vocab_size=1000,
        n_layers=8,
        dtype="bfloat16",
        engine="transformers",
        engine_version="test",
        compute_dtype="float32",
        flags={},
    )


@dataclass(frozen=True)
class Sample:
    """One sample with its true states, kept to compare with what the store gives back."""

    entry: SampleEntry
    input_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.uint8]
    states: dict[str, npt.NDArray[np.uint16]]


def make_samples(
    lengths: Sequence[int], *, seed: int = 0, hidden_size: int = 8, layers: Sequence[str] = ("after_2", "final")
) -> list[Sample]:
    """Random samples of the given lengths; the states are random finite bfloat16 patterns."""
    rng = np.random.default_rng(seed)
    out = []
    for i, n in enumerate(lengths):
        ids = rng.integers(0, 1000, n, dtype=np.int32)
        mask = (rng.random(n) < 0.6).astype(np.uint8)
        states = {
            k: (rng.standard_normal((n, hidden_size)).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
            for k in layers
        }
        out.append(Sample(SampleEntry(sample_uid(ids, mask), i, 0, n), ids, mask, states))
    return out


def input_summary(n: int) -> InputSummary:
    return InputSummary(name="synthetic.jsonl", bytes=0, sha256="3" * 64, lines=n, rejected={}, options={})


def create(root: Path, samples: Sequence[Sample], **options: object) -> StoreWriter:
    """An empty store laid out for the samples."""
    first = samples[0]
    arguments = {"split": Split(salt="hsstore", validation_fraction=0.1), "chunk_rows": 16, **options}
    return StoreWriter.create(
        root,
        capture=capture(next(iter(first.states.values())).shape[1], tuple(first.states)),
        samples=[s.entry for s in samples],
        input_summary=input_summary(len(samples)),
        **arguments,  # type: ignore[arg-type]
    )


def stage(writer: StoreWriter, shard: int, samples: Sequence[Sample]) -> StagedShard:
    """A staged shard with the samples' states written into their rows."""
    entries = assign([s.entry for s in samples], writer.header.shard_rows)[shard]
    by_index = {s.entry.source_index: s for s in samples}
    tokens = {e.source_index: (by_index[e.source_index].input_ids, by_index[e.source_index].loss_mask) for e in entries}
    staged = writer.stage(shard, entries, tokens)
    for state, path in staged.files.items():
        with open(path, "r+b") as file:
            for e in entries:
                rows = by_index[e.source_index].states[state]
                file.seek(e.row * rows.shape[1] * 2)
                file.write(rows.tobytes())
    return staged


def make_store(root: Path, samples: Sequence[Sample], **options: object) -> Store:
    """A complete store of the samples, manifest included."""
    writer = create(root, samples, **options)
    for shard in writer.todo():
        assert stage(writer, shard, samples).commit() is not None
    writer.finish()
    return Store.open(root)
