"""speculators 0.3 and 0.4: `data_{i}.pt`, one torch.save dictionary a sample.

`input_ids` int64 [S], `loss_mask` int64 [S], `hidden_states`: list of L + 1 tensors [S, H]. Read from speculators 0.3.0
and 0.4.0, data_generation/{vllm_hidden_states_generator,custom_worker,config_generator}.py and train/data.py, and from
vllm-project/speculators scripts/data_generation_offline.py (it writes, and `data_config.json` at the end of its run).

- Layers: its worker captures the *output* of the 0-based layer, so the default ids [2, n/2, n−3, n−1] are after 3,
  n/2 + 1, n − 2 and n: one layer later than what the same ids mean when such a drafter is served.
- Norm: the last one is the residual stream after layer n − 1, before the final norm.
- Mask: of the token at the same place, no shift on disk.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from extractor.foreign import pickles
from extractor.foreign.facts import Facts
from extractor.foreign.files import numbered, read_plain, walk, write_json
from extractor.foreign.outgoing import Outgoing, Place, bfloat16, save
from extractor.foreign.reasons import Rejected
from extractor.foreign.sample import (
    ForeignSample,
    Item,
    ids_of,
    mask_of,
    plain,
    plain_tensor,
    rows_of,
    token_row,
)
from hsstore.errors import UsageError
from hsstore.records import Capture

CONFIG = "data_config.json"
LENGTHS = "sample_lengths.json"
_NAME = re.compile(r"data_(\d+)\.pt")


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculatorsPtReader:
    root: Path
    cast: bool

    def items(self) -> list[Item]:
        return numbered(self.root, walk(self.root, (".pt",)), _NAME)

    def read(self, item: Item, *, whole: bool) -> ForeignSample:
        entries, mapped, unchecked = pickles.load(item.path, whole=whole)
        states = entries.get("hidden_states")
        if not isinstance(states, list | tuple) or len(states) < 2:
            found = "missing" if states is None else f"a {type(states).__name__}"
            raise Rejected("missing_tensor", f"hidden_states is {found}, expected a list of at least 2 tensors")
        names = [f"hidden_states[{i}]" for i in range(len(states))]
        tensors = [plain_tensor(s, name) for s, name in zip(states, names, strict=True)]
        rows = [rows_of(t, name, cast=self.cast) for t, name in zip(tensors, names, strict=True)]
        return ForeignSample(
            input_ids=ids_of(token_row(plain(entries, "input_ids"), "input_ids")),
            loss_mask=mask_of(token_row(plain(entries, "loss_mask"), "loss_mask")),
            states=tuple(r for r, _ in rows),
            cast_from=rows[-1][1],
            mapped=mapped,
            unchecked=unchecked,
        )


def recorded(root: Path) -> Facts:
    """What `data_config.json` says, when its run came to its end. Raises `UsageError` when that cannot be used."""
    path = root / CONFIG
    if not os.path.lexists(path):
        return Facts()
    try:
        document: Any = json.loads(read_plain(path))
        ids = sorted(int(i) for i in document["hidden_states"]["layer_ids"])  # its worker captures in layer order
        version = str(document.get("speculators_version", ""))
    except UsageError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{path} cannot be used: {error!r}"[:200], hint="correct it or move it away") from None
    return Facts(layer_ids=tuple(ids[:-1]), last_id=ids[-1] if ids else None, version=version, source=CONFIG)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculatorsPtWriter:
    root: Path

    def path(self, place: Place) -> Path:
        return self.root / f"data_{place.source_index}.pt"

    def write(self, sample: Outgoing, path: Path) -> None:
        states = [bfloat16(rows) for rows in sample.states]
        save({"input_ids": sample.ids, "hidden_states": states, "loss_mask": sample.mask}, path)

    def finish(self, done: Sequence[Place], capture: Capture) -> None:
        """`data_config.json`, with the fields that say what the states are, and the lengths its loader looks for."""
        ks = [int(name.removeprefix("after_")) for name in capture.layers[:-1]] + [capture.n_layers]
        document = {
            "version": "2.0",
            "model": {"target_model_path": capture.model, "hidden_size": capture.hidden_size},
            "data": {"num_samples": len(done)},
            "hidden_states": {"layer_ids": [k - 1 for k in ks]},
            "format": {"file_pattern": "data_{idx}.pt"},
        }
        write_json(self.root / LENGTHS, {str(place.source_index): place.n_tokens for place in done})
        write_json(self.root / CONFIG, document)
