"""The real SGLang engine in float32: its states are transformers', its tickets are true, a fault stays where it is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from extractor.engines.sglang import SglangEngine
from hsstore.errors import IncompleteError
from tests.extractor.sglang.conftest import CHUNK_TOKENS, LAYERS, Staged, assert_true, error_of, errors, float32

# The engine starts in 20 s on two quiet cores, in minutes on busy ones.
pytestmark = [pytest.mark.sglang, pytest.mark.model, pytest.mark.timeout(1800)]


def test_float32_states_equal_transformers(
    float32_engine: SglangEngine, samples: list[np.ndarray], references: dict, tmp_path: Path
) -> None:
    """Batches mix samples, and chunks split them; without exact places rows land in other samples."""
    staged = Staged(tmp_path, samples)
    assert_true(list(float32_engine.capture(staged.jobs)), staged)
    assert len(samples) >= 20
    assert sum(len(ids) > CHUNK_TOKENS for ids in samples) >= 10
    found = errors(staged, references["float32"])
    print(f"float32 relative errors: {found}")
    assert max(found.values()) <= 0.003
    for name in LAYERS:  # and per sample, so that one wrong one cannot hide in the mean
        start = 0
        for job in staged.jobs:
            end = start + len(job.input_ids)
            assert error_of(float32(staged.states(name, job)), references["float32"][name][start:end]) <= 0.01
            start = end


def test_only_the_rows_of_the_samples_are_written(float32_engine: SglangEngine, tmp_path: Path) -> None:
    """Neighbouring rows belong to other samples of the shard."""
    staged = Staged(tmp_path, [np.arange(n, dtype=np.int32) for n in (70, 1, 20)])
    assert_true(list(float32_engine.capture(staged.jobs)), staged)
    used = np.zeros(staged.rows, bool)
    for job in staged.jobs:
        used[job.row : job.row + len(job.input_ids)] = True
    for name in LAYERS:
        assert not staged.all(name)[~used].any()
        assert staged.all(name)[used].any(axis=1).all()


def test_equal_prompts_are_captured_in_full(float32_engine: SglangEngine, tmp_path: Path) -> None:
    """A prefix cache would leave out the rows of the second one."""
    ids = np.arange(100, 180, dtype=np.int32)
    staged = Staged(tmp_path, [ids, ids, ids])
    assert_true(list(float32_engine.capture(staged.jobs)), staged)
    assert_true(list(float32_engine.capture(staged.jobs)), staged)


def test_the_longest_prompt_goes_through_and_one_more_token_does_not(
    float32_engine: SglangEngine, tmp_path: Path
) -> None:
    longest = float32_engine.info.longest_tokens
    staged = Staged(tmp_path, [np.full(n, 5, np.int32) for n in (longest, longest + 1)])
    fits, over = sorted(float32_engine.capture(staged.jobs), key=lambda ticket: ticket.source_index)
    assert (fits.error, fits.n_rows) == ("", longest)
    assert f"longest prompt, {longest}" in over.error


def test_bad_samples_get_a_ticket_with_an_error_and_the_rest_go_on(
    float32_engine: SglangEngine, tmp_path: Path
) -> None:
    """In this release an id outside the vocabulary ends the whole engine, unless our hook refuses it."""
    good = np.arange(30, dtype=np.int32)
    bad = {1: np.array([1, 49152]), 3: np.array([-1, 4]), 5: np.zeros(0), 7: np.zeros(5000)}
    staged = Staged(tmp_path, [bad.get(i, good).astype(np.int32) for i in range(9)])
    tickets = {ticket.source_index - 1000: ticket for ticket in float32_engine.capture(staged.jobs)}
    assert {i for i, ticket in tickets.items() if ticket.error} == set(bad)
    assert "49152 lies outside the vocabulary of 49152" in tickets[1].error
    assert "-1 lies outside" in tickets[3].error
    assert "empty" in tickets[5].error
    assert "longest prompt" in tickets[7].error
    assert all(tickets[i].n_rows == 30 for i in (0, 2, 4, 6, 8))


def test_a_failed_write_is_raised_and_the_engine_lives_on(float32_engine: SglangEngine, tmp_path: Path) -> None:
    """The ticket has left when the write fails: without the channel of errors nobody would hear of it."""
    staged = Staged(tmp_path, [np.arange(40, dtype=np.int32)])
    Path(staged.files["after_15"]).rename(tmp_path / "elsewhere")
    (tmp_path / "after_15").mkdir()
    with pytest.raises(IncompleteError, match=r"after_15.*directory"):
        list(float32_engine.capture(staged.jobs))
    (tmp_path / "after_15").rmdir()
    (tmp_path / "elsewhere").rename(staged.files["after_15"])
    assert_true(list(float32_engine.capture(staged.jobs)), staged)


def test_an_abandoned_capture_does_not_disturb_the_next(float32_engine: SglangEngine, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first = Staged(tmp_path / "a", [np.full(90, i, np.int32) for i in range(8)])
    tickets = float32_engine.capture(first.jobs)
    next(tickets)
    tickets.close()  # type: ignore[attr-defined]
    second = Staged(tmp_path / "b", [np.full(20, i, np.int32) for i in range(8)])
    assert_true(list(float32_engine.capture(second.jobs)), second)


def test_what_the_engine_says_of_itself(float32_engine: SglangEngine) -> None:
    info = float32_engine.info
    assert (info.engine, info.version, info.norm, info.compute_dtype) == ("sglang", "0.5.23", "post", "float32")
    assert info.flags["capture_method"] == "DFLASH"
    assert info.flags["capture_layer_ids"] == "1,14,26"
    assert info.flags["chunked_prefill_size"] == str(CHUNK_TOKENS)
