"""Samples and foreign directories for the tests of import and export.

The directories are spelled here as each project's own program writes them, apart from our writers, so that a reader and
a writer of ours that share a mistake do not agree with each other. The stores are small and real.
"""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from hsstore.digest import sample_uid
from hsstore.records import SampleEntry
from hsstore.store import Store
from tests import stores

HIDDEN, VOCAB, N_LAYERS = 8, 1000, 8
LAYERS = ("after_2", "after_4", "after_5", "final")
LENGTHS = (5, 33, 2, 70, 7, 19)
MODEL = ("--n-layers", str(N_LAYERS), "--vocab-size", str(VOCAB))
CASES = [
    ("specforge", "post"),
    ("speculators", "pre"),
    ("speculators-0.4", "pre"),
    ("torchspec", "post"),
    ("torchspec", "pre"),
    ("modelopt", "post"),
    ("modelopt", "pre"),
]


def make_samples(lengths: Sequence[int] = LENGTHS, *, seed: int = 0, hidden: int = HIDDEN) -> list[stores.Sample]:
    """Random samples whose states are random finite bfloat16 patterns of every exponent, zeros and denormals too."""
    rng = np.random.default_rng(seed)
    out = []
    for i, n in enumerate(lengths):
        ids = rng.integers(0, VOCAB, n, dtype=np.int32)
        mask = (rng.random(n) < 0.6).astype(np.uint8)
        states = {name: finite(rng, n, hidden) for name in LAYERS}
        out.append(stores.Sample(SampleEntry(sample_uid(ids, mask), i, 0, n), ids, mask, states))
    return out


def finite(rng: np.random.Generator, n: int, hidden: int) -> npt.NDArray[np.uint16]:
    """Any bfloat16 pattern but NaN and infinity."""
    rows = rng.integers(0, 1 << 16, (n, hidden), dtype=np.uint16)
    rows[(rows & 0x7F80) == 0x7F80] &= 0xBFFF
    return rows


def make_store(root: Path, norm: str, samples: Sequence[stores.Sample], **options: object) -> Store:
    """A store of the samples whose capture says that norm."""
    capture = dataclasses.replace(stores.capture(HIDDEN, LAYERS), norm=norm)  # type: ignore[arg-type]
    writer = stores.StoreWriter.create(
        root,
        capture=capture,
        split=stores.Split(salt="hsstore", validation_fraction=0.3),
        samples=[s.entry for s in samples],
        input_summary=stores.input_summary(len(samples)),
        chunk_rows=16,
        **options,  # type: ignore[arg-type]
    )
    for shard in writer.todo():
        assert stores.stage(writer, shard, samples).commit() is not None
    writer.finish()
    return Store.open(root)


def assert_same(store: Store, samples: Sequence[stores.Sample], layers: Sequence[str] = LAYERS) -> None:
    """The store holds these samples, in this order, bit by bit; `layers` are its names of their states."""
    assert len(store.index) == len(samples) > 0
    assert store.layers == tuple(layers)
    for i, sample in enumerate(samples):
        np.testing.assert_array_equal(store.input_ids(i), sample.input_ids)
        np.testing.assert_array_equal(store.loss_mask(i), sample.loss_mask)
        for name, given in zip(layers, sample.states.values(), strict=True):
            np.testing.assert_array_equal(store.hidden(i, name), given)


def failures(store: Path) -> list[dict[str, str]]:
    """The list of what is not in a store."""
    lines = store.with_name(f"{store.name}.failed.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def bf16(rows: npt.NDArray[np.uint16]) -> torch.Tensor:
    return torch.from_numpy(rows.view(np.int16).copy()).view(torch.bfloat16)


def wide(sample: stores.Sample) -> torch.Tensor:
    """[T, 3H]"""
    return torch.cat([bf16(sample.states[name]) for name in LAYERS[:-1]], dim=-1)


def long(row: npt.NDArray[np.generic]) -> torch.Tensor:
    return torch.from_numpy(row.astype(np.int64))


def write_specforge(root: Path, samples: Sequence[stores.Sample], *, packed: bool = False) -> None:
    """As HiddenStatesGenerator._save_tensor_sync does."""
    for i, sample in enumerate(samples):
        path = root / "rows_0-2000" / f"data_{i}.ckpt{'.gz' if packed else ''}"
        path.parent.mkdir(parents=True, exist_ok=True)
        point = {
            "input_ids": long(sample.input_ids),
            "loss_mask": long(sample.loss_mask),
            "hidden_state": bf16(sample.states["final"]).unsqueeze(0),
            "aux_hidden_state": wide(sample).unsqueeze(0),
        }
        if packed:
            with gzip.open(path, "wb") as file:
                torch.save(point, file)
        else:
            torch.save(point, path)


def write_speculators_pt(root: Path, samples: Sequence[stores.Sample]) -> None:
    """As generate_and_save_hidden_states of 0.4 does, without the file it writes at the end of its run."""
    root.mkdir(parents=True, exist_ok=True)
    for i, sample in enumerate(samples):
        cleaned = {
            "input_ids": long(sample.input_ids),
            "hidden_states": [bf16(sample.states[name]) for name in LAYERS],
            "loss_mask": long(sample.loss_mask),
        }
        torch.save(cleaned, root / f"data_{i}.pt")


def write_torchspec(root: Path, samples: Sequence[stores.Sample], *, prenorm: bool | None) -> None:
    """As OfflineDataset.append does."""
    (root / "samples").mkdir(parents=True, exist_ok=True)
    (root / "dataset.json").write_text(json.dumps({"version": 1, "last_hidden_states_prenorm": prenorm}))
    with open(root / "manifest.jsonl", "w") as manifest:
        for i, sample in enumerate(samples):
            name = f"chat-{i}"
            file = f"samples/{hashlib.sha1(name.encode()).hexdigest()}.pt"
            record = {
                "input_ids": long(sample.input_ids).unsqueeze(0),
                "hidden_states": wide(sample).unsqueeze(0),
                "last_hidden_states": bf16(sample.states["final"]).unsqueeze(0),
                "data_id": name,
                "packed_loss_mask": pack(sample.loss_mask),
                "metadata": {"source": "test", "turns": [1, 2]},
            }
            torch.save(record, root / file)
            manifest.write(json.dumps({"split": "train", "data_id": name, "file": file}) + "\n")


def pack(mask: npt.NDArray[np.uint8]) -> str:
    """Run lengths by counting one by one, as the project does."""
    lengths, value, n = [], 0, 0
    for bit in mask.tolist():
        if bit == value:
            n += 1
        else:
            lengths.append(n)
            value, n = bit, 1
    return ",".join(map(str, [*lengths, n]))


def write_modelopt(
    root: Path, samples: Sequence[stores.Sample], *, prenorm: bool | None = None, mask: bool = True
) -> None:
    """As compute_hidden_states_hf.py does, with and without its later fields."""
    root.mkdir(parents=True, exist_ok=True)
    for i, sample in enumerate(samples):
        point: dict[str, object] = {
            "input_ids": long(sample.input_ids),
            "hidden_states": bf16(sample.states["final"]),
            "aux_hidden_states": wide(sample),
            "conversation_id": f"chat-{i}",
        }
        if mask:
            point["loss_mask"] = long(sample.loss_mask)
        if prenorm is not None:
            point["hidden_states_prenorm"] = prenorm
        torch.save(point, root / f"chat-{i}.pt")
