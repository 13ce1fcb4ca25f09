"""SpecForge: `rows_{g}-{g+2000}/data_{i}.ckpt`, or `.ckpt.gz`, one torch.save dictionary a sample.

`input_ids` int64 [S], `loss_mask` int64 [S], `hidden_state` [1, S, H] = final state, `aux_hidden_state` [1, S, L·H].
Read from sgl-project/SpecForge: scripts/prepare_hidden_states.py (HiddenStatesGenerator writes; file_group_size 2000),
specforge 0.2.0 runtime/data_plane/{offline_reader,feature_store}.py and data/preprocessing.py (they read).

- Layers: SGLang's `set_eagle3_layers_to_capture` takes the output of the 0-based layer; default [1, n/2−1, n−4].
- Norm: SGLang's logits processor gets `hidden_state` after the final norm.
- Mask: of the token at the same place, no shift. Its loader zeroes the last position when it reads, not on disk.
- A batch is padded at its end before it is captured and no attention mask is stored: files of batches larger than one
  end in rows of padding, mask 0. They are taken as they are.
"""

from __future__ import annotations

import gzip
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from extractor.foreign import pickles
from extractor.foreign.files import numbered, walk
from extractor.foreign.outgoing import Outgoing, Place, save
from extractor.foreign.sample import ForeignSample, Item, ids_of, mask_of, plain, rows_of, split_width, token_row
from hsstore.records import Capture

GROUP = 2000
_NAME = re.compile(r"data_(\d+)\.ckpt(?:\.gz)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecForgeReader:
    root: Path
    cast: bool

    def items(self) -> list[Item]:
        return numbered(self.root, walk(self.root, (".ckpt", ".ckpt.gz")), _NAME)

    def read(self, item: Item, *, whole: bool) -> ForeignSample:
        entries, mapped, unchecked = pickles.load(item.path, whole=whole)
        final, cast_from = rows_of(plain(entries, "hidden_state"), "hidden_state", cast=self.cast)
        wide, _ = rows_of(plain(entries, "aux_hidden_state"), "aux_hidden_state", cast=self.cast)
        return ForeignSample(
            input_ids=ids_of(token_row(plain(entries, "input_ids"), "input_ids")),
            loss_mask=mask_of(token_row(plain(entries, "loss_mask"), "loss_mask")),
            states=(*split_width(wide, final.shape[1], "aux_hidden_state"), final),
            cast_from=cast_from,
            mapped=mapped,
            unchecked=unchecked,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecForgeWriter:
    root: Path
    gzip: bool

    def path(self, place: Place) -> Path:
        first = place.source_index // GROUP * GROUP
        name = f"data_{place.source_index}.ckpt{'.gz' if self.gzip else ''}"
        return self.root / f"rows_{first}-{first + GROUP}" / name

    def write(self, sample: Outgoing, path: Path) -> None:
        entries: dict[str, object] = {
            "input_ids": sample.ids,
            "loss_mask": sample.mask,
            "hidden_state": sample.final.unsqueeze(0),
            "aux_hidden_state": sample.auxiliary.unsqueeze(0),
        }
        save(entries, path)
        if self.gzip:
            path.write_bytes(gzip.compress(path.read_bytes(), compresslevel=1, mtime=0))

    def finish(self, done: Sequence[Place], capture: Capture) -> None:
        """Nothing lies beside the files."""
