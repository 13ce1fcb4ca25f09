"""The parts of the demo: its prompts, its commands as the command line reads them, what it redoes, its model.

The demo as a whole is `make demo`; what would only show after minutes there is held here in seconds.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import click
import pytest

from hsstore.cli import cli
from tests.models import ROOT, UNPACK, smollm2

DEMO = ROOT / "examples" / "demo"


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module `demo`, importable as it is for `python examples/demo/demo.py`."""
    monkeypatch.syspath_prepend(str(DEMO))
    return importlib.import_module("demo")


@pytest.fixture
def prompts() -> list[list[dict[str, str]]]:
    return [json.loads(line)["messages"] for line in (DEMO / "prompts.jsonl").read_text().splitlines()]


def test_prompts_are_sixty_different_conversations_that_wait_for_an_answer(prompts):
    """A repeated prompt would be answered nearly alike, in the training split and the held-out one."""
    assert len({json.dumps(messages) for messages in prompts}) == 60
    for messages in prompts:
        roles = [m["role"] for m in messages]
        assert roles[-1] == "user"
        assert roles.count("system") == (roles[0] == "system")
        assert set(roles) <= {"system", "user"}
        assert all(set(m) == {"role", "content"} and m["content"].strip() == m["content"] != "" for m in messages)


def test_prompts_have_several_forms(prompts):
    """So that the demo passes through system prompts and second turns too."""
    assert sum(messages[0]["role"] == "system" for messages in prompts) >= 4
    assert sum([m["role"] for m in messages].count("user") == 2 for messages in prompts) >= 4


def test_every_command_of_the_demo_is_one_the_command_line_takes(demo):
    """Without this a renamed option would show only after the minutes that the steps before it take."""
    commands = [(*step.command, *step.resume) for step in demo.steps()] + [demo.serve_command(8420)]
    ours = [words[1:] for words in commands if words[0] == "hsstore"]
    assert {words[0] for words in ours} == {"generate", "extract", "verify", "serve", "train"}
    for words in ours:
        parse(words)


def parse(words: Sequence[str]) -> None:
    """Parse as `hsstore` would, without running. Raises `click.UsageError` for what it does not know."""
    command, rest = cli, list(words)
    with click.Context(cli, info_name="hsstore") as context:
        while isinstance(command, click.Group):
            name = rest.pop(0)
            command = command.get_command(context, name)
            assert command is not None, name
        command.make_context(name, rest, parent=context)


def test_parse_refuses_what_the_command_line_refuses():
    """Guards the test above against passing whatever the words are."""
    with pytest.raises(click.UsageError, match="--no-such-option"):
        parse(("train", "--source", "x", "--verifier", "x", "--out", "x", "--no-such-option"))


def test_every_option_of_the_demo_scripts_is_in_their_help(demo):
    scripts = {step.command[1]: step.command[2:] for step in demo.steps() if step.command[0] == "python"}
    assert len(scripts) == 2
    for script, words in scripts.items():
        assert (ROOT / script).exists()
        options = [word for word in words if word.startswith("--")]
        if options:
            run = subprocess.run(
                [sys.executable, script, "--help"], cwd=ROOT, capture_output=True, text=True, check=True
            )
            assert [option for option in options if option not in run.stdout] == []


class FakeChildren:
    """Makes what a step would leave behind, and remembers the commands. `fail` = a word whose command fails."""

    def __init__(self, steps, fail: str = "") -> None:
        self._results = {step.command: step for step in steps}
        self.fail, self.commands = fail, []

    def run(self, command, *, stdout):
        words = (Path(command[0]).name, *("URL" if w.startswith("http") else w for w in command[1:]))
        self.commands.append(words)
        step = next(s for c, s in self._results.items() if words in (c, c + s.resume))
        for made in filter(None, (step.result, stdout)):
            made.parent.mkdir(parents=True, exist_ok=True)
            made.touch()
        return 7 if self.fail and self.fail in words else 0

    def serve(self, command, *, url, log):
        self.commands.append(("hsstore", "serve"))


@pytest.fixture
def attempt(demo, tmp_path, monkeypatch):
    """Run the demo's steps with fake children in an empty directory; returns the commands run."""
    monkeypatch.chdir(tmp_path)
    demo.PROMPTS.parent.mkdir(parents=True)
    demo.PROMPTS.write_text("one prompt")

    def go(fail: str = ""):
        children = FakeChildren(demo.steps(), fail)
        with contextlib.suppress(SystemExit) if fail else contextlib.nullcontext():
            demo.Demo(children).run()
        return children.commands

    return go


def test_a_second_run_does_nothing_again(demo, attempt):
    assert len(attempt()) == len(demo.steps()) + 1
    assert attempt() == []


def test_other_prompts_redo_everything(demo, attempt):
    """Or the table would speak of data that is no longer there."""
    first = attempt()
    demo.PROMPTS.write_text("another prompt")
    assert attempt() == first


def test_a_lost_result_is_made_again_with_all_that_follows(demo, attempt):
    first = attempt()
    demo.STORE.unlink()
    assert attempt() == first[2:]


def test_a_failed_step_ends_the_demo_and_is_resumed_by_the_next_run(demo, attempt):
    before = attempt(fail="extract")
    assert [words[1] for words in before][-1] == "extract"
    after = attempt()
    assert after[0] == (*before[-1], "--resume")
    assert len(after) == len(demo.steps()) + 1 - 2


def test_interrupted_answers_are_continued_and_those_to_other_prompts_removed(demo, attempt):
    """The answers of a run that was stopped lie beside their final name: minutes of work, or of no use any more."""
    part, meta = next(step.beside for step in demo.steps() if step.name == "answers")
    assert "--resume" not in attempt(fail="generate")[-1]
    demo.ANSWERS.unlink()
    part.touch()
    assert attempt(fail="generate")[-1][-1] == "--resume"
    demo.ANSWERS.unlink()
    meta.touch()
    demo.PROMPTS.write_text("another prompt")
    again = next(words for words in attempt() if words[1] == "generate")
    assert "--resume" not in again
    assert not part.exists()
    assert not meta.exists()


def test_ctrl_c_leaves_no_child_behind(tmp_path):
    """A service that outlived the demo would hold its port; ranks would hold the processor."""
    child = "import os, time; open('pid', 'w').write(str(os.getpid())); time.sleep(600)"
    parent = f"""
import sys; sys.path.insert(0, {str(DEMO)!r})
from processes import Children
with Children() as children:
    children.run([sys.executable, "-c", {child!r}], stdout=None)
"""
    process = subprocess.Popen([sys.executable, "-c", parent], cwd=tmp_path, stderr=subprocess.DEVNULL)
    pid_file, until = tmp_path / "pid", time.monotonic() + 240
    while not (pid_file.exists() and pid_file.read_text()) and time.monotonic() < until:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    process.wait(240)
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)


def test_a_service_that_does_not_start_ends_the_demo_with_its_own_words(demo, tmp_path):
    """Or the demo would wait for a minute and then name no reason."""
    command = [sys.executable, "-c", "raise SystemExit('the store is no store')"]
    with demo.Children() as children, pytest.raises(SystemExit, match="the store is no store"):
        children.serve(command, url="http://127.0.0.1:9", log=tmp_path / "serve.log")


@pytest.mark.model
def test_the_unpacked_model_loads_and_knows_the_capital_of_france():
    """The weights went through GGUF and back: a tensor in the wrong place would still load, and answer nonsense."""
    import torch

    from extractor.quiet import transformers

    library, directory = transformers(), smollm2()
    tokenizer = library.AutoTokenizer.from_pretrained(directory)
    model = library.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    assert (model.config.num_hidden_layers, model.config.hidden_size) == (30, 576)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text + "The capital of France is", return_tensors="pt", add_special_tokens=False).input_ids
    with torch.inference_mode():
        guess = int(model(ids).logits[0, -1].argmax())
    assert tokenizer.decode([guess]).strip() == "Paris"


@pytest.mark.model
def test_unpacking_what_is_there_changes_nothing():
    directory = smollm2()
    before = {file: file.stat().st_mtime_ns for file in directory.iterdir()}
    run = subprocess.run([sys.executable, str(UNPACK), str(directory)], capture_output=True, text=True, check=True)
    assert "already there" in run.stdout
    assert {file: file.stat().st_mtime_ns for file in directory.iterdir()} == before
