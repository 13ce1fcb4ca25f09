"""`hsstore train` as people and scripts call it: help without torch, exit codes, JSON, nothing but data on stdout."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hsstore.cli import run
from tests.trainer import small_run
from tests.trainer.conftest import World
from trainer.cli import _run
from trainer.cli import train as command
from trainer.options import TrainOptions

# speculators pulls in extensions made with an old SWIG; nothing of ours.
pytestmark = pytest.mark.filterwarnings("ignore:builtin type .* has no __module__ attribute:DeprecationWarning")


def test_every_option_of_a_run_is_on_the_command_line() -> None:
    """And its default is the record's: two places to keep one number drift apart."""
    parameters = {p.name: p for p in command.params}
    for name, field in TrainOptions.__dataclass_fields__.items():
        assert name in parameters
        if not parameters[name].required and name != "token":
            assert parameters[name].default == field.default, name
        assert parameters[name].help, name


def test_help_loads_no_torch() -> None:
    code = (
        "import sys; from click.testing import CliRunner; from hsstore.cli import cli;"
        "r = CliRunner().invoke(cli, ['train', '--help']); assert r.exit_code == 0, r.output;"
        "assert '--max-seq-len' in r.output; assert not {'torch', 'speculators', 'zarr'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_json_is_all_there_is_on_stdout(
    world: World, tmp_path: Path, capfd: pytest.CaptureFixture[str], train: object
) -> None:
    """`train` is asked for only because it puts torch's settings back."""
    arguments = ["--source", str(world.store), "--verifier", str(world.verifier), "--out", str(tmp_path / "run")]
    small = ["--max-seq-len", "64", "--draft-vocab", "4000", "--threads", "1", "--device", "cpu", "--num-workers", "0"]
    assert run(["train", *arguments, *small, "--max-steps", "2", "--json"]) == 0
    out, err = capfd.readouterr()
    outcome = json.loads(out)
    assert outcome["status"] == "finished"
    assert outcome["step"] == 2
    assert outcome["draft_vocab"] == 500
    assert {"loss_0", "full_acc_0", "acceptance_length"} <= outcome["last"].keys()
    assert "--draft-vocab 4,000 is more than the verifier has: taking all its 500 tokens" in err
    assert "freeze audit" in err
    assert "all trained parameters moved, no frozen one did" in err
    assert f"checkpoint: {tmp_path}" in err
    assert run(["train", *arguments, *small, "--max-steps", "2"]) == 2
    assert "add --resume" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--lr", "0"], 2, "--lr is 0.0, expected a positive number"),
        (["--lr", "fast"], 2, "'--lr'"),
        (["--verifier", "nowhere"], 10, "no config.json at nowhere"),
        (["--source", "nowhere"], 10, "nowhere"),
        (["--token-file", "nowhere"], 10, "token file nowhere does not exist"),
        (["--store", "other"], 2, "chooses among the stores of a service"),
        (["--source", "http://127.0.0.1:0x"], 2, "127.0.0.1"),
    ],
)
def test_what_cannot_start_is_said_in_a_sentence(
    world: World, tmp_path: Path, capfd: pytest.CaptureFixture[str], arguments: list[str], code: int, said: str
) -> None:
    base = ["--source", str(world.store), "--verifier", str(world.verifier), "--out", str(tmp_path / "run")]
    assert run(["train", *base, *arguments]) == code
    out, err = capfd.readouterr()
    assert said in err
    assert "Traceback" not in err
    assert out == ""


@pytest.mark.parametrize("content", [b"", b"one-hunter2\ntwo-hunter2\n", b"\xffone-hunter2"])
@pytest.mark.parametrize("road", ["file", "option", "environment"])
def test_a_token_that_cannot_travel_is_refused_without_repeating_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, content: bytes, road: str
) -> None:
    more, text = [], content.decode("latin-1") or " "
    if road == "file":
        (tmp_path / "token").write_bytes(content)
        more = ["--token-file", str(tmp_path / "token")]
    elif road == "option":
        more = ["--token", text]
    else:
        monkeypatch.setenv("HSSTORE_TOKEN", text)
    assert run(["train", "--source", "s", "--verifier", "v", "--out", str(tmp_path / "run"), *more]) == 2
    err = capfd.readouterr().err
    assert "must hold one token" in err
    assert "hunter2" not in err
    assert "Traceback" not in err


def test_a_directory_is_no_token_file(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ["--source", "s", "--verifier", "v", "--out", str(tmp_path / "run"), "--token-file", str(tmp_path)]
    assert run(["train", *arguments]) == 2
    assert "cannot be read" in capfd.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_one_signal_ends_what_comes_before_the_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """A flag that nobody looks at yet would leave Ctrl-C without an effect."""
    monkeypatch.delenv("RANK", raising=False)
    handlers = []
    monkeypatch.setattr("trainer.preflight.preflight", lambda options: handlers.append(signal.getsignal(number)))
    monkeypatch.setattr("trainer.rank.run_rank", lambda options, stop: None)
    before = signal.getsignal(number)
    _run(small_run.options(tmp_path, "store", tmp_path / "run"))
    assert handlers == [before]
