"""The parent's side of a capture, against a scripted engine process: order, bounds, refusals, starts that fail."""

from __future__ import annotations

import json
from collections import deque
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from extractor.engines import sglang
from extractor.engines.base import Job
from extractor.engines.sglang import SglangEngine
from extractor.sglang_plugin.protocol import Answer, Failed, Ready, Receipt, Request, Start, WriteError
from hsstore.digest import crc32c
from hsstore.errors import IncompleteError, MissingExtraError, NotFoundError, UsageError

HIDDEN = 4
LAYERS = ("after_1", "after_3", "final")


class FakeProcess:
    """Answers each request by writing its rows itself, newest first."""

    points: tuple[int, ...] = (1, 3)
    ranks: ClassVar[list[int | None]] = []
    first: object = Ready("0.5.23", "float32", 100, {"device": "cpu"})
    receipts: ClassVar[dict[int, Receipt]] = {}

    def __init__(self, start: Start, *, log_level: str) -> None:
        self.start, self.log_level = start, log_level
        self.directory = FakeProcess.directory
        self.inbox: deque[object] = deque([type(self).first])
        self.most_waiting, self.ended = 0, False
        FakeProcess.last = self

    directory: Path
    last: FakeProcess

    def send(self, request: Request) -> None:
        type(self).ranks.append(request.rank)
        self.inbox.appendleft(Answer(request.target.request, self._capture(request)))
        self.most_waiting = max(self.most_waiting, len(self.inbox))

    def _capture(self, request: Request) -> Receipt:
        target = request.target
        if target.request in type(self).receipts:
            return type(self).receipts[target.request]
        crcs = {}
        for name, path in target.files.items():
            assert target.columns[name] == {"after_1": 0, "after_3": 1, "final": -1}[name]
            ids = np.frombuffer(request.input_ids, "<i4")
            data = np.repeat(ids.astype(np.uint16), HIDDEN).tobytes()
            with open(path, "r+b") as file:
                file.seek(target.row * HIDDEN * 2)
                file.write(data)
            crcs[name] = crc32c(data)
        return Receipt(target.n_tokens, crcs, self.points)

    def receive(self, timeout_seconds: float) -> object:
        return self.inbox.popleft()

    def write_errors(self) -> list[WriteError]:
        return []

    def came_up(self) -> None: ...

    def lost(self, how: str) -> IncompleteError:
        return IncompleteError(f"the SGLang engine {how}")

    def close(self) -> None:
        self.ended = True


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> type[FakeProcess]:
    class Process(FakeProcess):
        ranks: ClassVar[list[int | None]] = []

    FakeProcess.directory = tmp_path
    monkeypatch.setattr(sglang, "EngineProcess", Process)
    return Process


@pytest.fixture
def model(tmp_path: Path) -> Path:
    config = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 6, "hidden_size": HIDDEN, "vocab_size": 50}
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 128}))
    return tmp_path / "model"


def make_jobs(directory: Path, lengths: list[int]) -> list[Job]:
    files = {name: str(directory / f"staged.{name}") for name in LAYERS}
    for path in files.values():
        Path(path).write_bytes(bytes(HIDDEN * 2 * sum(lengths)))
    rows = np.cumsum([0, *lengths])
    return [
        Job(source_index=i, input_ids=np.full(n, i + 1, np.int32), row=int(rows[i]), files=files)
        for i, n in enumerate(lengths)
    ]


def test_every_job_gets_one_ticket_and_few_are_in_flight(model: Path, tmp_path: Path) -> None:
    engine = SglangEngine(model, layers=LAYERS, options={"in_flight": 3})
    jobs = make_jobs(tmp_path, [2, 1, 5, 3, 4, 1, 2])
    tickets = list(engine.capture(iter(jobs)))
    assert sorted(ticket.source_index for ticket in tickets) == list(range(7))
    assert all(ticket.error == "" for ticket in tickets)
    assert FakeProcess.last.most_waiting == 3
    engine.close()
    assert FakeProcess.last.ended


def test_jobs_are_not_pulled_before_they_can_be_sent(model: Path, tmp_path: Path) -> None:
    """Pulling a job stages a shard: all of them at once would need the space of the whole store."""
    engine = SglangEngine(model, layers=LAYERS, options={"in_flight": 2})
    pulled = 0

    def jobs() -> Any:
        nonlocal pulled
        for job in make_jobs(tmp_path, [1] * 9):
            pulled += 1
            yield job

    tickets = engine.capture(jobs())
    next(tickets)
    assert pulled == 2


def test_answers_for_an_abandoned_capture_are_ignored(model: Path, tmp_path: Path) -> None:
    engine = SglangEngine(model, layers=LAYERS, options={"in_flight": 4})
    jobs = make_jobs(tmp_path, [1, 2, 3, 4])
    abandoned = engine.capture(jobs)
    next(abandoned)
    abandoned.close()  # type: ignore[attr-defined]
    FakeProcess.last.inbox.rotate(1)  # a stale answer comes before the new ones
    assert sorted(t.source_index for t in engine.capture(jobs)) == [0, 1, 2, 3]


def test_samples_that_cannot_fit_are_never_sent(model: Path, tmp_path: Path) -> None:
    engine = SglangEngine(model, layers=LAYERS)
    jobs = make_jobs(tmp_path, [100, 101, 0, 1])
    tickets = list(engine.capture(jobs))
    errors = {ticket.source_index: ticket.error for ticket in tickets}
    assert {ticket.source_index for ticket in tickets if not ticket.retry} == {1, 2}  # once more would not help
    assert (errors[0], errors[3]) == ("", "")
    assert "101 tokens are more than the engine's longest prompt, 100" in errors[1]
    assert "empty" in errors[2]


def test_an_error_of_the_engine_becomes_the_tickets(model: Path, tmp_path: Path, fake: type[FakeProcess]) -> None:
    fake.receipts = {2: Receipt(3, {}, (1, 3), error="captured 3 of 5")}  # 0 is the probe
    engine = SglangEngine(model, layers=LAYERS)
    tickets = {ticket.source_index: ticket for ticket in engine.capture(make_jobs(tmp_path, [2, 5, 2]))}
    assert tickets[1].error == "captured 3 of 5"
    assert (tickets[0].n_rows, tickets[2].n_rows) == (2, 2)


def test_states_of_other_layers_are_refused_at_the_start(model: Path, fake: type[FakeProcess]) -> None:
    """The one convention mistake that trains without an error."""
    fake.points = (2, 4)
    with pytest.raises(UsageError, match=r"after layers \(2, 4\), expected \(1, 3\)"):
        SglangEngine(model, layers=LAYERS)
    assert FakeProcess.last.ended


def test_every_data_parallel_rank_is_probed(model: Path, tmp_path: Path, fake: type[FakeProcess]) -> None:
    """Each has hooks of its own. Samples then go wherever the engine likes."""
    fake.first = Ready("0.5.23", "float32", 100, {}, n_ranks=3)
    engine = SglangEngine(model, layers=LAYERS, options={"dp": 3})
    assert FakeProcess.last.start.engine["dp_size"] == 3
    assert fake.ranks == [0, 1, 2]
    list(engine.capture(make_jobs(tmp_path, [1, 2])))
    assert fake.ranks[3:] == [None, None]


def test_a_rank_whose_hooks_do_not_run_ends_the_start(model: Path, fake: type[FakeProcess]) -> None:
    fake.first = Ready("0.5.23", "float32", 100, {}, n_ranks=2)
    fake.receipts = {1: Receipt(0, {}, (), error="the capture hooks did not run")}
    with pytest.raises(IncompleteError, match="hooks did not run"):
        SglangEngine(model, layers=LAYERS)
    assert FakeProcess.last.ended


def test_a_probe_without_receipt_ends_the_start(model: Path, fake: type[FakeProcess]) -> None:
    fake.receipts = {0: Receipt(0, {}, (), error="the capture hooks did not run")}
    with pytest.raises(IncompleteError, match="hooks did not run"):
        SglangEngine(model, layers=LAYERS)
    assert FakeProcess.last.ended


@pytest.mark.parametrize(
    ("failed", "error"),
    [
        (Failed("SGLang has no flag x", usage=True, hint="list them"), UsageError),
        (Failed("no module", missing_extra=True), MissingExtraError),
        (Failed("RuntimeError: CUDA"), IncompleteError),
    ],
)
def test_a_failed_start_says_why(model: Path, fake: type[FakeProcess], failed: Failed, error: type[Exception]) -> None:
    fake.first = failed
    with pytest.raises(error, match=failed.reason):
        SglangEngine(model, layers=LAYERS)
    assert FakeProcess.last.ended


def test_the_start_carries_what_the_capture_rests_on(model: Path) -> None:
    SglangEngine(model, layers=LAYERS, dtype="float32", options={"tp": 2, "page_size": "16"})
    start = FakeProcess.last.start
    assert start.layers == (1, 3)
    assert start.architecture == "LlamaForCausalLM"
    expected = {"disable_radix_cache": True, "enable_return_aux_hidden_states": True, "skip_tokenizer_init": True}
    assert start.engine.items() >= {**expected, "tp_size": 2, "page_size": 16, "dtype": "float32"}.items()


def test_missing_sglang_names_the_extra(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"pip install 'hsstore\[extract\]'"):
        SglangEngine(model, layers=LAYERS)


def test_bad_calls_are_refused_before_anything_starts(model: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot capture after_0"):
        SglangEngine(model, layers=("after_0", "final"))
    with pytest.raises(UsageError, match="cannot capture after_6"):
        SglangEngine(model, layers=("after_6", "final"))
    with pytest.raises(UsageError, match="int8"):
        SglangEngine(model, layers=LAYERS, dtype="int8")
    with pytest.raises(NotFoundError):
        SglangEngine(tmp_path / "nowhere", layers=LAYERS)
