"""The embedded engine gives the states that transformers itself reports, in the rows that were asked for."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from extractor.capture import ticket_fault
from extractor.chat import ChatTokenizer
from extractor.engines import choose_engine, start_engine
from extractor.engines.base import Engine, Job
from extractor.engines.transformers import TransformersEngine
from hsstore.errors import MissingExtraError, NoSpaceError, UsageError
from hsstore.statistics import to_float32
from tests.extractor.tiny import HIDDEN

LAYERS = ("after_0", "after_2", "after_4", "after_7", "final")


def jobs_in(directory: Path, lengths: list[int], vocabulary: int, hidden: int) -> list[Job]:
    """Jobs one behind the other, with a gap of a row, in files of the full size."""
    rng = np.random.default_rng(0)
    files = {name: str(directory / name) for name in LAYERS}
    n_rows = sum(lengths) + len(lengths)
    for path in files.values():
        with open(path, "wb") as file:
            file.truncate(n_rows * hidden * 2)
    out, row = [], 0
    for i, n in enumerate(lengths):
        out.append(Job(source_index=i, input_ids=rng.integers(0, vocabulary, n, np.int32), row=row, files=files))
        row += n + 1
    return out


def rows_of(job: Job, name: str, hidden: int) -> Any:
    data = np.fromfile(job.files[name], "<u2").reshape(-1, hidden)
    return to_float32(data[job.row : job.row + len(job.input_ids)])


def reference(model: Any, job: Job) -> list[Any]:
    import torch

    with torch.inference_mode():
        out = model(input_ids=torch.from_numpy(job.input_ids.astype(np.int64))[None], output_hidden_states=True)
    return [h[0].to(torch.bfloat16).float().numpy() for h in out.hidden_states]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_states_are_those_of_transformers(tiny_model: Path, tmp_path: Path, dtype: str) -> None:
    """`after_k` = hidden_states[k], `final` = the last one, post-norm: bit for bit, each in its own rows."""
    import torch
    from transformers import AutoModelForCausalLM

    engine: Engine = TransformersEngine(tiny_model, layers=LAYERS, dtype=dtype)
    jobs = jobs_in(tmp_path, [5, 2, 17], 256, HIDDEN)
    tickets = list(engine.capture(jobs))
    assert [t.source_index for t in tickets] == [0, 1, 2]
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=getattr(torch, dtype)).eval()
    for job, ticket in zip(jobs, tickets, strict=True):
        assert ticket_fault(ticket, job, HIDDEN * 2) == ""
        states = reference(model, job)
        for name in LAYERS:
            k = 8 if name == "final" else int(name.removeprefix("after_"))
            np.testing.assert_array_equal(rows_of(job, name, HIDDEN), states[k], err_msg=name)
    gap = np.fromfile(jobs[0].files["final"], "<u2").reshape(-1, HIDDEN)[5]
    assert not gap.any(), "a row between two samples was written"
    assert (engine.info.norm, engine.info.compute_dtype, engine.info.longest_tokens) == ("post", dtype, 512)
    engine.close()


@pytest.mark.model
def test_real_model_states(smollm2_model: Path, tmp_path: Path) -> None:
    """The same on real activations (outliers of 25,000): SmolLM2 in float32, rounded once to bfloat16."""
    import torch
    from transformers import AutoModelForCausalLM

    engine = TransformersEngine(smollm2_model, layers=LAYERS, dtype="float32")
    (job,) = jobs_in(tmp_path, [24], 49152, 576)
    (ticket,) = engine.capture([job])
    engine.close()
    model = AutoModelForCausalLM.from_pretrained(smollm2_model, dtype=torch.float32).eval()
    states = reference(model, job)
    assert ticket_fault(ticket, job, 576 * 2) == ""
    for name, expected in {"after_2": states[2], "after_7": states[7], "final": states[30]}.items():
        np.testing.assert_array_equal(rows_of(job, name, 576), expected, err_msg=name)


def test_states_do_not_depend_on_their_company(tiny_model: Path, tmp_path: Path) -> None:
    """The same sample alone and after others gives the same bits: what makes a resume invisible."""
    engine = TransformersEngine(tiny_model, layers=LAYERS, dtype="bfloat16")
    jobs = jobs_in(tmp_path, [5, 9, 13], 256, HIDDEN)
    together = list(engine.capture(jobs))[2].crc32c
    assert next(iter(engine.capture(jobs[2:]))).crc32c == together


def test_a_full_disk_is_named(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    engine = TransformersEngine(tiny_model, layers=LAYERS)
    monkeypatch.setattr("hsstore.durable.os.pwrite", full)
    with pytest.raises(NoSpaceError, match="is full"):
        list(engine.capture(jobs_in(tmp_path, [5], 256, HIDDEN)))


def test_missing_weights_are_refused(tiny_model: Path, tmp_path: Path) -> None:
    """transformers fills what a checkpoint lacks with random numbers: states of noise, without an error."""
    copy = shutil.copytree(tiny_model, tmp_path / "m")
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 9}))
    with pytest.raises(UsageError, match=r"lack \d+ tensors of LlamaForCausalLM"):
        TransformersEngine(copy, layers=LAYERS)
    (copy / "config.json").write_text(json.dumps(config | {"model_type": "unheard-of"}))
    with pytest.raises(UsageError, match="cannot load"):
        TransformersEngine(copy, layers=LAYERS)


@pytest.mark.parametrize(("field", "value"), [("hidden_size", 32), ("vocab_size", 300)])
def test_a_config_of_another_model_is_named(tiny_model: Path, tmp_path: Path, field: str, value: int) -> None:
    """Not transformers' advice to ignore it: the tensor, its shape, and the one that config.json asks for."""
    copy = shutil.copytree(tiny_model, tmp_path / "m")
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {field: value}))
    with pytest.raises(UsageError, match=r"does not fit the weights: \S+ is \[.*\], by config\.json \[") as caught:
        TransformersEngine(copy, layers=LAYERS)
    assert "ignore_mismatched" not in str(caught.value)


@pytest.mark.parametrize("error", [AssertionError("odd"), RecursionError("deep"), Exception("safetensors: broken\nx")])
def test_whatever_transformers_raises_is_one_sentence(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    import transformers

    def fail(*_a: Any, **_k: Any) -> Any:
        raise error

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", fail)
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", fail)
    first = str(error).partition("\n")[0]
    with pytest.raises(UsageError, match=f"cannot load .*: {first}$|{first} \\("):
        TransformersEngine(tiny_model, layers=LAYERS)
    with pytest.raises(UsageError, match=f"cannot read the tokenizer in .*: {first}"):
        ChatTokenizer.load(tiny_model)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"options": {"devise": "cpu"}}, "no option 'devise'"),
        ({"options": {"threads": "many"}}, "threads must be a number"),
        ({"options": {"device": "abacus"}}, "no device 'abacus'"),
        ({"dtype": "int3"}, "dtype 'int3' is unknown"),
    ],
)
def test_bad_settings(tiny_model: Path, arguments: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        TransformersEngine(tiny_model, layers=LAYERS, **arguments)


def test_choosing(monkeypatch: pytest.MonkeyPatch) -> None:
    """auto: the store's engine, else sglang when it is installed, else transformers; a lack names its extra."""
    installed = {"sglang", "transformers", "torch"}
    monkeypatch.setattr("extractor.engines.find_spec", lambda name: name if name in installed else None)
    assert choose_engine("auto") == "sglang"
    assert choose_engine("auto", "transformers") == "transformers"
    installed.discard("sglang")
    assert choose_engine("auto") == "transformers"
    with pytest.raises(MissingExtraError) as caught:
        choose_engine("sglang")
    assert "hsstore[extract]" in caught.value.hint
    installed.clear()
    with pytest.raises(MissingExtraError) as caught:
        choose_engine("auto")
    assert "hsstore[hf]" in caught.value.hint
    with pytest.raises(UsageError, match="no engine 'vllm'"):
        choose_engine("vllm")


def test_options_reach_the_engine(tiny_model: Path) -> None:
    engine = start_engine(
        "transformers", tiny_model, layers=LAYERS, dtype="float32", options={"attn_implementation": "eager"}
    )
    assert engine.info.flags["attn_implementation"] == "eager"
    engine.close()
