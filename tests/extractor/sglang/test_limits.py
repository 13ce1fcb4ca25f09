"""The real engine at its limits: the longest prompt, a small pool, requests taken back, aborted, sharing a cache."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from extractor.engines.base import Ticket
from extractor.engines.sglang import SglangEngine
from tests.extractor.sglang import table
from tests.extractor.sglang.families import CONTEXT, FAMILIES, HIDDEN, VOCABULARY
from tests.extractor.sglang.table import BOUND, CHUNK, LAYERS, Reference, Staged, assert_true
from tests.extractor.sglang.zygote import PATCH_VARIABLE, TAKEN_BACK

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(1800)]

Start = Callable[..., SglangEngine]
LLAMA = FAMILIES[0]


@pytest.fixture
def model(models: Any) -> Path:
    path: Path = models(LLAMA)[0]
    return path


@pytest.fixture
def reference(models: Any) -> Reference:
    found: Reference = models(LLAMA)[1]
    return found


def ids(*lengths: int, seed: int = 5) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    return [random.integers(0, VOCABULARY, n).astype(np.int32) for n in lengths]


def stage(directory: Path, samples: list[np.ndarray]) -> Staged:
    directory.mkdir(exist_ok=True)
    return Staged(directory, samples, table.names(LAYERS), HIDDEN)


def assert_right(staged: Staged, reference: Reference, only: set[int] | None = None) -> None:
    """The rows of each sample are transformers'."""
    for number, job in enumerate(staged.jobs):
        if only is None or number in only:
            for name in staged.files:
                rows = table.float32(staged.states(name, job))
                assert table.error_of(rows, reference.state(job.input_ids, name)) <= BOUND


def by_number(tickets: list[Ticket]) -> list[Ticket]:
    return sorted(tickets, key=lambda ticket: ticket.source_index)


@pytest.mark.parametrize(
    ("options", "longest"),
    [
        ({"max_total_tokens": 4096}, CONTEXT - 7),
        ({"max_total_tokens": 200}, 200 - 7),
        ({"max_total_tokens": 4096, "context_length": 100}, 100 - 7),
        ({"max_total_tokens": 200, "dp": 2}, 200 - 7),
        ({"max_total_tokens": 4096, "chunked_prefill_size": -1}, CONTEXT - 7),
    ],
    ids=["context", "pool", "shorter context", "pool of each rank", "no chunks"],
)
def test_the_longest_prompt_is_right_and_a_longer_one_is_refused(
    options: dict[str, Any], longest: int, start: Start, model: Path, reference: Reference, tmp_path: Path
) -> None:
    """Limit, limit + 1, and some beside them: what is too long takes nobody with it."""
    engine = start(model, **options)
    assert engine.info.longest_tokens == longest
    staged = stage(tmp_path, ids(longest, longest + 1, 30, longest + 1000, longest))
    tickets = by_number(list(engine.capture(staged.jobs)))
    assert [bool(ticket.error) for ticket in tickets] == [False, True, False, True, False]
    assert f"{longest + 1} tokens are more than the engine's longest prompt, {longest}" in tickets[1].error
    assert_right(staged, reference, {0, 2, 4})
    engine.close()


def test_a_pool_for_few_prompts_at_a_time(start: Start, model: Path, reference: Reference, tmp_path: Path) -> None:
    """Twenty times what fits is asked for at once: requests wait, and every row is right."""
    engine = start(model, max_total_tokens=200)
    staged = stage(tmp_path, ids(*(170, 90, 193, 12, 140, 66, 1, 180) * 3))
    assert_true(list(engine.capture(staged.jobs)), staged)
    assert_right(staged, reference)
    engine.close()


@pytest.mark.parametrize("cached", [False, True], ids=["cache off", "cache on"])
def test_requests_that_are_taken_back_keep_their_rows(
    cached: bool, start: Start, model: Path, reference: Reference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang takes a running request back when memory is short, and prefills it once more with what it had answered."""
    monkeypatch.setenv(PATCH_VARIABLE, "retract")
    engine = start(model, max_total_tokens=600, disable_radix_cache=not cached)
    staged = stage(tmp_path, ids(100, 20, 130, 64, 65, 3, 90, 40))
    assert_true(list(engine.capture(staged.jobs)), staged)
    assert_right(staged, reference)
    assert TAKEN_BACK in engine._process.log.read_text(errors="replace")
    engine.close()


def test_an_aborted_request_fails_alone(
    start: Start, model: Path, reference: Reference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An abort looks like a normal answer."""
    monkeypatch.setenv(PATCH_VARIABLE, "abort_long")
    engine = start(model, chunked_prefill_size=16)
    staged = stage(tmp_path, ids(30, 450, 100, 500, 16))
    tickets = by_number(list(engine.capture(staged.jobs)))
    assert [bool(ticket.error) for ticket in tickets] == [False, True, False, True, False]
    assert "ended the request with abort" in tickets[1].error
    assert_right(staged, reference, {0, 2, 4})
    again = stage(tmp_path / "again", ids(70, 71))
    assert_true(list(engine.capture(again.jobs)), again)
    assert_right(again, reference)
    engine.close()


def test_without_a_salt_of_its_own_a_cached_prompt_is_an_error(
    start: Start, model: Path, reference: Reference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That the cache is on in the other tests, and that rows it took away never pass for a sample."""
    monkeypatch.setenv(PATCH_VARIABLE, "share_salt")
    engine = start(model, disable_radix_cache=False)
    [first] = ids(2 * CHUNK)
    staged = stage(tmp_path, [first, first, first[: CHUNK + 9], *ids(50, seed=6)])
    tickets = [ticket for job in staged.jobs for ticket in engine.capture([job])]
    assert [bool(ticket.error) for ticket in tickets] == [False, True, True, False]
    assert "came from the prefix cache" in tickets[1].error
    assert_right(staged, reference, {0, 3})
    engine.close()
