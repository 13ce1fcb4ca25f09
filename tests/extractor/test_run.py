"""`hsstore extract` as users meet it: exit codes, the last line, resume, conflicts, garbage, full disks."""

from __future__ import annotations

import errno
import gzip
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest

from extractor.engines.base import Ticket
from extractor.engines.transformers import TransformersEngine
from hsstore.cli import run
from hsstore.store import Store
from hsstore.verify import Verifier
from tests.extractor.tiny import conversations, write_jsonl, write_tiny_model

EXTRACT = ["extract", "--engine", "transformers", "--shard-rows", "512", "--engine-option", "threads=1"]


class Cli:
    """One directory, one prompts file, the command run in this process."""

    def __init__(self, directory: Path, model: Path, capture: pytest.CaptureFixture[str]) -> None:
        self.model, self.prompts, self.out = model, directory / "chats.jsonl", directory / "store"
        self._capture = capture
        self.stdout = self.stderr = ""
        write_jsonl(self.prompts, conversations(30))

    def __call__(self, *options: str, model: Path | None = None) -> int:
        self._capture.readouterr()
        places = ["--model", str(model or self.model), "--prompts", str(self.prompts), "--out", str(self.out)]
        code = run([*EXTRACT, *places, *options])
        self.stdout, self.stderr = self._capture.readouterr()
        assert "Traceback" not in self.stderr
        return code

    @property
    def last(self) -> str:
        return self.stdout.splitlines()[-1]

    def manifest_id(self) -> str:
        assert not [f for f in Verifier(str(self.out), "full").findings() if f.severity == "damage"]
        with Store.open(self.out) as store:
            return store.manifest_id


@pytest.fixture
def cli(tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(tmp_path, tiny_model, capsys)


@pytest.fixture
def interrupted(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """A store that Ctrl-C ended half-way."""
    with monkeypatch.context() as patch:
        patch.setattr(TransformersEngine, "_forward", after(12, TransformersEngine._forward, KeyboardInterrupt()))
        assert cli() == 130
    return cli


def after(n: int, call: Callable[..., Any], error: BaseException) -> Callable[..., Any]:
    """`call`, until it has been called n times; then the error, for ever."""
    calls = 0

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > n:
            raise error
        return call(*args, **kwargs)

    return wrapped


def test_a_whole_run(cli: Cli) -> None:
    assert cli() == 0
    assert cli.last == "written 30 + failed 0 + skipped 0 = input 30"
    assert "tok/s" in cli.stderr
    with Store.open(cli.out) as store:
        assert sorted(store.index.source_index.tolist()) == list(range(30))
        assert store.capture.layers == ("after_2", "after_4", "after_5", "final")
        assert store.capture.norm == "post"
        assert store.capture.model == "tiny-llama"
    assert not (cli.out.parent / "store.failed.jsonl").exists()
    assert cli.manifest_id()


def test_json_accounts_for_every_line(cli: Cli) -> None:
    """`--json` prints one document; the sum comes out, rejected lines are counted by reason and listed in a file."""
    with open(cli.prompts, "a") as file:
        file.write('\nnot json\n{"messages": []}\n')
    assert cli("--json", "--quiet") == 0
    found = json.loads(cli.stdout)
    assert found["written"] == 30
    assert found["failed"] == 0
    assert found["skipped"] == 3
    assert found["input"] == 33
    assert found["rejected"] == {"blank_line": 1, "empty_conversation": 1, "not_json": 1}
    assert found["complete"]
    assert found["manifest_id"] == cli.manifest_id()
    listed = [json.loads(line) for line in Path(found["failures_file"]).read_text().splitlines()]
    assert [(row["line"], row["reason"]) for row in listed] == [
        (31, "blank_line"),
        (32, "not_json"),
        (33, "empty_conversation"),
    ]
    assert "warning: line 32 skipped: not_json" in cli.stderr
    assert "starting" not in cli.stderr  # --quiet


def test_dry_run_changes_nothing(cli: Cli) -> None:
    assert cli("--dry-run") == 0
    assert {"samples", "tokens", "bytes per sample", "free space", "shards"} <= {
        line.partition("  ")[0] for line in cli.stdout.splitlines()
    }
    assert cli("--dry-run", "--json") == 0
    estimate = json.loads(cli.stdout)
    assert not cli.out.exists()
    assert estimate["bytes_per_token"] == 4 * 64 * 2 + 5
    assert estimate["fits"]
    assert cli("--json") == 0
    outcome = json.loads(cli.stdout)
    assert (outcome["tokens"], outcome["shards"]) == (estimate["tokens"], estimate["shards"])
    # The estimate is what the data takes; the rest is footers of 16 bytes a block.
    assert estimate["total_bytes"] <= outcome["bytes"] <= estimate["total_bytes"] * 1.01


def test_an_existing_store_is_not_touched_without_resume(cli: Cli) -> None:
    assert cli() == 0
    before = cli.manifest_id()
    assert cli() == 2
    assert "add --resume" in cli.stderr
    assert cli.manifest_id() == before


def test_a_complete_store_says_so(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Resuming what is complete is no error, and loads no model: `make demo` twice."""
    assert cli("--resume") == 0
    monkeypatch.setattr("extractor.run.start_engine", lambda *_a, **_k: pytest.fail("the verifier was loaded"))
    assert cli("--resume") == 0
    assert "complete already" in cli.stderr
    assert cli.last == "written 30 + failed 0 + skipped 0 = input 30"


def test_resume_ends_equal(interrupted: Cli, tmp_path: Path) -> None:
    """Ctrl-C keeps committed shards and says how to go on; the resumed store has the unkilled run's manifest_id."""
    assert "--resume" in interrupted.stderr
    done = len(list((interrupted.out / "records").iterdir()))
    assert done > 0
    assert not list((interrupted.out / "staging").iterdir())
    stamps = {p: p.stat().st_mtime_ns for p in (interrupted.out / "records").iterdir()}
    assert interrupted("--resume") == 0
    assert "committed already" in interrupted.stderr
    assert all(p.stat().st_mtime_ns == stamp for p, stamp in stamps.items())
    resumed = interrupted.manifest_id()
    interrupted.out = tmp_path / "fresh"
    assert interrupted() == 0
    assert interrupted.manifest_id() == resumed


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--layers", "1,2,3"], "layers: after_2,after_4,after_5,final → after_1,after_2,after_3,final"),
        (["--max-length", "100"], "--max-length: 512 → 100"),
        (["--overlong", "drop"], "--overlong: truncate → drop"),
        (["--dtype", "float32"], "dtype: bfloat16 → float32"),
        (["--shard-rows", "1024"], "--shard-rows: 512 → 1024"),
        (["--validation-fraction", "0.2"], "--validation-fraction: 0.05 → 0.2"),
        (["--split-salt", "pepper"], "--split-salt: hsstore → pepper"),
        (["--template-arg", "x=1"], "--template-arg x: not given → 1"),
        (["--weights-digest", "sampled"], "--weights-digest: full → sampled"),
        (["--engine-option", "attn_implementation=eager"], "engine setting attn_implementation: sdpa → eager"),
    ],
)
def test_a_changed_option_refuses_to_resume(interrupted: Cli, options: list[str], words: str) -> None:
    """Two captures in one store are worth less than none: every difference is named, old → new, nothing changes."""
    before = sorted(p.name for p in (interrupted.out / "records").iterdir())
    assert interrupted("--resume", *options) == 2
    assert words in interrupted.stderr
    assert sorted(p.name for p in (interrupted.out / "records").iterdir()) == before
    assert interrupted("--resume") == 0


def test_a_changed_model_or_file_refuses_to_resume(interrupted: Cli, tmp_path: Path) -> None:
    copy = tmp_path / "renamed"
    shutil.copytree(interrupted.model, copy)
    (copy / "tokenizer.json").write_text((copy / "tokenizer.json").read_text() + " ")
    (copy / "chat_template.jinja").write_text((copy / "chat_template.jinja").read_text() + "{# #}")
    write_jsonl(interrupted.prompts, conversations(31))
    assert interrupted("--resume", model=copy) == 2
    for word in ("tokenizer:", "chat template:", "prompts file: chats.jsonl (30 lines"):
        assert word in interrupted.stderr
    assert "weights" not in interrupted.stderr
    write_jsonl(interrupted.prompts, conversations(30))
    shutil.rmtree(copy)
    write_tiny_model(copy, seed=1)
    assert interrupted("--resume", model=copy) == 2
    assert "model weights:" in interrupted.stderr
    shutil.rmtree(copy)
    shutil.copytree(interrupted.model, copy)
    assert interrupted("--resume", model=copy) == 0  # another name is no other model


def test_failed_samples_are_counted_and_listed(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sample the engine cannot do is flagged, listed with its line, and makes the exit code 4."""
    forward = TransformersEngine._forward

    def poisoned(self: TransformersEngine, job: Any) -> Any:
        import torch

        if job.source_index == 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")
        return forward(self, job)

    monkeypatch.setattr(TransformersEngine, "_forward", poisoned)
    assert cli() == 4
    assert cli.last == "written 29 + failed 1 + skipped 0 = input 30"
    (row,) = (cli.out.parent / "store.failed.jsonl").read_text().splitlines()
    expected = {
        "line": 4,
        "status": "failed",
        "reason": "engine",
        "detail": "out of device memory: CUDA out of memory",
        "source_index": 3,
        "tries": 2,
    }
    assert {name: json.loads(row)[name] for name in expected} == expected
    assert cli("--resume") == 4  # still incomplete, and says so
    assert cli.last == "written 29 + failed 1 + skipped 0 = input 30"
    assert (cli.out.parent / "store.failed.jsonl").read_text().splitlines() == [row]
    assert cli("--resume", "--retry-failed") == 4  # and still
    assert cli.last == "written 29 + failed 1 + skipped 0 = input 30"
    monkeypatch.undo()
    assert cli("--resume") == 4
    assert cli("--resume", "--retry-failed") == 0
    assert cli.last == "written 30 + failed 0 + skipped 0 = input 30"
    assert not (cli.out.parent / "store.failed.jsonl").exists()
    with Store.open(cli.out) as store:
        assert sorted(store.index.source_index.tolist()) == list(range(30))
        assert not store.index.flags.any()
        assert (store.totals.n_samples, store.totals.n_failed) == (30, 0)
    assert cli.manifest_id()


def test_a_disk_that_fills_up(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """ENOSPC in the middle: one sentence, exit 4, committed shards stay, the rest is done after space was made."""
    with monkeypatch.context() as patch:
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        patch.setattr("hsstore.durable.os.pwrite", after(60, os.pwrite, full))
        assert cli() == 4
    assert "full" in cli.stderr
    assert "--resume" in cli.stderr
    assert not list((cli.out / "staging").iterdir())
    assert list((cli.out / "records").iterdir())
    assert cli("--resume") == 0
    assert cli.manifest_id()


def test_what_cannot_fit_is_refused_before_the_model_loads(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("extractor.estimate.free_bytes", lambda _path: 1_000_000)
    monkeypatch.setattr("extractor.run.start_engine", lambda *_a, **_k: pytest.fail("the verifier was loaded"))
    assert cli() == 4
    assert "has 1 MB free" in cli.stderr
    assert not cli.out.exists()
    assert cli("--dry-run") == 0
    assert "does not fit" in cli.stdout


@pytest.mark.parametrize(
    ("data", "code", "words"),
    [
        (b"", 2, "is empty"),
        (b"\n\n\n", 2, "none of the 3 lines"),
        (b"\n", 2, "none of the 1 line of"),
        (b'{"input_ids": [1], "loss_mask": [1]}', 2, "[1 token]"),
        (gzip.compress(b'{"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}\n' * 9)[:-9], 2, "gzip -t"),
        (b"\x00\xff\x00", 2, "not UTF-8"),
        (b'{"input_ids": [1, 2, 9999], "loss_mask": [0, 1, 1]}', 2, "id 9999, vocabulary of 264"),
        (None, 10, "does not exist"),
    ],
)
def test_useless_prompts(cli: Cli, data: bytes | None, code: int, words: str) -> None:
    cli.prompts.unlink()
    if data is not None:
        cli.prompts.write_bytes(data)
    assert cli() == code
    assert words in cli.stderr
    assert not cli.out.exists()


def test_prompts_that_are_a_directory(cli: Cli, tmp_path: Path) -> None:
    cli.prompts = tmp_path / "d"
    cli.prompts.mkdir()
    assert cli() == 2
    assert "give --prompts" in cli.stderr


def test_models_that_are_none(cli: Cli, tmp_path: Path) -> None:
    assert cli(model=tmp_path / "nothing") == 10
    assert "no model directory" in cli.stderr
    bare = tmp_path / "bare"
    shutil.copytree(cli.model, bare)
    for file in bare.glob("*token*"):
        file.unlink()
    assert cli(model=bare) == 2
    assert "has no tokenizer" in cli.stderr
    write_jsonl(cli.prompts, [{"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}])
    assert cli(model=bare) == 0  # ids need none
    (bare / "model.safetensors").unlink()
    assert cli("--resume", model=bare) == 10
    assert "holds no weights" in cli.stderr
    cli.out = tmp_path / "other"
    assert cli("--dry-run", model=bare) == 10
    assert "holds no weights" in cli.stderr


@pytest.mark.parametrize("option", ["--quiet", "--dry-run"])
def test_a_download_that_broke_off(cli: Cli, tmp_path: Path, option: str) -> None:
    """Weights cut short and a template that is none: exit 2 and one sentence, in the dry run too."""
    copy = shutil.copytree(cli.model, tmp_path / "copy")
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert cli(option, model=copy) == 2
    assert f"{weights} has" in cli.stderr
    assert "download the model completely" in cli.stderr
    shutil.copy(cli.model / "model.safetensors", weights)
    (copy / "chat_template.jinja").write_text("{% for %}")
    assert cli(option, model=copy) == 2
    assert f"the chat template of {copy} is no template" in cli.stderr


def test_prompts_that_do_not_fit_the_store_are_named_as_differences(cli: Cli) -> None:
    """Samples longer than the store's shards must not hide that the prompts file is another one."""
    write_jsonl(cli.prompts, [{"input_ids": [1, 2, 3] * 100, "loss_mask": [1] * 300}])
    assert cli() == 0
    assert cli("--resume", "--shard-rows", "256") == 2
    assert "--shard-rows: 512 → 256" in cli.stderr
    assert cli("--resume", "--shard-rows", "256", "--dry-run") == 2
    assert "--shard-rows: 512 → 256" in cli.stderr
    cli.out = cli.out.with_name("small")
    write_jsonl(cli.prompts, conversations(3, longest=20))
    assert cli("--shard-rows", "256", "--max-length", "256") == 0
    write_jsonl(cli.prompts, [{"input_ids": [1, 2, 3] * 100, "loss_mask": [1] * 300}])
    assert cli("--resume") == 2
    for words in (
        "prompts file: chats.jsonl (3 lines",
        "(1 line,",
        "--shard-rows: 256 → 512",
        "--max-length: 256 → 512",
    ):
        assert words in cli.stderr


def test_places_that_cannot_be_written_are_named_first(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before hours of tokenising, not after them."""
    store = cli.out
    monkeypatch.setattr("extractor.run.read_input", lambda *_: pytest.fail("the input was read"))
    cli.out = cli.prompts / "x"
    for option in ("--quiet", "--dry-run"):
        assert cli(option) == 2
        assert f"--out {cli.out} lies below {cli.prompts}, which is a file" in cli.stderr
    cli.out = store
    assert cli("--failed-out", str(store / "none" / "f.jsonl")) == 2
    assert "--failed-out" in cli.stderr
    monkeypatch.setattr("extractor.target.os.access", lambda _path, mode: not mode & os.W_OK)
    assert cli() == 2
    assert f"--out {store} cannot be written" in cli.stderr


def test_a_complete_store_on_a_read_only_disk(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is left to do, so a list of failed lines that cannot be written is a warning."""
    with open(cli.prompts, "a") as file:
        file.write("not json\n")
    assert cli() == 0
    denied = OSError(errno.EROFS, os.strerror(errno.EROFS))
    monkeypatch.setattr("extractor.target.os.access", lambda _path, mode: not mode & os.W_OK)
    monkeypatch.setattr("extractor.report.Path.write_text", after(0, Path.write_text, denied))
    assert cli("--resume") == 0
    assert "complete already" in cli.stderr
    assert "cannot be written: read-only file system" in cli.stderr
    assert cli.last == "written 30 + failed 0 + skipped 1 = input 31"


def test_wrong_calls(cli: Cli, tmp_path: Path) -> None:
    cases = {
        ("--max-length", "513"): "beyond the 512 tokens of context",
        ("--layers", "8"): "`final`, always captured",
        ("--engine-option", "devise=cpu"): "no option 'devise'",
        ("--engine-option", "device"): "takes NAME=VALUE",
        ("--shard-rows", "300"): "power of two",
    }
    for options, words in cases.items():
        assert cli(*options) == 2, options
        assert words in cli.stderr
    cli.out.mkdir()
    (cli.out / "thesis.tex").write_text("x")
    assert cli("--resume") == 2
    assert "exists and is no store" in cli.stderr
    assert (cli.out / "thesis.tex").read_text() == "x"


def test_a_directory_that_may_not_be_written(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root ignores permissions, so the system's refusal is played: one sentence, exit 2."""
    denied = OSError(errno.EROFS, os.strerror(errno.EROFS), str(cli.out))
    monkeypatch.setattr("hsstore.durable.Path.mkdir", after(0, Path.mkdir, denied))
    monkeypatch.setattr("hsstore.writer.Path.mkdir", after(0, Path.mkdir, denied))
    assert cli() == 2
    assert "read-only" in cli.stderr


def test_duplicates_are_kept_apart(cli: Cli) -> None:
    write_jsonl(cli.prompts, conversations(3) * 2)
    assert cli() == 0
    with Store.open(cli.out) as store:
        assert len(store.index.source_index) == 6
        assert len({bytes(u) for u in store.index.uid}) == 3


def test_append_grows_the_store_by_other_prompts(cli: Cli) -> None:
    """The old shards stay as they are; the new samples are numbered behind the old lines, and count on their own."""
    assert cli() == 0
    first = cli.manifest_id()
    records = {p: p.read_bytes() for p in (cli.out / "records").iterdir()}
    cli.prompts = write_jsonl(cli.out.parent / "more.jsonl", conversations(42)[30:])
    with open(cli.prompts, "a") as file:
        file.write("not json\n")
    assert cli("--resume") == 2
    assert "--append" in cli.stderr
    assert cli("--append", "--dry-run") == 0
    assert cli("--append", "--json") == 0
    found = json.loads(cli.stdout)
    assert (found["written"], found["skipped"], found["input"], found["complete"]) == (12, 1, 13, True)
    assert {p: p.read_bytes() for p in records} == records
    grown = cli.manifest_id()
    assert grown != first
    with Store.open(cli.out) as store:
        assert sorted(store.index.source_index.tolist()) == list(range(42))
    assert cli("--append") == 0
    assert cli("--resume") == 0
    assert cli.last == "written 12 + failed 0 + skipped 1 = input 13"
    cli.prompts = cli.out.parent / "chats.jsonl"
    assert cli("--resume") == 0
    assert cli.last == "written 30 + failed 0 + skipped 0 = input 30"
    assert cli.manifest_id() == grown


def test_append_needs_a_store_and_the_same_verifier(cli: Cli, tmp_path: Path) -> None:
    assert cli("--append") == 10
    assert "no store" in cli.stderr
    assert cli() == 0
    cli.prompts = write_jsonl(tmp_path / "more.jsonl", conversations(35)[30:])
    assert cli("--append", "--layers", "1,2") == 2
    assert "layers" in cli.stderr
    assert len(list((cli.out / "layouts").iterdir())) == 1


def test_what_is_quarantined_is_extracted_again_and_nothing_else(cli: Cli) -> None:
    assert cli() == 0
    whole = Store.open(cli.out)
    lost = [s.source_index for s in whole.record(1).samples]
    assert run(["quarantine", str(cli.out), "--shard", "1", "--reason", "a bad disk"]) == 0
    assert cli("--resume", "--json") == 0
    assert json.loads(cli.stdout)["written"] == 30
    assert f"{30 - len(lost)} of 30 samples are committed already" in cli.stderr
    cli.manifest_id()
    with Store.open(cli.out) as store:
        assert sorted(store.index.source_index.tolist()) == list(range(30))
        for i in lost:
            new, old = store.index.find(str(i)), whole.index.find(str(i))
            assert int(store.index.shard[new]) >= len(whole.manifest.shards)
            assert store.hidden(new, "final").tobytes() == whole.hidden(old, "final").tobytes()
    assert cli("--resume") == 0
    assert "complete already" in cli.stderr


def poison(monkeypatch: pytest.MonkeyPatch, *lines: int) -> None:
    """These samples get no states, whatever is done."""
    deliver = TransformersEngine._deliver

    def poisoned(self: TransformersEngine, job: Any, states: Any) -> Ticket:
        if job.source_index in lines:
            return Ticket(source_index=job.source_index, n_rows=0, crc32c={}, error="poison")
        return deliver(self, job, states)

    monkeypatch.setattr(TransformersEngine, "_deliver", poisoned)


def test_samples_that_failed_before_end_no_run_when_they_fail_again(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """A retry holds nothing but bad samples: that all of them fail says nothing of the engine, and the store ends."""
    with monkeypatch.context() as patch:
        poison(patch, 2, 8, 14, 20, 26)
        for options in (["--max-consecutive-errors", "100"], ["--resume", "--retry-failed"], ["--resume"]):
            assert cli(*options) == 4
            assert cli.last == "written 25 + failed 5 + skipped 0 = input 30"
        assert not [f for f in Verifier(str(cli.out), "quick").findings() if f.kind == "open"]
    assert cli("--resume", "--retry-failed") == 0
    assert cli.last == "written 30 + failed 0 + skipped 0 = input 30"


def test_the_first_look_waits_for_a_sample_that_has_states(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards without any are held back: what is looked at is never nothing."""
    forward = TransformersEngine._forward

    def shifted(self: TransformersEngine, job: Any) -> Any:
        return {state: rows.roll(1, dims=0) for state, rows in forward(self, job).items()}

    monkeypatch.setattr(TransformersEngine, "_forward", shifted)
    poison(monkeypatch, *range(12))  # more than the first shard holds
    assert cli("--max-consecutive-errors", "100") == 3
    assert "shifted" in cli.stderr
    assert not any((cli.out / "records").iterdir())


def test_a_list_takes_no_place_of_another_file(cli: Cli, tmp_path: Path) -> None:
    """It is exchanged, and removed when it would be empty: neither may befall prompts, devices or pipes."""
    before = cli.prompts.read_bytes()
    pipe, link, listed = tmp_path / "pipe", tmp_path / "link", tmp_path / "listed"
    os.mkfifo(pipe)
    for place in (cli.prompts, pipe, Path("/dev/null")):
        assert cli("--failed-out", str(place)) == 2
        assert "expected a plain file" in cli.stderr or "would be overwritten" in cli.stderr
    assert cli("--log-json", str(cli.prompts)) == 2
    assert cli.prompts.read_bytes() == before
    assert pipe.is_fifo()
    cli.prompts.write_bytes(before + b"not json\n")
    listed.touch()
    link.symlink_to(listed)
    assert cli("--failed-out", str(link)) == 0
    assert link.is_symlink()
    assert json.loads(listed.read_text())["reason"] == "not_json"


def test_a_list_that_finds_no_room_is_warned_about(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    with open(cli.prompts, "a") as file:
        file.write("not json\n")
    real = Path.write_text

    def full(self: Path, *args: Any, **kwargs: Any) -> int:
        if "failed.jsonl" in self.name:
            real(self, "", **kwargs)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(self, *args, **kwargs)

    monkeypatch.setattr(Path, "write_text", full)
    assert cli() == 0
    assert "cannot be written: no space left" in cli.stderr
    assert not list(cli.out.parent.glob(".store.failed*"))


def test_the_directory_one_stands_in_is_a_place(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    cli.out = Path(".")
    assert cli("--dry-run") == 0
    assert cli() == 0
    assert (here / "store.json").is_file()
    assert (tmp_path / "here").is_dir()
    cli.out = Path("/")
    assert cli() == 2


@pytest.mark.parametrize("option", ["--lease-seconds", "--validation-fraction"])
@pytest.mark.parametrize("value", ["nan", "inf", "1e300"])
def test_numbers_that_are_none_are_refused_at_once(cli: Cli, option: str, value: str) -> None:
    assert cli(option, value) == 2
    assert not cli.out.exists()


def test_a_terminal_that_is_gone_ends_no_run(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is said for people is lost; the work and its exit code are not."""
    real = click.echo

    def gone(message: Any = None, **kwargs: Any) -> None:
        if kwargs.get("err"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(message, **kwargs)

    monkeypatch.setattr(click, "echo", gone)
    assert cli() == 0
    assert cli.last == "written 30 + failed 0 + skipped 0 = input 30"
