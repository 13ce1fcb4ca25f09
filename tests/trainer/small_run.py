"""A verifier and a store small enough to train on in a test: real model, real forward, real files.

Responsible for: the checkpoint of a random Llama, the store of its states, and reading back what a run wrote.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hsstore import modeldigest
from hsstore.digest import sample_uid
from hsstore.layout import assign
from hsstore.records import Capture, InputSummary, SampleEntry, Split, sha256_hex
from hsstore.writer import StoreWriter
from trainer.options import TrainOptions

HIDDEN, VOCAB, N_LAYERS = 64, 500, 6
LAYERS = ("after_2", "after_3", "after_5", "final")


def write_model(directory: Path, *, seed: int = 0) -> Any:
    """A random Llama of 6 layers as transformers saves it. Returns the model, in float32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=96,
        num_hidden_layers=N_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.2,
    )
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(directory)
    return model


def write_store(
    root: Path,
    verifier: Path,
    model: Any,
    *,
    n_samples: int = 60,
    seed: int = 0,
    validation_fraction: float = 0.2,
    stop: int | None = None,
) -> None:
    """A store of the model's states on samples of 5 to 60 tokens whose first quarter is prompt.

    Ends after `stop` shards; called once more it goes on with the others.
    """
    rng = np.random.default_rng(seed)
    torch.set_num_threads(1)  # forwards of a few rows: more threads only wait for each other
    tokens = {}
    for i in range(n_samples):
        n = int(rng.integers(5, 60))
        ids = rng.integers(0, VOCAB // 5, n).astype(np.int32)
        tokens[i] = (ids, (np.arange(n) >= n // 4).astype(np.uint8))
    entries = [SampleEntry(sample_uid(*tokens[i]), i, 0, len(tokens[i][0])) for i in tokens]
    writer = (
        StoreWriter.open(root)
        if root.exists()
        else StoreWriter.create(
            root,
            capture=capture_of(verifier),
            split=Split(salt="test", validation_fraction=validation_fraction),
            samples=entries,
            input_summary=InputSummary(
                name="small.jsonl", bytes=0, sha256="3" * 64, lines=n_samples, rejected={}, options={}
            ),
            chunk_rows=16,
        )
    )
    members = assign(entries, writer.header.shard_rows)
    for shard in writer.todo()[:stop]:
        _write_shard(writer, shard, members[shard], tokens, model)
    writer.finish()


def capture_of(verifier: Path) -> Capture:
    return Capture(
        model=verifier.name,
        architecture="LlamaForCausalLM",
        revision="",
        weights_sha256=modeldigest.weights_sha256(modeldigest.weight_files(verifier), sampled=False),
        config_sha256=sha256_hex((verifier / "config.json").read_bytes()),
        tokenizer_sha256="2" * 64,
        chat_template_sha256="",
        layers=LAYERS,
        norm="post",
        hidden_size=HIDDEN,
        vocab_size=VOCAB,
        n_layers=N_LAYERS,
        dtype="bfloat16",
        engine="transformers",
        engine_version="test",
        compute_dtype="float32",
        flags={},
    )


def options(verifier: Path, source: str | Path, out: Path, **changes: Any) -> TrainOptions:
    """A run of some ten steps of packs of 64."""
    values = {
        "max_seq_len": 64,
        "epochs": 1,
        "lr": 1e-3,
        "warmup_steps": 2,
        "draft_vocab": 100,
        "num_workers": 1,
        "threads": 1,
        "device": "cpu",
    }
    return TrainOptions(source=str(source), verifier=str(verifier), out=str(out), **{**values, **changes})


def lines(out: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what depends on the clock."""
    text = (out / "metrics.jsonl").read_text()
    found = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    for line in found:
        line.pop("time", None)
    return found


def _write_shard(writer: StoreWriter, shard: int, members: tuple[SampleEntry, ...], tokens: Any, model: Any) -> None:
    staged = writer.stage(shard, members, {e.source_index: tokens[e.source_index] for e in members})
    for entry in members:
        states = _states(model, tokens[entry.source_index][0])
        for name, path in staged.files.items():
            with open(path, "r+b") as file:
                file.seek(entry.row * HIDDEN * 2)
                file.write(states[name].view(torch.int16).numpy().tobytes())
    assert staged.commit() is not None


def _states(model: Any, ids: np.ndarray) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        out = model.model(torch.from_numpy(ids.astype(np.int64))[None], output_hidden_states=True)
    hidden = out.hidden_states
    named = {name: hidden[int(name.removeprefix("after_"))] for name in LAYERS[:-1]}
    named["final"] = out.last_hidden_state
    return {name: state[0].to(torch.bfloat16).contiguous() for name, state in named.items()}
