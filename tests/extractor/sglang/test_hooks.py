"""The hooks, with stand-ins for SGLang's requests and batches: what they take, leave alone, and survive."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from extractor.sglang_plugin import CAPTURE_VARIABLE, CPU_VARIABLE, ERRORS_VARIABLE, hooks, platform, targets
from extractor.sglang_plugin.protocol import FINAL, KEY, Receipt, Target, WriteError
from extractor.sglang_plugin.writer import Rows

HIDDEN = 4
FULL = SimpleNamespace(is_full=lambda: True)
LAST = SimpleNamespace(is_full=lambda: False)


def request(rid: int, n_tokens: int, *, ours: bool = True, **changes: Any) -> SimpleNamespace:
    target = Target(rid, n_tokens, 0, {"after_1": f"/{rid}/a", "final": f"/{rid}/f"}, {"after_1": 0, "final": FINAL})
    params = {KEY: msgspec.to_builtins(target)} if ours else {"foreign": 1}
    fields = {
        "rid": str(rid),
        "sampling_params": SimpleNamespace(custom_params=params),
        "return_hidden_states": True,
        "customized_info": None,
        "origin_input_ids": [0] * n_tokens,
        "cached_tokens": 0,
        "is_retracted": False,
        "finished": lambda: False,
        "inflight_middle_chunks": 0,
        **changes,
    }
    return SimpleNamespace(**fields)


def receipt_of(req: SimpleNamespace) -> Receipt:
    (found,) = req.customized_info[KEY]
    return msgspec.convert(found, Receipt)


class Batch:
    """Runs the append hook over the requests of a batch as SGLang's result processor does."""

    def __init__(self) -> None:
        self.rows: list[Rows] = []
        self.passed_on: list[str] = []

    def put(self, rows: Rows) -> None:
        self.rows.append(rows)

    def original(self, _processor: Any, *, req: Any, hidden_state_offset: int, extend_input_len: int, **_: Any) -> int:
        self.passed_on.append(req.rid)
        return hidden_state_offset + extend_input_len

    def run(self, chunks: list[tuple[SimpleNamespace, int, bool]], mode: Any = FULL) -> int:
        """`chunks`: request, tokens, whether the last of its prompt. Row i of the batch holds the number i + 1."""
        numbers = torch.arange(1, 1 + sum(n for _, n, _ in chunks), dtype=torch.float32)[:, None]
        output = SimpleNamespace(
            hidden_states=numbers.expand(-1, 2 * HIDDEN), last_hidden_states=-numbers.expand(-1, HIDDEN)
        )
        offset = 0
        for req, n_tokens, store in chunks:
            offset = hooks.append_prefill(
                self.original,
                None,
                req=req,
                logits_output=output,
                hidden_state_offset=offset,
                capture_hidden_mode=mode,
                extend_input_len=n_tokens,
                store=store,
            )
        return offset

    def numbers(self, path: str) -> dict[int, list[float]]:
        """First number of each row, by offset of the write."""
        found = {}
        for rows in self.rows:
            if rows.path == path:
                values = torch.from_numpy(rows.data).view(torch.bfloat16).reshape(-1, HIDDEN)
                found[rows.offset] = values[:, 0].tolist()
        return found


@pytest.fixture
def batch(monkeypatch: pytest.MonkeyPatch) -> Batch:
    batch = Batch()
    monkeypatch.setattr(hooks, "_writer", lambda: batch)
    monkeypatch.setattr(hooks, "_is_writer_rank", lambda: True)
    monkeypatch.setattr(hooks, "_capture_points", (1,))
    return batch


def test_each_request_gets_its_own_rows_of_a_mixed_batch(batch: Batch) -> None:
    a, foreign, b = request(1, 2), request(2, 3, ours=False), request(3, 1)
    assert batch.run([(a, 2, True), (foreign, 3, True), (b, 1, True)]) == 6
    assert batch.numbers("/1/a") == {0: [1, 2]}
    assert batch.numbers("/1/f") == {0: [-1, -2]}
    assert batch.numbers("/3/a") == {0: [6]}
    assert batch.passed_on == ["2"]
    assert (receipt_of(a).n_rows, receipt_of(b).n_rows) == (2, 1)
    assert receipt_of(a).capture_points == (1,)
    assert foreign.customized_info is None


def test_every_chunk_is_taken_and_only_the_last_answers(batch: Batch) -> None:
    """SGLang calls with `store` False until the last chunk, and keeps only that one."""
    req = request(1, 5)
    batch.run([(req, 2, False)])
    assert req.customized_info is None
    batch.run([(request(9, 1), 1, True), (req, 3, True)])
    assert batch.numbers("/1/a") == {0: [1, 2], 2 * HIDDEN * 2: [2, 3, 4]}
    assert (receipt_of(req).n_rows, receipt_of(req).error) == (5, "")


def test_rows_after_the_first_complete_prefill_are_ignored(batch: Batch) -> None:
    """A request retracted under memory pressure is prefilled again, with its generated tokens."""
    req = request(1, 3)
    batch.run([(req, 3, True)])
    first = receipt_of(req)
    batch.run([(req, 4, True)])
    assert receipt_of(req) == first
    assert len(batch.rows) == 2


@pytest.mark.parametrize("state", [{"is_retracted": True}, {"finished": lambda: True}])
def test_finished_and_retracted_requests_give_no_rows(batch: Batch, state: dict[str, Any]) -> None:
    req = request(1, 3, **state)
    assert batch.run([(req, 3, False)]) == 3
    assert batch.rows == []
    assert req.customized_info is None


def test_cached_tokens_are_an_error_in_the_receipt(batch: Batch) -> None:
    req = request(1, 5, cached_tokens=2)
    batch.run([(req, 3, True)])
    assert "prefix cache" in receipt_of(req).error


def test_other_ranks_count_the_rows_and_write_nothing(batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "_is_writer_rank", lambda: False)
    req = request(1, 3)
    assert batch.run([(req, 3, True)]) == 3
    assert batch.rows == []
    assert req.customized_info is None


def test_the_writer_rank_is_the_one_that_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    context = ModuleType("sglang.srt.runtime_context")
    monkeypatch.setitem(sys.modules, context.__name__, context)
    for tp, cp, writes in ((0, 0, True), (1, 0, False), (0, 1, False)):
        context.get_parallel = lambda tp=tp, cp=cp: SimpleNamespace(attn_tp_rank=tp, attn_cp_rank=cp)  # type: ignore[attr-defined]
        assert hooks._is_writer_rank() is writes


def test_no_exception_leaves_the_hook(batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    """One would end the scheduler and with it every other sample."""

    def full(_rows: Rows) -> None:
        raise TimeoutError("the disk took no rows")

    monkeypatch.setattr(batch, "put", full)
    bad, req = request(1, 2), request(2, 2)
    bad.sampling_params.custom_params = {KEY: {"nonsense": 1}}
    assert batch.run([(bad, 2, True), (req, 2, False)]) == 4
    assert "ValidationError" in receipt_of(bad).error
    assert "the disk took no rows" in receipt_of(req).error
    batch.run([(req, 1, True)])  # a later chunk must not turn the error into a success
    assert "the disk took no rows" in receipt_of(req).error


def test_missing_final_states_are_an_error(batch: Batch) -> None:
    req = request(1, 2)
    output = SimpleNamespace(hidden_states=torch.zeros(2, 8), last_hidden_states=None)
    end = hooks.append_prefill(
        batch.original,
        None,
        req=req,
        logits_output=output,
        hidden_state_offset=0,
        capture_hidden_mode=FULL,
        extend_input_len=2,
    )
    assert end == 2
    assert "no final states" in receipt_of(req).error


def test_another_capture_mode_is_left_to_sglang(batch: Batch) -> None:
    batch.run([(request(1, 2), 2, True)], mode=LAST)
    assert batch.passed_on == ["1"]


def test_decoded_states_are_dropped_for_our_requests_only() -> None:
    kept: list[int] = []

    def original(*, req: Any, hidden_states: Any, start: int, accept_len: int) -> None:
        kept.append(start)

    hooks.append_decode(original, req=request(1, 2), hidden_states=None, start=1, accept_len=1)
    hooks.append_decode(original, req=request(2, 2, ours=False), hidden_states=None, start=2, accept_len=1)
    assert kept == [2]


@pytest.mark.parametrize(("asked", "copied"), [(True, True), (False, False)])
def test_final_states_are_copied_off_the_device(monkeypatch: pytest.MonkeyPatch, asked: bool, copied: bool) -> None:
    """With overlap scheduling SGLang forgets them, and the hook would read a device tensor of a later batch."""
    module = ModuleType("sglang.srt.managers.utils")
    module._async_d2h = lambda tensor: ("host", tensor)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    result = SimpleNamespace(logits_output=SimpleNamespace(last_hidden_states="device"))
    hooks.copy_to_cpu(result, False, return_hidden_states=asked)
    assert result.logits_output.last_hidden_states == (("host", "device") if copied else "device")
    hooks.copy_to_cpu(SimpleNamespace(logits_output=None), False)


@pytest.mark.parametrize(
    ("ids", "message"),
    [([], "empty"), ([1, 100], "100 lies outside the vocabulary of 100"), ([-1, 100], "-1 lies outside")],
)
def test_prompts_that_end_the_engine_are_refused(ids: list[int], message: str) -> None:
    manager = SimpleNamespace(model_config=SimpleNamespace(vocab_size=100))
    with pytest.raises(ValueError, match=message):
        hooks.validate(manager, None, ids)


def test_good_prompts_pass() -> None:
    manager = SimpleNamespace(model_config=SimpleNamespace(vocab_size=100))
    hooks.validate(manager, None, [0, 99])
    hooks.validate(manager, None, None)


def test_the_model_itself_is_asked_where_it_takes_its_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ids asked for mean other layers in DeepSeek's family; what the model holds does not."""
    monkeypatch.setattr(hooks, "_capture_points", ())
    model, inner = torch.nn.Module(), torch.nn.Module()
    model.inner = inner
    calls: list[dict[str, Any]] = []

    def original(*, model: Any, **arguments: Any) -> None:
        calls.append(arguments)
        model.inner.layers_to_capture = [15, 2, 27]

    hooks.note_capture_points(original, model=model, is_dspark=False)
    assert hooks._capture_points == (2, 15, 27)
    assert calls == [{"is_dspark": False}]


def test_hooks_stay_away_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed hsstore must not change other uses of SGLang."""
    monkeypatch.delenv(CAPTURE_VARIABLE, raising=False)
    monkeypatch.setattr(targets, "moved_targets", lambda: pytest.fail("looked at SGLang"))
    hooks.register()


def test_a_moved_target_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang logs an ordinary exception of a plugin and serves on without its hooks."""
    monkeypatch.setenv(CAPTURE_VARIABLE, "1")
    monkeypatch.setattr(targets, "moved_targets", lambda: ["f is gone"])
    with pytest.raises(SystemExit, match="f is gone"):
        hooks.register()


def test_targets_that_moved_are_named() -> None:
    found = targets.moved_targets(
        {"os.path.join": ("a", "p"), "os.path.nowhere": (), "nomodule.f": (), "os.path.isdir": ("path",)}
    )
    assert len(found) == 3
    assert "os.path.nowhere is gone" in found[0]
    assert "nomodule.f is gone" in found[1]
    assert "os.path.isdir takes (s), expected (path)" in found[2]


@pytest.mark.parametrize(("value", "claimed"), [(None, False), ("0", False), ("1", True)])
def test_the_platform_claims_the_machine_only_when_asked(
    monkeypatch: pytest.MonkeyPatch, value: str | None, claimed: bool
) -> None:
    """It would turn every GPU machine with hsstore installed into a CPU one."""
    monkeypatch.delenv(CPU_VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(CPU_VARIABLE, value)
    assert (platform.activate() is not None) is claimed


def test_write_errors_reach_the_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = WriteError(5, "/x", 28, "No space left on device")
    monkeypatch.setenv(ERRORS_VARIABLE, str(tmp_path / "errors"))
    hooks._report(error)  # nobody listens: only logged
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.bind(os.environ[ERRORS_VARIABLE])
        hooks._report(error)
        assert msgspec.json.decode(channel.recv(1000), type=WriteError) == error
