"""`hsstore verify states` on stores that are small, odd, damaged or of something else: an answer, never a traceback."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from extractor.states import reference
from extractor.states.choice import choose
from extractor.verifier import read_verifier
from hsstore.cli import run
from hsstore.store import Store
from tests.extractor.states import planted
from tests.extractor.states.conftest import Verify, World
from tests.extractor.states.planted import Truth, capture, write
from tests.extractor.tiny import write_tiny_model

LAYERS = ("after_0", "after_5", "final")
TINY = {"layers": LAYERS}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("states") / "tiny")


@pytest.fixture(scope="module")
def samples(tiny: Path) -> list[Truth]:
    """Random weights, 12 samples of 1 to 60 tokens, each third without assistant tokens."""
    model, rng = planted.load(tiny), np.random.default_rng(3)
    out = []
    for i, n in enumerate([1, 2, 60, 40, 33, 1, 20, 50, 9, 60, 31, 60]):
        ids = rng.integers(0, 256, n).astype(np.int32)
        out.append(planted.truth(model, ids, np.full(n, i % 3 != 0, np.uint8)))
    return out


def test_random_weights_are_decided_by_the_forward(
    tiny: Path, samples: list[Truth], tmp_path: Path, verify: Verify
) -> None:
    """At chance, as transformers itself is, and not sure of anything: no fault. The head alone decides nothing."""
    store = write(tmp_path / "s", samples, capture(tiny, **TINY))
    found = verify(store, tiny)
    assert (found.code, found.damage()) == (0, {})
    assert "random weights; the forward decides" in found.notes()
    assert set(found.states) == set(LAYERS)
    assert found.summary["samples"] == list(range(12))
    alone = verify(store, tiny, "--head-only")
    assert (alone.code, alone.damage()) == (4, {})  # a random tied head repeats the token that it reads
    assert "is not sure of anything: random weights" in alone.notes()
    assert "left out by --head-only" in alone.notes()


def test_what_random_weights_still_show(tiny: Path, samples: list[Truth], tmp_path: Path, verify: Verify) -> None:
    """One token and no word of an assistant: norm, layers and statistics are checked all the same."""
    alone = [samples[0]]
    found = verify(write(tmp_path / "one", alone, capture(tiny, **TINY)), tiny)
    assert (found.code, found.damage()) == (0, {})
    assert "no checked sample has a next token" in found.notes()
    before = [s.with_states(final=s.states["after_8"]) for s in alone]
    found = verify(write(tmp_path / "pre", before, capture(tiny, **TINY)), tiny, "--head-only")
    assert (found.code, set(found.damage())) == (3, {"norm"})
    silent = [dataclasses.replace(s, mask=np.zeros_like(s.mask)) for s in samples]
    found = verify(write(tmp_path / "silent", silent, capture(tiny, **TINY)), tiny)
    assert found.code == 0
    assert found.summary["head"]["over"] == "tokens"


def test_nothing_to_decide_is_no_soundness(tiny: Path, samples: list[Truth], tmp_path: Path, verify: Verify) -> None:
    store = write(tmp_path / "s", samples[:2], capture(tiny, **TINY))
    found = verify(store, tiny, "--head-only")
    assert (found.code, found.damage(), found.summary["decided"]) == (4, {}, False)
    assert "nothing could be decided" in found.err
    assert "only 1 assistant tokens" in found.notes()


def test_a_model_that_does_not_fit_is_said(
    tiny: Path, samples: list[Truth], tmp_path: Path, verify: Verify, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = write(tmp_path / "s", samples, capture(tiny, **TINY))
    monkeypatch.setattr(reference, "free_bytes", lambda _device: 2_000_000)
    found = verify(store, tiny)
    assert "forward: its weights take 1.08 GB in float32, 2 MB of memory may be used on cpu" in found.notes()


def test_a_forward_that_fails_is_said(
    tiny: Path, samples: list[Truth], tmp_path: Path, verify: Verify, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a library, or code that came with a model, raises."""
    import transformers

    def fail(*_a: Any, **_k: Any) -> Any:
        raise RuntimeError("odd kernel\nsecond line")

    monkeypatch.setattr(transformers.models.llama.modeling_llama.LlamaMLP, "forward", fail)
    found = verify(write(tmp_path / "s", samples, capture(tiny, **TINY)), tiny)
    assert "forward: transformers fails on a sample of 1 tokens: odd kernel; " in f"{found.notes()}; "


def test_a_store_without_final(tiny: Path, samples: list[Truth], tmp_path: Path, verify: Verify) -> None:
    """A subset: the forward checks what is there, and it is said that the head had nothing to read."""
    store = write(tmp_path / "s", samples, capture(tiny, layers=("after_5",)))
    found = verify(store, tiny)
    assert (found.code, set(found.states)) == (0, {"after_5"})
    assert "head: the store does not hold `final`" in found.notes()


def test_states_of_an_unknown_origin(tiny: Path, samples: list[Truth], tmp_path: Path, verify: Verify) -> None:
    """An import that knows no digest and no dtype: compared as 16-bit states, and what could not be is named."""
    none = {"weights_sha256": "", "config_sha256": "", "tokenizer_sha256": "", "compute_dtype": "unknown"}
    store = write(tmp_path / "s", samples, capture(tiny, **TINY, **none))
    found = verify(store, tiny)
    assert found.code == 0
    for what in ("weights", "config.json", "tokenizer"):
        assert f"{what} not compared: the store does not say" in found.notes()
    assert found.summary["forward"]["yardstick"] == "bfloat16"


def test_another_model_is_named(tiny: Path, samples: list[Truth], tmp_path: Path, verify: Verify) -> None:
    """By its digests, and by numbers; of another size nothing is compared."""
    store = write(tmp_path / "s", samples, capture(tiny, **TINY))
    other = write_tiny_model(tmp_path / "other", seed=1)
    (other / "tokenizer.json").write_text(json.dumps(json.loads((other / "tokenizer.json").read_text()), indent=1))
    found = verify(store, other)
    assert found.code == 3
    assert set(found.damage()) >= {"weights", "tokenizer"}
    assert "has another tokenizer than the store's" in found.damage()["tokenizer"]
    assert "other weights (another model or revision)" in found.damage()["weights"]
    assert "nothing that this model gives for these ids" in found.damage()["weights"]
    wide = write(tmp_path / "w", samples, capture(tiny, **TINY, n_layers=9, vocab_size=999))
    found = verify(wide, tiny)
    assert (found.code, found.states) == (3, {})
    assert "decoder layers 9, the model 8; vocabulary 999, the model 264" in found.damage()["model"]


def test_ids_outside_the_vocabulary(tiny: Path, samples: list[Truth], tmp_path: Path, verify: Verify) -> None:
    wrong = [dataclasses.replace(samples[2], ids=samples[2].ids + 200), *samples[3:]]
    found = verify(write(tmp_path / "s", wrong, capture(tiny, **TINY)), tiny)
    assert found.code == 3
    assert "outside the model's vocabulary of 264: the ids are of another tokenizer [0]" in found.damage()["tokenizer"]


def test_rows_that_are_not_as_recorded(tiny: Path, samples: list[Truth], tmp_path: Path, verify: Verify) -> None:
    """Flipped values, NaN, a file that is cut: each named with its sample or shard; the other samples are checked."""
    store = write(tmp_path / "s", samples, capture(tiny, **TINY))
    file = store / "arrays.zarr/hidden/after_5/c/0/0"
    data = bytearray(file.read_bytes())
    data[1001] ^= 0x02
    file.write_bytes(bytes(data))
    found = verify(store, tiny)
    assert (found.code, "statistics" in found.damage()) == (3, True)
    assert "shard 0 has rms" in found.damage()["statistics"]
    data[2000:2002] = b"\xc0\x7f"
    file.write_bytes(bytes(data))
    found = verify(store, tiny)
    assert "after_5: holds NaN or Inf" in found.damage()["finite"]
    file.write_bytes(bytes(data[:4000]))
    found = verify(store, tiny)
    assert found.code == 3
    assert "has 4000 bytes, its record says" in found.damage()["read"]
    assert found.summary["samples"]
    assert set(found.states) == set(LAYERS)


def test_large_shards_are_judged_by_their_rows(
    tiny: Path, samples: list[Truth], tmp_path: Path, verify: Verify, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("extractor.states.verification.WHOLE_SHARDS_BYTES", 0)
    store = write(tmp_path / "s", samples, capture(tiny, **TINY))
    found = verify(store, tiny)
    assert (found.code, found.summary["statistics"]) == (0, {"shards_whole": 0, "shards_by_rows": 2})
    file = store / "arrays.zarr/hidden/after_0/c/0/0"
    data = bytearray(file.read_bytes())
    data[1:40_000:2] = b"\x60" * len(data[1:40_000:2])
    file.write_bytes(bytes(data))
    assert "its checked rows have absmax" in verify(store, tiny).damage()["statistics"]


def test_quarantined_shards_and_the_table(
    tiny: Path, samples: list[Truth], tmp_path: Path, verify: Verify, capsys: pytest.CaptureFixture[str]
) -> None:
    store = write(tmp_path / "s", samples, capture(tiny, **TINY))
    assert run(["quarantine", str(store), "--shard", "0", "--reason", "test"]) == 0
    found = verify(store, tiny)
    assert (found.code, found.summary["quarantined_shards"]) == (0, 1)
    assert run(["verify", "states", str(store), "--model", str(tiny), "--threads", "1"]) == 0
    out = capsys.readouterr().out
    assert ", 1 quarantined, seed 0" in out
    assert len([line for line in out.splitlines() if line.startswith(LAYERS) and line.endswith("ok")]) == 3
    assert out.splitlines()[-1].startswith("sound: head, forward, statistics; ")


def test_the_choice_is_the_same_and_spread(tiny: Path, samples: list[Truth], tmp_path: Path) -> None:
    with Store.open(write(tmp_path / "s", samples, capture(tiny, **TINY))) as store:
        assert choose(store, 4, 7) == choose(store, 4, 7)
        assert {int(store.index.shard[row]) for row in choose(store, 2, 7)} == {0, 1}
        assert any(choose(store, 4, seed) != choose(store, 4, 7) for seed in range(8))
        assert choose(store, 99, 0) == list(range(12))
        assert all(store.loss_mask(row).any() for seed in range(6) for row in choose(store, 2, seed))


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["nowhere", "--model", "MODEL"], 10, "nowhere"),
        (["STORE", "--model", "/nowhere"], 10, "no model directory"),
        (["STORE", "--model", "MODEL", "--device", "abacus"], 2, "no device 'abacus'"),
        (["STORE", "--model", "MODEL", "--samples", "0"], 2, "--samples"),
        (["STORE"], 2, "--model"),
    ],
)
def test_wrong_calls(
    tiny: Path,
    samples: list[Truth],
    tmp_path: Path,
    arguments: list[str],
    code: int,
    words: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    store = write(tmp_path / "s", samples[:2], capture(tiny, **TINY))
    given: dict[str, Any] = {"STORE": str(store), "MODEL": str(tiny), "nowhere": str(tmp_path / "nowhere")}
    assert run(["verify", "states", *(given.get(a, a) for a in arguments)]) == code
    assert words in capsys.readouterr().err


def test_a_model_whose_head_is_missing(tiny: Path, samples: list[Truth], tmp_path: Path, verify: Verify) -> None:
    """Weights in a format that is not read here, and no forward either: said, and not sound."""
    store = write(tmp_path / "s", samples, capture(tiny, **TINY))
    other = shutil.copytree(tiny, tmp_path / "m")
    (other / "model.safetensors").rename(other / "pytorch_model.bin")
    found = verify(store, other, "--head-only", "--weights-digest", "never")
    assert found.code == 4
    assert "has neither lm_head.weight nor model.embed_tokens.weight" in found.notes()
    assert "left out by --weights-digest never" in found.notes()
    assert read_verifier(str(other)).n_layers == 8


@pytest.mark.model
def test_a_store_of_the_real_engine(world: World, tmp_path: Path, verify: Verify) -> None:
    """`hsstore extract` in bfloat16: accepted, within twice transformers' own error."""
    prompts = tmp_path / "chats.jsonl"
    prompts.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in planted.chats()))
    place = ["--model", str(world.model), "--prompts", str(prompts), "--out", str(tmp_path / "s")]
    options = ["--engine", "transformers", "--engine-option", "threads=1", "--quiet"]
    assert run(["extract", *place, *options]) == 0
    found = verify(tmp_path / "s", world.model)
    assert (found.code, found.damage(), found.notes()) == (0, {}, "")
    assert found.summary["forward"]["yardstick"] == "bfloat16"
    assert all(line["ok"] for line in found.states.values())
