"""TorchSpec: `dataset.json`, `manifest.jsonl` and `samples/{sha1 of data_id}.pt`, one torch.save dictionary a sample.

`input_ids` int64 [1, S], `hidden_states` [1, S, L·H] = auxiliary states, `last_hidden_states` [1, S, H] = final state,
`data_id`, `packed_loss_mask` = run lengths as text, `metadata`. Read from lightseekorg/TorchSpec (pull request 143):
torchspec/offline/dataset.py (OfflineDataset writes and reads), torchspec/offline/saving_actor.py,
tests/test_offline_replay.py, torchspec/data/utils.py (pack_loss_mask), torchspec/utils/misc.py (default layers).

- Layers: ids are outputs of the 0-based layer, default [1, n/2−1, n−4]. That holds for its SGLang and HF engines; what
  its vLLM engines make of an id has changed over time, so for pre-norm data they must be named.
- Norm: `last_hidden_states_prenorm` of dataset.json; its loader refuses a dataset that does not say.
- Mask: runs of zeros and ones in turn, beginning with zeros ("2,3": two zeros, three ones), of the token at the same
  place. Its loader cuts or zero-fills a mask of another length; here that is a `length_mismatch`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from extractor.foreign import pickles
from extractor.foreign.facts import Facts
from extractor.foreign.files import read_plain, write_json, write_whole
from extractor.foreign.outgoing import Outgoing, Place, save
from extractor.foreign.reasons import Rejected
from extractor.foreign.sample import ForeignSample, Item, ids_of, plain, rows_of, split_width, token_row
from hsstore.errors import FormatError, UsageError
from hsstore.records import Capture

DATASET = "dataset.json"
MANIFEST = "manifest.jsonl"
VERSION = 1
_LONGEST = 1 << 31


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchSpecReader:
    root: Path
    cast: bool

    def items(self) -> list[Item]:
        path = self.root / MANIFEST
        if not path.is_file():
            raise UsageError(f"{self.root} has no {MANIFEST}", hint="give the directory that holds dataset.json")
        items: list[Item] = []
        seen: set[str] = set()
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    items.append(self._item(line, f"{MANIFEST}:{number}", seen))
        return items

    def _item(self, line: bytes, where: str, seen: set[str]) -> Item:
        try:
            row = json.loads(line)
            name, label = row["file"], str(row["data_id"])
            path = (self.root / name).resolve()
            inside = self.root.resolve() in path.parents
        except (ValueError, KeyError, TypeError, OSError, RuntimeError):  # of links in a circle, too
            return Item(name=where, path=self.root, fault=("bad_line", "no object with file and data_id"))
        if not inside:
            return Item(name=where, path=self.root, fault=("bad_line", f"{name!r} leads out of the directory"))
        fault = ("duplicate", f"data_id {label!r} is in the manifest twice") if label in seen else None
        seen.add(label)
        return Item(name=str(name), path=path, label=label, fault=fault)

    def read(self, item: Item, *, whole: bool) -> ForeignSample:
        entries, mapped, unchecked = pickles.load(item.path, whole=whole)
        if str(entries.get("data_id")) != item.label:
            raise Rejected("label_differs", f"{entries.get('data_id')!r} in the file, {item.label!r} in the manifest")
        final, cast_from = rows_of(plain(entries, "last_hidden_states"), "last_hidden_states", cast=self.cast)
        wide, _ = rows_of(plain(entries, "hidden_states"), "hidden_states", cast=self.cast)
        packed = entries.get("packed_loss_mask")
        return ForeignSample(
            input_ids=ids_of(token_row(plain(entries, "input_ids"), "input_ids")),
            loss_mask=None if packed is None else unpack_mask(packed),
            states=(*split_width(wide, final.shape[1], "hidden_states"), final),
            cast_from=cast_from,
            mapped=mapped,
            unchecked=unchecked,
        )


def recorded(root: Path) -> Facts:
    """What dataset.json says. Raises `UsageError` or `FormatError` when it cannot be used."""
    path = root / DATASET
    try:
        document: Any = json.loads(read_plain(path))
        version, prenorm = document["version"], document.get("last_hidden_states_prenorm")
    except FileNotFoundError:
        raise UsageError(f"{root} has no {DATASET}", hint="give the directory that TorchSpec saved") from None
    except UsageError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{path} cannot be used: {error!r}"[:200], hint="restore it") from None
    if version != VERSION:
        raise FormatError(f"{path} is of version {version!r}; this hsstore reads version {VERSION}")
    if prenorm is not None and not isinstance(prenorm, bool):
        raise UsageError(f"{path}: last_hidden_states_prenorm is {prenorm!r}, expected true or false")
    return Facts(norm=None if prenorm is None else "pre" if prenorm else "post", source=DATASET)


def unpack_mask(packed: object) -> npt.NDArray[np.uint8]:
    """uint8 [T] of "zeros,ones,zeros,…" run lengths."""
    parts = packed.split(",") if isinstance(packed, str) else packed
    if not isinstance(parts, list | tuple) or not all(str(part).strip().isdecimal() for part in parts if part != ""):
        raise Rejected("bad_mask", f"packed_loss_mask is {packed!r:.60}")
    runs = [int(part) for part in parts if part != ""]
    if sum(runs) >= _LONGEST:
        raise Rejected("bad_mask", f"packed_loss_mask adds up to {sum(runs)} tokens")
    return np.repeat(np.arange(len(runs), dtype=np.uint8) & 1, runs)


def pack_mask(mask: npt.NDArray[np.uint8]) -> str:
    """Run lengths as text, beginning with that of the zeros even when it is 0."""
    if not len(mask):
        return ""
    edges = np.flatnonzero(np.diff(mask)) + 1
    runs = np.diff([0, *edges.tolist(), len(mask)]).tolist()
    return ",".join(map(str, [0, *runs] if mask[0] else runs))


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchSpecWriter:
    root: Path
    norm: str

    def path(self, place: Place) -> Path:
        return self.root / self._file(place)

    @staticmethod
    def _file(place: Place) -> str:
        return f"samples/{hashlib.sha1(str(place.source_index).encode(), usedforsecurity=False).hexdigest()}.pt"

    def write(self, sample: Outgoing, path: Path) -> None:
        entries: dict[str, object] = {
            "input_ids": sample.ids.unsqueeze(0),
            "hidden_states": sample.auxiliary.unsqueeze(0),
            "last_hidden_states": sample.final.unsqueeze(0),
            "data_id": str(sample.place.source_index),
            "packed_loss_mask": pack_mask(sample.loss_mask),
            "metadata": {},
        }
        save(entries, path)

    def finish(self, done: Sequence[Place], capture: Capture) -> None:
        """dataset.json, and manifest.jsonl, which makes the samples ones."""
        write_json(self.root / DATASET, {"version": VERSION, "last_hidden_states_prenorm": self.norm == "pre"})
        write_whole(self.root / MANIFEST, lambda path: self._write_manifest(path, done))

    def _write_manifest(self, path: Path, done: Sequence[Place]) -> None:
        splits = {"train": "train", "validation": "eval"}
        with open(path, "w", encoding="utf-8") as file:
            for place in done:
                row = {"split": splits[place.split], "data_id": str(place.source_index), "file": self._file(place)}
                file.write(json.dumps(row) + "\n")
