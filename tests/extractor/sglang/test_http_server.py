"""Real `hsstore verifier` servers on the CPU: true states on both roads, faults that stay where they are, no traces."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from extractor.engines.http import HttpEngine
from extractor.engines.sglang import SglangEngine
from hsstore.cli import run as hsstore
from hsstore.errors import UnauthorizedError, UsageError
from hsstore.store import Store
from tests.extractor.sglang.conftest import error_of, float32
from tests.extractor.sglang.servers import (
    CHUNK_TOKENS,
    LAYERS,
    SPEC,
    Staged,
    Verb,
    assert_true,
    group_members,
    kill_server,
    random_samples,
    wait_until_gone,
)
from tests.extractor.tiny import conversations, write_jsonl, write_tiny_model

# Servers start in 20 s on two quiet cores, in minutes on busy ones.
pytestmark = [pytest.mark.sglang, pytest.mark.timeout(1800)]

TOKEN = "sesame-123"
LENGTHS = (1, 64, 65, 63, 128, 129, 300, 2, 100, 17, 90, 33, 200, 5, 70, 48)


@pytest.fixture(scope="module")
def pair(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Verb, Verb]]:
    """Two alike; the second one asks for a token and keeps its prefix cache."""
    key = tmp_path_factory.mktemp("key") / "key"
    key.write_text(TOKEN + "\n")
    first = Verb(tiny_model)
    second = Verb(tiny_model, "--token-file", str(key), "--radix-cache")
    try:
        _ = first.url, second.url
        yield first, second
    finally:
        first.close()
        second.close()


def engine_at(*urls: str, model: Path, **options: object) -> HttpEngine:
    arguments: dict[str, object] = {"layers": LAYERS, "dtype": "float32", "token": TOKEN, **options}
    return HttpEngine(model, urls, **arguments)  # type: ignore[arg-type]


@pytest.fixture
def model(tiny_model: Path) -> Path:
    return tiny_model


def reference(model: Path, samples: list[np.ndarray]) -> dict[str, np.ndarray]:
    """float32 [rows of all samples, H] of transformers."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import AutoModelForCausalLM

        network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    states: dict[str, list[np.ndarray]] = {name: [] for name in LAYERS}
    with torch.inference_mode():
        for ids in samples:
            hidden = network(torch.from_numpy(ids.astype(np.int64))[None], output_hidden_states=True).hidden_states
            for name in LAYERS:
                states[name].append(hidden[-1 if name == "final" else int(name[6:])][0].numpy())
    return {name: np.concatenate(parts) for name, parts in states.items()}


def test_states_equal_transformers_on_both_roads(pair: tuple[Verb, Verb], model: Path, tmp_path: Path) -> None:
    """Mixed batches and chunks, two servers at once, rows written there or fetched."""
    samples = random_samples(LENGTHS)
    assert sum(n > CHUNK_TOKENS for n in LENGTHS) >= 8
    expected = reference(model, samples)
    for transfer in ("shared", "fetch"):
        staged = Staged(tmp_path / transfer, samples)
        engine = engine_at(pair[0].url, pair[1].url, model=model, transfer=transfer)
        assert_true(list(engine.capture(staged.jobs)), staged)
        engine.close()
        for name in LAYERS:
            rows = np.concatenate([float32(staged.states(name, job)) for job in staged.jobs])
            error = error_of(rows, expected[name])
            print(f"{transfer} {name}: relative error {error:.5f} over {len(rows)} rows")
            assert error <= 0.003


def test_both_roads_bring_the_same_bytes(pair: tuple[Verb, Verb], model: Path, tmp_path: Path) -> None:
    """One request at a time, so that batches are the same too."""
    samples, found = random_samples(LENGTHS), []
    for transfer in ("shared", "fetch"):
        staged = Staged(tmp_path / transfer, samples)
        engine = engine_at(pair[0].url, model=model, transfer=transfer, options={"in_flight": 1})
        assert_true(list(engine.capture(staged.jobs)), staged)
        engine.close()
        found.append(staged.bytes())
    assert found[0] == found[1]
    assert os.listdir(pair[0].spool) == []


def test_equal_prompts_take_nothing_from_a_prefix_cache(pair: tuple[Verb, Verb], model: Path, tmp_path: Path) -> None:
    """The second server keeps its cache; a salt of its own keeps each sample's rows out of it."""
    ids = np.arange(100, 230, dtype=np.int32)
    staged = Staged(tmp_path, [ids, ids, ids])
    engine = engine_at(pair[1].url, model=model)
    assert_true(list(engine.capture(staged.jobs)), staged)
    assert_true(list(engine.capture(staged.jobs)), staged)
    engine.close()


def test_a_path_that_the_server_may_not_write_is_fetched(
    pair: tuple[Verb, Verb], model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No extraction has marked the directory: whoever reaches the server could name any file of the machine."""
    staged = Staged(tmp_path, random_samples((5, 100)), marked=False)
    engine = engine_at(pair[0].url, model=model)
    tickets = list(engine.capture(staged.jobs))
    assert all(ticket.error == "" for ticket in tickets)
    assert "not in a directory that an extraction works in): its states are fetched" in capsys.readouterr().err
    engine.close()
    engine = engine_at(pair[0].url, model=model, transfer="shared")
    with pytest.raises(UsageError, match="does not write where this run stages its files") as caught:
        list(engine.capture(staged.jobs))
    assert "--transfer fetch" in caught.value.hint
    engine.close()


def test_bad_samples_get_a_ticket_with_an_error_and_the_rest_go_on(
    pair: tuple[Verb, Verb], model: Path, tmp_path: Path
) -> None:
    bad = {1: np.array([1, 264]), 3: np.array([-1, 4]), 5: np.zeros(0), 7: np.zeros(506)}
    good = np.arange(30, dtype=np.int32)
    staged = Staged(tmp_path, [bad.get(i, good).astype(np.int32) for i in range(9)])
    engine = engine_at(pair[0].url, model=model)
    tickets = {ticket.source_index - 1000: ticket for ticket in engine.capture(staged.jobs)}
    engine.close()
    assert {i for i, ticket in tickets.items() if ticket.error} == set(bad)
    assert "264 lies outside the vocabulary of 264" in tickets[1].error
    assert "-1 lies outside" in tickets[3].error
    assert "longest prompt, 505" in tickets[7].error


def test_other_layers_models_and_tokens_are_refused(pair: tuple[Verb, Verb], model: Path, tmp_path: Path) -> None:
    with pytest.raises(UnauthorizedError, match="refuses the token") as refused:
        engine_at(pair[1].url, model=model, token="other")
    assert "--token-file" in refused.value.hint
    with pytest.raises(UsageError, match=r"after layers \[2, 4, 5\], expected \[3, 5\]"):
        engine_at(pair[0].url, model=model, layers=("after_3", "after_5", "final"))
    with pytest.raises(UsageError, match="it runs in float32, this run asks for bfloat16"):
        engine_at(pair[0].url, model=model, dtype="bfloat16")
    another = write_tiny_model(tmp_path / "another", seed=5)
    with pytest.raises(UsageError, match=r"the weights in .* are others"):
        engine_at(pair[0].url, model=another)


def test_an_engine_of_ones_own_and_a_server_have_one_record(pair: tuple[Verb, Verb], model: Path) -> None:
    """So a store that was begun with the one is continued with the other."""
    served = engine_at(pair[0].url, model=model)
    served.close()
    options = {"device": "cpu", "chunked_prefill_size": CHUNK_TOKENS, "max_total_tokens": 4096}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        own = SglangEngine(model, layers=LAYERS, dtype="float32", options=options)
    own.close()
    assert served.info == own.info


def test_a_store_is_made_and_verified_over_http(
    pair: tuple[Verb, Verb], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HSSTORE_TOKEN", TOKEN)
    prompts = write_jsonl(tmp_path / "p.jsonl", conversations(40))
    out = tmp_path / "states"
    command = ["extract", "--model", str(model), "--prompts", str(prompts), "--out", str(out), "--layers", SPEC]
    urls = ["--url", pair[0].url, "--url", pair[1].url]
    assert hsstore([*command, "--dtype", "float32", "--shard-rows", "256", *urls]) == 0
    assert hsstore(["verify", "manifest", str(out), "--full"]) == 0
    with Store.open(out) as store:
        assert (store.capture.engine, store.totals.n_samples) == ("sglang", 40)


def test_a_killed_server_costs_no_sample(
    pair: tuple[Verb, Verb], model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its samples go to the other one; its own `hsstore verifier` ends with its status and leaves nothing behind."""
    staged = Staged(tmp_path, random_samples([30] * 200))
    engine = engine_at(pair[0].url, pair[1].url, model=model, options={"in_flight": 8})
    leader, spool = pair[1].server_pid(), pair[1].spool
    tickets = engine.capture(staged.jobs)
    taken = [next(tickets) for _ in range(20)]
    kill_server(pair[1])
    taken += list(tickets)
    assert_true(taken, staged)
    assert f"{pair[1].url} is lost" in capsys.readouterr().err
    engine.close()
    assert pair[1].process.wait() == 128 + signal.SIGKILL
    wait_until_gone(leader)
    assert not spool.exists()


def test_a_killed_command_takes_its_server_with_it(pair: tuple[Verb, Verb]) -> None:
    """A batch system that kills the command must not leave a GPU taken."""
    leader, spool = pair[0].server_pid(), pair[0].spool
    assert len(group_members(leader)) >= 3
    pair[0].process.kill()
    wait_until_gone(leader)
    assert not spool.exists()


def test_sigterm_ends_a_server_that_is_still_loading(tiny_model: Path) -> None:
    verb = Verb(tiny_model)
    leader = verb.server_pid()
    verb.process.send_signal(signal.SIGTERM)
    assert verb.process.wait() == 0
    wait_until_gone(leader)
    verb.close()
