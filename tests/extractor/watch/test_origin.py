"""The run that hsstore was made for, asked what it would take: 37,312 samples, 87.8 M tokens, four states of 7,168."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hsstore.layout import place
from tests.models import ROOT

SAMPLES = 37_312
TOKENS = 87_760_000
LONGEST = 4_096
GEOMETRY = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "model_type": "kimi_k25",
    "dtype": "bfloat16",
    "text_config": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "kimi_k2",
        "hidden_size": 7_168,
        "num_hidden_layers": 61,
        "vocab_size": 163_840,
        "max_position_embeddings": 262_144,
    },
}

# One process for both questions: the prompts are read once, the disk has 1 TB, and its own memory is looked at.
_ASK = """
import contextlib, io, json, re, sys
from pathlib import Path
import extractor.estimate, extractor.input
from hsstore.cli import run

read, kept = extractor.input.read_prompts, []

def once(*arguments, **options):
    if not kept:
        kept.append(read(*arguments, **options))
    return kept[0]

extractor.input.read_prompts = once
extractor.estimate.free_bytes = lambda _path: 10**12
answers = []
for options in (["--dry-run"], ["--dry-run", "--json"], []):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run(["extract", *sys.argv[1:], "--engine", "transformers", *options])
    answers.append({"code": code, "out": out.getvalue(), "err": err.getvalue()})
peak = int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
print(json.dumps({"answers": answers, "peak_bytes": peak * 1024}))
"""


@dataclass(frozen=True)
class Answers:
    table: str
    document: dict[str, Any]
    refusal_code: int
    refusal: str
    peak_bytes: int
    out: Path


def lengths() -> list[int]:
    """Spread evenly over 608 to 4,096, with exactly the tokens of the origin."""
    out = [608 + i * 7_919 % 3_489 for i in range(SAMPLES)]
    left = TOKENS - sum(out)
    step = 1 if left > 0 else -1
    for i in range(SAMPLES):
        if left and 608 < out[i] < LONGEST:
            out[i] += step
            left -= step
    assert sum(out) == TOKENS
    return out


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Answers]:
    directory = tmp_path_factory.mktemp("origin")
    model, prompts, out = directory / "Kimi-K2.5", directory / "prompts.jsonl", directory / "states"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(GEOMETRY))
    header = json.dumps({"w": {"dtype": "BF16", "shape": [1], "data_offsets": [0, 2]}}).encode()
    (model / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0\0")
    with open(prompts, "wb") as file:
        for n in lengths():
            file.write(b'{"input_ids": [7%s], "loss_mask": [0%s]}\n' % (b",7" * (n - 1), b",1" * (n - 1)))
    try:
        places = ["--model", str(model), "--prompts", str(prompts), "--out", str(out)]
        done = subprocess.run([sys.executable, "-c", _ASK, *places], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        table, document, refusal = found["answers"]
        assert (table["code"], document["code"]) == (0, 0), found
        yield Answers(
            table=table["out"],
            document=json.loads(document["out"]),
            refusal_code=refusal["code"],
            refusal=refusal["err"],
            peak_bytes=found["peak_bytes"],
            out=out,
        )
    finally:
        prompts.unlink()


def test_the_dry_run_knows_its_size(answers: Answers) -> None:
    """5.03 TB of states in as many shards as the layout makes, hardly more than the tokens need at least."""
    rows = dict(line.split("  ", 1) for line in answers.table.splitlines())
    rows = {name: text.strip() for name, text in rows.items()}
    n_shards = 1 + max(p.shard for p in place(lengths(), 65_536))
    assert rows["samples"] == "37,312"
    assert rows["tokens"].startswith("87,760,000 ")
    assert rows["states"] == "after_2, after_30, after_58, final of width 7,168"
    assert rows["bytes per token"] == "57,349"
    assert rows["total"].startswith("5.03 TB of states, 5.04 TB on disk")
    assert rows["shards"].startswith(f"{n_shards:,} of S = 65,536 rows")
    assert TOKENS / 65_536 <= n_shards < TOKENS / 65_536 * 1.01
    assert "does not fit" in rows["free space"]
    assert answers.document["samples"] == SAMPLES
    assert answers.document["states_bytes"] == TOKENS * 57_344
    assert (answers.document["shards"], answers.document["fits"]) == (n_shards, False)


def test_the_run_is_refused_in_the_same_terms(answers: Answers) -> None:
    """Before the verifier is loaded, with nothing made."""
    assert answers.refusal_code == 4
    n_shards = answers.document["shards"]
    said = f"37,312 samples, 87,760,000 tokens, 5.03 TB of states in {n_shards:,} shards need 5.09 TB"
    assert said in answers.refusal
    assert "has 1 TB free" in answers.refusal
    assert "starting" not in answers.refusal
    assert not answers.out.exists()


def test_it_takes_little_memory(answers: Answers) -> None:
    """5 bytes a token are kept, and little beside them."""
    assert answers.peak_bytes < 10**9
