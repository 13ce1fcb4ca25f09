"""speculators 0.5 and later: a dataset directory of Arrow files and `hidden_states/hs_{i}.safetensors` beside it.

Row i of the dataset has `input_ids` (int32), `loss_mask` (int64) and `seq_len`; the file has `token_ids` int64 [S] and
`hidden_states` [S, L + 1, H]. Read from speculators 0.9.0: cli/generate_offline_data.py and data_generation/offline.py
(they write and check), data_generation/preprocessing.py (rows), train/data.py ArrowDataset, and hs_connectors 0.9.0.

- Layers: vLLM's ids, which are after_k; default [2, n/2, n−3], then n (models/utils.py).
- Norm: vLLM gives layer n before the final norm.
- Mask: of the token at the same place, no shift on disk (models/eagle3/data.py shifts when it reads).
- Its check refuses NaN and infinity, and ids that are not those of the row; so does this.
"""

from __future__ import annotations

import re
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from extractor.foreign.files import WORK, numbered
from extractor.foreign.outgoing import Outgoing, Place, bfloat16
from extractor.foreign.pickles import need_torch
from extractor.foreign.reasons import Rejected, refuse_exhausted, refuse_strange, unreadable
from extractor.foreign.sample import ForeignSample, Item, ids_of, mask_of, rows_of, token_row
from hsstore import durable
from hsstore.errors import MissingExtraError, UsageError, extra_hint
from hsstore.records import Capture
from hsstore.store import Store

STATES = "hidden_states"
_STATE = "state.json"
_NAME = re.compile(r"hs_(\d+)\.safetensors")
_BATCH = 64


@dataclass(frozen=True, kw_only=True)
class SpeculatorsReader:
    root: Path
    """The dataset directory."""
    states: Path
    """Directory of the files with states."""
    cast: bool

    @cached_property
    def _rows(self) -> Any:
        """The dataset, rows as numpy arrays."""
        self._refuse_strange()
        with _datasets() as datasets:
            try:
                loaded = datasets.load_from_disk(str(self.root))
            except (OSError, ValueError, LookupError, TypeError, AttributeError, NotImplementedError) as error:
                hint = "give the directory that prepare-data made, with state.json and *.arrow in it"
                raise UsageError(f"{self.root} is no dataset directory: {error}"[:240], hint=hint) from None
            missing = {"input_ids", "loss_mask"} - set(getattr(loaded, "column_names", None) or ())
            if missing:
                raise UsageError(f"the dataset {self.root} has no column {' or '.join(sorted(missing))}")
            self._validate(loaded)
            return loaded.with_format("numpy", columns=["input_ids", "loss_mask"])

    def _refuse_strange(self) -> None:
        """Raise `UsageError` for what would keep the datasets package waiting."""
        for path in self.root.iterdir() if self.root.is_dir() else ():
            if path.suffix in (".json", ".arrow") and not (path.is_file() or path.is_dir()):
                raise UsageError(f"{path} is no plain file", hint="give the directory that prepare-data made")

    def _validate(self, dataset: Any) -> None:
        """Raise `UsageError` for offsets that lead out of the file: pyarrow follows them, and the process dies."""
        try:
            for column in ("input_ids", "loss_mask"):
                dataset.data.column(column).validate(full=True)
        except (ValueError, OSError, NotImplementedError) as error:
            hint = "make the dataset again with prepare-data; the files with states can stay"
            raise UsageError(f"the dataset {self.root} is damaged: {error}"[:240], hint=hint) from None

    def items(self) -> list[Item]:
        """One for each row, then one for each file that no row belongs to."""
        n_rows = len(self._rows)
        files = [path for path in self.states.iterdir() if _NAME.fullmatch(path.name) and not path.is_dir()]
        found = {self._number(item.path): item for item in numbered(self.states, files, _NAME)}
        items = []
        for row in range(n_rows):
            path = found[row].path if row in found else self.states / f"hs_{row}.safetensors"
            fault = None if row in found else ("no_states", f"hs_{row}.safetensors is not there")
            items.append(Item(name=path.name, path=path, row=row, fault=fault))
        strays = [item.path for number, item in found.items() if number >= n_rows]
        fault = ("no_row", f"the dataset has {n_rows} rows")
        return items + [Item(name=path.name, path=path, fault=fault) for path in strays]

    @staticmethod
    def _number(path: Path) -> int:
        match = _NAME.fullmatch(path.name)
        assert match
        return int(match[1])

    def read(self, item: Item, *, whole: bool) -> ForeignSample:
        tensors = _load(item.path)
        states = tensors["hidden_states"]
        if states.dim() != 3 or states.shape[1] < 2:
            raise Rejected("wrong_shape", f"hidden_states is {tuple(states.shape)}, expected [S, states, H]")
        rows = [rows_of(states[:, i], "hidden_states", cast=self.cast) for i in range(states.shape[1])]
        ids = ids_of(token_row(tensors["token_ids"], "token_ids"))
        row = self._row(item.row)
        if not np.array_equal(ids, row["input_ids"]):
            n = len(row["input_ids"])
            raise Rejected("ids_differ", f"token_ids has {len(ids)} tokens, row {item.row} has {n}")
        return ForeignSample(
            input_ids=ids,
            loss_mask=mask_of(row["loss_mask"]),
            states=tuple(r for r, _ in rows),
            cast_from=rows[-1][1],
            unchecked=True,
        )

    def _row(self, number: int) -> dict[str, Any]:
        try:
            row: dict[str, Any] = self._rows[number]
        except (ValueError, LookupError, OSError, TypeError, NotImplementedError) as error:  # pyarrow's are among them
            raise Rejected("damaged", f"row {number} of the dataset: {error}") from None
        for name in ("input_ids", "loss_mask"):
            value = np.asarray(row[name])
            if value.ndim != 1 or (value.size and value.dtype.kind not in "iub"):
                raise Rejected("wrong_dtype", f"{name} of row {number} is {value.dtype} {value.shape}")
            row[name] = value.astype(np.int64)
        return row


def _load(path: Path) -> dict[str, Any]:
    need_torch()
    from safetensors import SafetensorError, safe_open

    if path.with_name(f"{path.name}.lock").exists():
        raise Rejected("damaged", "its lock file is there: it is being written, or its writer was killed")
    refuse_strange(path)
    try:
        with safe_open(path, framework="pt") as file:
            names = set(file.keys())
            for name in ("hidden_states", "token_ids"):
                if name not in names:
                    raise Rejected("missing_tensor", f"no {name}; there are {', '.join(sorted(names))}")
            return {name: file.get_tensor(name) for name in ("hidden_states", "token_ids")}
    except SafetensorError as error:
        refuse_exhausted(str(error))
        raise Rejected("damaged", str(error)) from None
    except OSError as error:
        raise unreadable(error) from None


@contextmanager
def _datasets() -> Iterator[Any]:
    """The datasets package, silent."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import datasets  # type: ignore[import-untyped]
    except ImportError:
        raise MissingExtraError("this format needs the datasets package", hint=extra_hint("train")) from None
    shown = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        yield datasets
    finally:
        if shown:
            datasets.enable_progress_bars()


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculatorsWriter:
    root: Path
    store: Store

    def path(self, place: Place) -> Path:
        return self.root / STATES / f"hs_{place.number}.safetensors"

    def write(self, sample: Outgoing, path: Path) -> None:
        from safetensors.torch import save

        states = bfloat16(np.stack(sample.states, axis=1))
        path.write_bytes(save({"hidden_states": states, "token_ids": sample.ids}))

    def finish(self, done: Sequence[Place], capture: Capture) -> None:
        """The dataset, whole or not at all: `state.json`, which makes it one, comes last."""
        work = Path(tempfile.mkdtemp(prefix=WORK, dir=self.root))
        try:
            made = self._save(done, work)
            for path in sorted(made, key=lambda p: p.name == _STATE):
                durable.fsync_file(path)
                durable.take_place(path, self.root / path.name)
        finally:
            shutil.rmtree(work, ignore_errors=True)

    def _save(self, done: Sequence[Place], work: Path) -> list[Path]:
        with _datasets() as datasets:
            from datasets.arrow_writer import ArrowWriter  # type: ignore[import-untyped]

            ids, number = (datasets.List(datasets.Value(dtype)) for dtype in ("int32", "int64"))
            features = datasets.Features(input_ids=ids, loss_mask=number, seq_len=datasets.Value("int64"))
            flat, target = work / "rows.arrow", work / "dataset"
            with ArrowWriter(path=str(flat), features=features, writer_batch_size=_BATCH) as writer:
                for place in done:
                    i = place.row
                    mask = self.store.loss_mask(i).astype(np.int64)
                    writer.write({"input_ids": self.store.input_ids(i), "loss_mask": mask, "seq_len": place.n_tokens})
                writer.finalize()
            dataset = datasets.Dataset.from_file(str(flat)).with_format("torch")
            dataset.save_to_disk(str(target))
            return list(target.iterdir())
