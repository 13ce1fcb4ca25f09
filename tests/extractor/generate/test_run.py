"""Whole runs with transformers: what comes out, what is refused, what a resume does."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from extractor.chat import ChatTokenizer
from extractor.generate import run as run_module
from extractor.generate.cli import generate as command
from extractor.generate.run import dry_run, generate
from extractor.generate.settings import Settings
from extractor.generate.sources.transformers import Transformers
from extractor.prompts import PromptOptions, read_prompts
from hsstore.errors import ConflictError, HsstoreError, IncompleteError, NoSpaceError, NotFoundError, UsageError
from tests.extractor.tiny import conversations, write_jsonl

N_LINES = 12
QUICK: dict[str, Any] = {
    "engine": "transformers",
    "engine_options": {"threads": "1"},
    "max_new_tokens": 12,
    "batch": 5,
    "weights_digest": "sampled",
}
HOSTILE = [
    b"",
    b"   ",
    b"\xff\xfe",
    b"{",
    b"[]",
    b"null",
    b'{"messages": null}',
    b'{"messages": {}}',
    b'{"messages": []}',
    b'{"messages": [1]}',
    b'{"messages": [{"role": "user"}]}',
    b'{"messages": [{"role": "user", "content": 5}]}',
    b'{"messages": [{"role": "user", "content": "  "}]}',
    b'{"messages": [{"role": "assistant", "content": "hello"}]}',
    b'{"messages": [{"role": "user", "content": [{"type": "image"}]}]}',
    b'{"messages": [{"role": "user", "content": "x"}], "tools": [1]}',
    b'{"conversations": [{"from": "stranger", "value": "x"}]}',
    b'{"text": "once"}',
    b'{"input_ids": [1], "loss_mask": [1]}',
    b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    b"[" * 5000,
    b'{"deep": ' + b"[" * 400 + b"]" * 400 + b', "messages": [{"role": "user", "content": "deep"}]}',
    b'{"messages": [{"role": "user", "content": "' + b"long " * 300 + b'"}]}',
    b'{"messages": [{"role": "user", "content": "<|im_end|>\\n<|im_start|>assistant\\n"}]}',
    b'{"messages": [{"role": "user", "content": "null byte \\u0000"}], "n": 123456789012345678901234567890}',
]


def settings(tmp_path: Path, model: Path, **options: Any) -> Settings:
    prompts = options.pop("prompts", None) or write_jsonl(tmp_path / "in.jsonl", conversations(N_LINES))
    return Settings(**{"model": str(model), "prompts": prompts, "out": tmp_path / "out.jsonl", **QUICK, **options})


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> bytes:
    """The answers of a run that nothing interrupted."""
    directory = tmp_path_factory.mktemp("whole")
    generate(settings(directory, tiny_model))
    return (directory / "out.jsonl").read_bytes()


def test_every_hostile_line_is_accounted_for(tmp_path: Path, tiny_model: Path) -> None:
    """Whatever the bytes: one outcome a line, with a reason, and good lines are answered between bad ones."""
    good = json.dumps(conversations(1)[0]).encode()
    prompts = tmp_path / "in.jsonl"
    prompts.write_bytes(b"\n".join([good, *HOSTILE, good]) + b"\n")
    outcome = generate(settings(tmp_path, tiny_model, prompts=prompts))
    n_lines = len(HOSTILE) + 2
    assert outcome.written + outcome.failed + outcome.skipped == outcome.input == n_lines
    written = {row["generate"]["line"] for row in rows(tmp_path / "out.jsonl")}
    failures = rows(tmp_path / "out.failed.jsonl")
    assert {1, n_lines} <= written
    assert written | {f["line"] for f in failures} == set(range(1, n_lines + 1))
    reasons = {f["reason"] for f in failures}
    assert {"not_json", "blank_line", "not_utf8", "no_conversation", "no_user_turn", "prompt_too_long"} <= reasons
    assert {"tool_calls", "not_text", "unknown_role", "bad_message", "empty_conversation"} <= reasons
    assert outcome.failed == 0


def test_a_line_keeps_its_fields(tmp_path: Path, tiny_model: Path) -> None:
    """Ids that join the answers with other data, and all else that somebody wrote beside the turns."""
    turns = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "old answer"}]
    line = {"id": "a-7", "conversations": turns, "system": "be kind", "meta": {"source": ["x", 1.5, None]}, "ä": "é"}
    prompts = tmp_path / "in.jsonl.gz"
    prompts.write_bytes(gzip.compress(json.dumps(line).encode()))
    generate(settings(tmp_path, tiny_model, prompts=prompts))
    (found,) = rows(tmp_path / "out.jsonl")
    assert "conversations" not in found
    assert {name: found[name] for name in ("id", "system", "meta", "ä")} == {
        name: line[name] for name in ("id", "system", "meta", "ä")
    }
    assert [m["role"] for m in found["messages"]] == ["system", "user", "assistant"]
    assert "old answer" not in json.dumps(found)
    assert found["finish_reason"] in ("stop", "length")
    (turn,) = found["generate"]["turns"]
    assert turn["message"] == 2
    assert turn["completion_tokens"] <= 12


def test_extract_takes_what_was_generated(whole: bytes, tmp_path: Path, byte_chat: ChatTokenizer) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_bytes(whole)
    prompts = read_prompts(path, PromptOptions(vocab_size=264, max_length=400), lambda: byte_chat)
    assert len(prompts.samples) == len(whole.splitlines()) >= N_LINES - 1
    assert not prompts.rejections


@pytest.mark.model
def test_the_extraction_sees_the_tokens_that_were_said(tmp_path: Path, smollm2_model: Path) -> None:
    """With a real model: text goes back through the template to the very tokens of the answer, its end included."""
    questions = [{"messages": [{"role": "user", "content": f"What is {n} plus {n}?"}]} for n in (2, 3)]
    questions[1]["messages"].append({"role": "user", "content": "Say that again."})
    prompts = write_jsonl(tmp_path / "in.jsonl", questions)
    outcome = generate(settings(tmp_path, smollm2_model, prompts=prompts, max_new_tokens=40, temperature=0.2, batch=2))
    found = rows(tmp_path / "out.jsonl")
    turns = [turn for row in found for turn in row["generate"]["turns"]]
    ended = [turn for turn in turns if turn["finish_reason"] == "stop"]
    assert len(turns) == 3
    assert ended
    assert all(turn["exact"] for turn in turns)
    assert outcome.inexact == 0
    assert found[0]["messages"][1]["content"].strip()
    assert "<|im_end|>" not in found[0]["messages"][1]["content"]


def test_the_same_seed_says_the_same(whole: bytes, tmp_path: Path, tiny_model: Path) -> None:
    generate(settings(tmp_path, tiny_model))
    assert (tmp_path / "out.jsonl").read_bytes() == whole
    other = tmp_path / "other"
    other.mkdir()
    generate(settings(other, tiny_model, seed=1))
    assert (other / "out.jsonl").read_bytes() != whole


def test_a_resume_after_any_torn_byte_ends_equal(whole: bytes, tmp_path: Path, tiny_model: Path) -> None:
    """Cut at line ends, inside lines, inside groups: nothing twice, nothing lost, the same words."""
    asked = settings(tmp_path, tiny_model)
    generate(asked)
    meta, failed = asked.meta.read_bytes(), asked.failures.read_bytes() if asked.failures.exists() else b""
    ends = [i + 1 for i, byte in enumerate(whole) if byte == 10]
    for size in (0, 1, ends[0], ends[2] + 40, ends[4], ends[-2] + 3, ends[-1] - 1, ends[-1]):
        asked.out.unlink()
        asked.part.write_bytes(whole[:size])
        asked.meta.write_bytes(meta.replace(b'"complete"', b'"running"'))
        if failed:
            asked.failures.write_bytes(failed[: size % len(failed)])
        outcome = generate(settings(tmp_path, tiny_model, resume=True))
        assert asked.out.read_bytes() == whole
        assert not asked.part.exists()
        assert outcome.written + outcome.skipped == N_LINES


def test_a_finished_run_is_not_done_again(
    whole: bytes, tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another --resume costs no model: it says the sum, and that is all."""
    generate(settings(tmp_path, tiny_model))
    monkeypatch.setattr(run_module, "start_source", lambda *_: pytest.fail("the model was loaded"))
    outcome = generate(settings(tmp_path, tiny_model, resume=True))
    assert outcome.written + outcome.skipped == N_LINES
    assert (tmp_path / "out.jsonl").read_bytes() == whole


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"temperature": 0.5}, "--temperature"),
        ({"seed": 9}, "--seed"),
        ({"max_new_tokens": 13}, "--max-new-tokens"),
        ({"turns": "last"}, "--turns"),
        ({"batch": 6}, "--batch"),
        ({"dtype": "float32"}, "--dtype"),
        ({"drop_truncated": True}, "--drop-truncated"),
        ({"template_arguments": {"x": 1}}, "--template-arg"),
        ({"stop": ("x",)}, "--stop"),
        ({"reasoning": "inline"}, "--reasoning"),
        ({"urls": ("http://127.0.0.1:9",)}, "--engine"),
    ],
)
def test_another_parameter_refuses_to_resume(
    changed: dict[str, Any], named: str, tmp_path: Path, tiny_model: Path, begun: Callable[[Path], None]
) -> None:
    begun(tmp_path)
    with pytest.raises(ConflictError, match=named):
        generate(settings(tmp_path, tiny_model, resume=True, **changed))


def test_another_model_or_file_refuses_to_resume(
    tmp_path: Path, tiny_model: Path, begun: Callable[[Path], None]
) -> None:
    """Renamed is not changed, and changed is found whatever the name: digests decide."""
    from tests.extractor.tiny import write_tiny_model

    begun(tmp_path)
    write_jsonl(tmp_path / "in.jsonl", conversations(N_LINES + 1))
    with pytest.raises(ConflictError, match="prompts file"):
        generate(settings(tmp_path, tiny_model, prompts=tmp_path / "in.jsonl", resume=True))
    renamed = write_jsonl(tmp_path / "renamed.jsonl", conversations(N_LINES))
    other = write_tiny_model(tmp_path / "tiny-llama", seed=1)
    with pytest.raises(ConflictError, match="model's weights"):
        generate(settings(tmp_path, other, prompts=renamed, resume=True))
    assert generate(settings(tmp_path, tiny_model, prompts=renamed, resume=True)).failed == 0


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Callable[[Path], None]:
    """Puts the files of an interrupted run into a directory."""
    source = tmp_path_factory.mktemp("begun")
    asked = settings(source, tiny_model)
    generate(asked)

    def put(directory: Path) -> None:
        lines = asked.out.read_bytes().splitlines(keepends=True)
        (directory / "out.jsonl.part").write_bytes(b"".join(lines[:4]))
        (directory / "out.jsonl.meta.json").write_bytes(asked.meta.read_bytes())

    return put


def test_a_run_that_is_there_is_not_overwritten(
    tmp_path: Path, tiny_model: Path, begun: Callable[[Path], None]
) -> None:
    begun(tmp_path)
    before = (tmp_path / "out.jsonl.part").read_bytes()
    with pytest.raises(UsageError, match="is there already"):
        generate(settings(tmp_path, tiny_model))
    (tmp_path / "out.jsonl.meta.json").unlink()
    with pytest.raises(UsageError, match="is missing"):
        generate(settings(tmp_path, tiny_model, resume=True))
    assert (tmp_path / "out.jsonl.part").read_bytes() == before


def test_cut_answers_are_marked_or_left_out(tmp_path: Path, tiny_model: Path) -> None:
    outcome = generate(settings(tmp_path, tiny_model, max_new_tokens=2))
    found = rows(tmp_path / "out.jsonl")
    assert outcome.truncated == sum(row["finish_reason"] == "length" for row in found) > 0
    strict = tmp_path / "strict"
    strict.mkdir()
    dropped = generate(settings(strict, tiny_model, max_new_tokens=2, drop_truncated=True))
    assert dropped.reasons["truncated"] == outcome.truncated
    assert dropped.written == outcome.written - outcome.truncated
    assert all(row["finish_reason"] == "stop" for row in rows(strict / "out.jsonl"))
    monkey = pytest.MonkeyPatch()
    with monkey.context() as patched:  # decided lines are not asked again
        patched.setattr(run_module, "start_source", lambda *_: pytest.fail("the model was loaded"))
        again = generate(settings(strict, tiny_model, max_new_tokens=2, drop_truncated=True, resume=True))
    assert again.reasons == dropped.reasons


def test_a_stop_string_ends_an_answer(tmp_path: Path, tiny_model: Path) -> None:
    every = [chr(c) for c in range(32, 127)]
    generate(settings(tmp_path, tiny_model, stop=tuple(every), temperature=0.7))
    found = rows(tmp_path / "out.jsonl")
    answers = [row["messages"][-1]["content"] for row in found]
    assert not any(character in answer for answer in answers for character in every)
    assert any(row["finish_reason"] == "stop" for row in found)


def test_no_memory_for_a_batch_halves_it(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One long conversation must not fail those that are answered with it."""
    import torch

    real = Transformers._generate

    def short_of_memory(self: Transformers, asks: Any, on_tokens: Any) -> Any:
        if len(asks) > 2 or asks[0].line == 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried")
        return real(self, asks, on_tokens)

    monkeypatch.setattr(Transformers, "_generate", short_of_memory)
    outcome = generate(settings(tmp_path, tiny_model))
    assert outcome.failed == 1
    assert [f["line"] for f in rows(tmp_path / "out.failed.jsonl") if f["reason"] == "out_of_memory"] == [3]
    monkeypatch.undo()
    assert generate(settings(tmp_path, tiny_model, resume=True)).failed == 0


def test_a_full_disk_ends_resumable(
    whole: bytes, tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from extractor.generate.journal import AppendFile

    real, calls = AppendFile.append, 0

    def full(self: AppendFile, line: bytes) -> None:
        nonlocal calls
        calls += 1
        if calls > 6:
            raise NoSpaceError("no space left")
        real(self, line)

    monkeypatch.setattr(AppendFile, "append", full)
    with pytest.raises(NoSpaceError):
        generate(settings(tmp_path, tiny_model))
    monkeypatch.undo()
    assert not (tmp_path / "out.jsonl").exists()
    generate(settings(tmp_path, tiny_model, resume=True))
    assert (tmp_path / "out.jsonl").read_bytes() == whole


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"out": "."}, UsageError),
        ({"out": Path()}, UsageError),
        ({"stop": ("",)}, UsageError),
        ({"stop": ("\udcff",)}, UsageError),
        ({"out": "no/such/place.jsonl"}, NotFoundError),
        ({"out": "in.jsonl"}, UsageError),
        ({"failed_out": "out.jsonl"}, UsageError),
        ({"prompts": "none.jsonl"}, NotFoundError),
        ({"model": "none"}, NotFoundError),
        ({"engine_options": {"sparks": "1"}}, UsageError),
    ],
)
def test_a_wrong_call_changes_nothing(
    options: dict[str, Any], error: type[HsstoreError], tmp_path: Path, tiny_model: Path
) -> None:
    write_jsonl(tmp_path / "in.jsonl", conversations(3))
    places = {k: tmp_path / v if isinstance(v, str) else v for k, v in options.items()}
    given = {"prompts": tmp_path / "in.jsonl", "model": tiny_model, **places}
    model = given.pop("model")
    with pytest.raises(error):
        generate(settings(tmp_path, model, **given))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.jsonl"]


def test_a_file_without_questions_is_an_error(tmp_path: Path, tiny_model: Path) -> None:
    for lines in ([], [{"text": "once"}]):
        with pytest.raises(UsageError):
            generate(settings(tmp_path, tiny_model, prompts=write_jsonl(tmp_path / "in.jsonl", lines)))


def test_a_model_without_a_template_is_an_error(tmp_path: Path, tiny_model: Path) -> None:
    import shutil

    bare = tmp_path / "bare"
    shutil.copytree(tiny_model, bare)
    (bare / "chat_template.jinja").unlink()
    with pytest.raises(UsageError, match="chat template"):
        generate(settings(tmp_path, bare))


def test_what_the_makers_recommend_is_taken_and_recorded(tmp_path: Path, tiny_model: Path) -> None:
    import shutil

    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    (model / "generation_config.json").write_text('{"temperature": 0.6, "top_p": 0.95, "top_k": 20}')
    recommended = settings(tmp_path, model).sampling(model)
    assert (recommended.temperature, recommended.top_p, recommended.top_k) == (0.6, 0.95, 20)
    said = settings(tmp_path, model, temperature=0.0, top_k=0).sampling(model)
    assert (said.temperature, said.top_p, said.top_k) == (0.0, 0.95, 0)


@pytest.mark.parametrize(
    "wrong",
    [
        '{"temperature": "hot"}',
        '{"temperature": NaN}',
        '{"temperature": 101}',
        '{"temperature": true}',
        '{"top_p": 0}',
        '{"top_p": 1.5}',
        '{"top_k": 2.5}',
        '{"top_k": -2}',
        '{"top_k": Infinity}',
        '{"top_k": 100000000000}',
    ],
)
def test_what_the_makers_recommend_has_the_bounds_of_the_options(tmp_path: Path, tiny_model: Path, wrong: str) -> None:
    (tmp_path / "generation_config.json").write_text(wrong)
    with pytest.raises(UsageError, match=wrong.split('"')[1]):
        settings(tmp_path, tiny_model).sampling(tmp_path)


@pytest.mark.parametrize("option", ["--temperature", "--top-p", "--server-wait", "--answer-seconds"])
def test_nan_is_no_number(option: str) -> None:
    words = ["--model", "m", "--prompts", "p", "--out", "o", option, "nan"]
    result = CliRunner().invoke(command, words)
    assert result.exit_code == 2
    assert "nan" in result.output


def test_the_dry_run_changes_nothing(tmp_path: Path, tiny_model: Path) -> None:
    estimate = dry_run(settings(tmp_path, tiny_model))
    assert (estimate.lines, estimate.usable, estimate.answers) == (N_LINES, N_LINES, N_LINES)
    assert estimate.prompt_tokens > N_LINES * 20
    assert estimate.most_new_tokens == N_LINES * 12
    assert [p.name for p in tmp_path.iterdir()] == ["in.jsonl"]


def test_the_command_says_the_sum_last(tmp_path: Path, tiny_model: Path) -> None:
    prompts = write_jsonl(tmp_path / "in.jsonl", [*conversations(3), {"text": "x"}])
    words = f"--model {tiny_model} --prompts {prompts} --out {tmp_path / 'out.jsonl'} --engine transformers"
    words += " --engine-option threads=1 --max-new-tokens 6"
    assert CliRunner().invoke(command, [*words.split(), "--dry-run", "--json"], standalone_mode=False).return_value == 0
    result = CliRunner().invoke(command, words.split(), standalone_mode=False)
    assert result.exception is None
    assert result.return_value == 0
    assert result.stdout.splitlines()[-1].endswith("= input 4")
    document = CliRunner().invoke(command, [*words.split(), "--resume", "--json"], standalone_mode=False)
    found = json.loads(document.stdout)
    assert found["written"] + found["skipped"] == found["input"] == 4


def test_failed_lines_are_exit_code_4(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    def short_of_memory(*_: Any) -> Any:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(Transformers, "_generate", short_of_memory)
    prompts = write_jsonl(tmp_path / "in.jsonl", conversations(2))
    words = f"--model {tiny_model} --prompts {prompts} --out {tmp_path / 'out.jsonl'} --engine transformers".split()
    result = CliRunner().invoke(command, [*words, "--engine-option", "threads=1"], standalone_mode=False)
    assert result.return_value == IncompleteError.exit_code
