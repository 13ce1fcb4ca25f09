"""Exports read by each project's own code, for packages that do not fit into one environment with the rest.

    pip download --no-deps -d wheels specforge==0.2.0 speculators==0.4.0 nvidia-modelopt==0.47.0
    pip install --no-deps --target by-hand/specforge wheels/specforge-*.whl      (and so on, one directory each)
    python -m tests.extractor.foreign.by_hand by-hand

Each package runs in a process of its own beside this environment's torch. It lists and opens the files of an export
with the project's reader; every tensor must equal the store's, bit by bit. Prints a line for each; fails on the first
difference. A package that is not there is named and left out.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from hsstore.cli import run
from tests import stores
from tests.extractor.foreign import data

LENGTHS = (12, 40, 9, 33, 70, 21, 5, 128)


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (
        a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.view(torch.uint8))
    )


def bare(*names: str) -> None:
    """Let modules of these packages be imported without what their __init__ pulls in (made for other versions)."""
    for name in names:
        package = types.ModuleType(name)
        package.__path__ = [
            str(Path(entry, *name.split("."))) for entry in sys.path if Path(entry, *name.split(".")).is_dir()
        ][:1]
        sys.modules[name] = package


def export(root: Path, target: str, norm: str, *options: str) -> list[stores.Sample]:
    """Make a store and its export at `root`/x."""
    samples = [s for s in data.make_samples(LENGTHS) if s.loss_mask.any()]
    data.make_store(root / "store", norm, samples).close()
    assert run(["export", target, str(root / "store"), "--out", str(root / "x"), "--quiet", *options]) == 0
    return samples


def specforge(root: Path) -> int:
    """OfflineManifestReader lists, load_feature_file opens, normalize_offline_sample makes training tensors."""
    from specforge.algorithms.eagle3.data import normalize_offline_sample
    from specforge.runtime.data_plane.feature_store import load_feature_file
    from specforge.runtime.data_plane.offline_reader import OfflineManifestReader

    n = 0
    for packed in (False, True):
        place = root / ("packed" if packed else "plain")
        samples = export(place, "specforge", "post", *(["--gzip"] if packed else []))
        refs = OfflineManifestReader(str(place / "x"), validate_files=True).read()
        assert len(refs) == len(samples)
        for ref, sample in zip(refs, samples, strict=True):  # fewer than 10 files: its order of names is ours
            assert ref.num_tokens == sample.entry.n_tokens
            item = normalize_offline_sample(load_feature_file(ref.feature_store_uri.removeprefix("file://")), 4096)
            mask = data.long(sample.loss_mask)
            mask[-1] = 0  # its own rule, when it reads
            assert equal(item["hidden_state"], data.wide(sample).unsqueeze(0))
            assert equal(item["target"], data.bf16(sample.states["final"]).unsqueeze(0))
            assert equal(item["input_ids"], data.long(sample.input_ids).unsqueeze(0))
            assert equal(item["loss_mask"], mask.unsqueeze(0))
            n += 1
    return n


def speculators(root: Path) -> int:
    """Eagle3SampleFileDataset of 0.4: its rows are shifted by one, and its lengths come from sample_lengths.json."""
    bare("speculators", "speculators.train")
    from speculators.train.data import Eagle3SampleFileDataset

    samples = export(root, "speculators-0.4", "pre")
    files = [str(root / "x" / f"data_{s.entry.source_index}.pt") for s in samples]
    dataset = Eagle3SampleFileDataset(max_len=4096, file_list=files, hidden_states_dtype=torch.bfloat16)
    assert dataset.approx_lengths == [s.entry.n_tokens for s in samples]
    for i, sample in enumerate(samples):
        item = dataset[i]
        assert equal(item["hidden_states"], data.wide(sample)[:-1].contiguous())
        assert equal(item["verifier_last_hidden_states"], data.bf16(sample.states["final"])[1:].contiguous())
        assert equal(item["input_ids"], data.long(sample.input_ids)[1:].contiguous())
        assert equal(item["loss_mask"], data.long(sample.loss_mask)[1:].contiguous())
    return len(samples)


def modelopt(root: Path) -> int:
    """OfflineSupervisedDataset, with the mask of the file."""
    bare("modelopt", "modelopt.torch", "modelopt.torch.utils", "modelopt.torch.speculative")
    bare("modelopt.torch.speculative.eagle")
    from modelopt.torch.speculative.eagle.utils import OfflineSupervisedDataset

    n = 0
    for norm in ("post", "pre"):
        samples = export(root / norm, "modelopt", norm)
        files = sorted(map(str, (root / norm / "x").rglob("*.pt")))
        dataset = OfflineSupervisedDataset(files, answer_only_loss=True)
        assert len(dataset) == len(samples)
        for i, sample in enumerate(samples):
            item: dict[str, Any] = dataset[i]
            assert equal(item["base_model_hidden_states"], data.bf16(sample.states["final"]))
            assert equal(item["aux_hidden_states"], data.wide(sample))
            assert equal(item["input_ids"], data.long(sample.input_ids))
            assert equal(item["loss_mask"], data.long(sample.loss_mask))
            assert item["base_hidden_prenorm"] == (norm == "pre")
            n += 1
    return n


CHECKS: dict[str, Callable[[Path], int]] = {
    "specforge": specforge,
    "speculators": speculators,
    "modelopt": modelopt,
}


def main() -> None:
    if len(sys.argv) == 3:
        warnings.simplefilter("ignore")
        with tempfile.TemporaryDirectory() as work:
            n = CHECKS[sys.argv[2]](Path(work))
        assert n > 0
        print(f"{sys.argv[2]}: {n} samples equal, read by its own code")
        return
    packages = Path(sys.argv[1]).resolve()
    for name in CHECKS:
        if not (packages / name).is_dir():
            print(f"{name}: left out, {packages / name} is not there")
            continue
        code = f"import sys; sys.path.insert(0, {str(packages / name)!r}); sys.argv = ['', '', {name!r}]"
        code += "; from tests.extractor.foreign import by_hand; by_hand.main()"
        subprocess.run([sys.executable, "-c", code], check=True)


if __name__ == "__main__":
    main()
