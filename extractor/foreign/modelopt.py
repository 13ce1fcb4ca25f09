"""ModelOpt (NVIDIA Model Optimizer): `{conversation_id}.pt`, one torch.save dictionary a sample.

`input_ids` int64 [S], `hidden_states` [S, H] = final state, `aux_hidden_states` [S, L·H], `conversation_id`, and where
there are any `loss_mask` int64 [S] and `hidden_states_prenorm` bool. Read from NVIDIA/Model-Optimizer:
examples/speculative_decoding/collect_hidden_states/{compute_hidden_states_hf,compute_hidden_states_vllm,common}.py
(they write), nvidia-modelopt 0.47.0 torch/speculative/eagle/utils.py OfflineSupervisedDataset (reads) and
torch/speculative/plugins/hf_eagle.py default_eagle_aux_layer_ids.

- Layers: ids are outputs of the 0-based layer, default [1, n/2−1, n−4], in its HF and TensorRT-LLM programs. Its vLLM
  program hands them to vLLM as they are (after_k), an earlier one took speculators' worker (one layer later).
- Norm: HF and TensorRT-LLM give the final state after the norm, both vLLM programs before it, and most of these files
  do not say which it was. Its loader takes a missing `hidden_states_prenorm` for false; here `--norm` must be given.
- Mask: of the token at the same place. Without one its loader trains on all tokens; here `--mask-missing` decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from extractor.foreign import pickles
from extractor.foreign.files import natural, walk
from extractor.foreign.outgoing import Outgoing, Place, save
from extractor.foreign.reasons import Rejected
from extractor.foreign.sample import (
    ForeignSample,
    Item,
    Norm,
    ids_of,
    mask_of,
    plain,
    rows_of,
    split_width,
    token_row,
)
from hsstore.records import Capture


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptReader:
    root: Path
    cast: bool

    def items(self) -> list[Item]:
        names = {path.relative_to(self.root).as_posix(): path for path in walk(self.root, (".pt",))}
        return [Item(name=name, path=names[name]) for name in sorted(names, key=lambda name: (natural(name), name))]

    def read(self, item: Item, *, whole: bool) -> ForeignSample:
        entries, mapped, unchecked = pickles.load(item.path, whole=whole)
        final, cast_from = rows_of(plain(entries, "hidden_states"), "hidden_states", cast=self.cast)
        wide, _ = rows_of(plain(entries, "aux_hidden_states"), "aux_hidden_states", cast=self.cast)
        mask = mask_of(token_row(plain(entries, "loss_mask"), "loss_mask")) if "loss_mask" in entries else None
        return ForeignSample(
            input_ids=ids_of(token_row(plain(entries, "input_ids"), "input_ids")),
            loss_mask=mask,
            states=(*split_width(wide, final.shape[1], "aux_hidden_states"), final),
            norm=_norm(entries),
            cast_from=cast_from,
            mapped=mapped,
            unchecked=unchecked,
        )


def _norm(entries: dict[str, Any]) -> Norm | None:
    value = entries.get("hidden_states_prenorm")
    if value is None:
        return None
    if isinstance(value, bool | int):
        return "pre" if value else "post"
    tensor = plain(entries, "hidden_states_prenorm")
    if tensor.numel() != 1:
        raise Rejected("wrong_shape", f"hidden_states_prenorm is {tuple(tensor.shape)}, expected one value")
    return "pre" if bool(tensor.item()) else "post"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptWriter:
    root: Path

    def path(self, place: Place) -> Path:
        return self.root / f"{_name(place)}.pt"

    def write(self, sample: Outgoing, path: Path) -> None:
        entries: dict[str, object] = {
            "input_ids": sample.ids,
            "hidden_states": sample.final,
            "aux_hidden_states": sample.auxiliary,
            "loss_mask": sample.mask,
            "conversation_id": _name(sample.place),
            "hidden_states_prenorm": sample.norm == "pre",
        }
        save(entries, path)

    def finish(self, done: Sequence[Place], capture: Capture) -> None:
        """Nothing lies beside the files."""


def _name(place: Place) -> str:
    return f"{place.source_index:08d}"
