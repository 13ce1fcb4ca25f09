from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from hsstore import cli, errors
from hsstore.store import Store
from tests.stores import Sample, create, make_samples, stage


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hsstore.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)


def invoke(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.run(list(arguments))
    out, err = capsys.readouterr()
    return code, out, err


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from hsstore.cli import run; assert run(['--help']) == 0;"
        "heavy = {'numpy','zarr','torch','fastapi','msgspec','rich','sglang','transformers'} & set(sys.modules);"
        "sys.exit(repr(heavy) if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for verb in cli.VERBS:
        assert f"  {verb} " in done.stdout


@pytest.mark.parametrize(
    ("verb", "package", "extra"),
    [("extract", "transformers", "hf"), ("serve", "fastapi", "server"), ("train", "speculators", "train")],
)
def test_a_missing_extra_answers_with_the_pip_command(tmp_path: Path, verb: str, package: str, extra: str) -> None:
    """A fresh environment without the extra: the package is hidden from the import system."""
    (tmp_path / "sitecustomize.py").write_text(
        f"import sys\nfor name in ({package!r}, 'sglang'): sys.modules[name] = None\n"
    )
    (tmp_path / "p.jsonl").write_text('{"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}\n')
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 9, "hidden_size": 8}
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 8}))
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
    arguments = {
        "extract": ["--model", str(tmp_path), "--prompts", str(tmp_path / "p.jsonl"), "--out", str(tmp_path / "o")],
        "serve": [str(tmp_path)],
        "train": ["--source", str(tmp_path), "--verifier", str(tmp_path), "--out", str(tmp_path / "o")],
    }
    done = run(verb, *arguments[verb], PYTHONPATH=str(tmp_path))
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert f"pip install 'hsstore[{extra}]'" in done.stderr or (verb == "extract" and "hsstore[" in done.stderr)


def test_every_verb_has_help() -> None:
    for verb in cli.VERBS:
        done = run(verb, "--help")
        assert done.returncode == 0, (verb, done.stderr)
        assert "Usage:" in done.stdout


def test_info_ls_show_agree_with_the_store(
    shared_store: Store, samples: list[Sample], capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(shared_store.root)
    code, out, _ = invoke(capsys, "info", path, "--json")
    document = json.loads(out)
    assert code == 0
    assert document["n_samples"] == len(samples)
    assert document["manifest_id"] == shared_store.manifest_id
    assert document["split"]["train"] + document["split"]["validation"] == len(samples)
    _, out, _ = invoke(capsys, "ls", path, "--json")
    rows = [json.loads(line) for line in out.splitlines()]
    assert [r["uid"] for r in rows] == [s.entry.uid for s in samples]
    _, out, _ = invoke(capsys, "show", path, samples[3].entry.uid, "--json")
    shown = json.loads(out)
    assert shown["input_ids"] == samples[3].input_ids.tolist()
    assert shown["loss_mask"] == samples[3].loss_mask.tolist()
    assert set(shown["states"]) == {"after_2", "after_3", "final"}
    for verb in (["info", path], ["ls", path, "--limit", "2"], ["show", path, "3"], ["manifest", "show", path]):
        code, out, _ = invoke(capsys, *verb)
        assert code == 0
        assert out


def test_manifest_show_prints_the_bytes_that_are_hashed(
    shared_store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    _, out, _ = invoke(capsys, "manifest", "show", str(shared_store.root), "--json")
    assert out.encode() == (shared_store.root / "manifest.json").read_bytes()


def test_verify_exit_codes_and_json(store_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = invoke(capsys, "verify", "manifest", str(store_path), "--full", "--json")
    lines = [json.loads(line) for line in out.splitlines()]
    assert (code, lines[-1]["type"], lines[-1]["damage"]) == (0, "summary", 0)
    path = store_path / "arrays.zarr/hidden/final/c/0/0"
    os.chmod(path, 0o644)
    data = bytearray(path.read_bytes())
    data[7] ^= 4
    path.write_bytes(data)
    code, out, err = invoke(capsys, "verify", "manifest", str(store_path), "--full", "--json")
    finding = json.loads(out.splitlines()[0])
    assert code == 3
    assert (finding["kind"], finding["rows"][0]) == ("block", 0)
    assert finding["samples"][0][1] == 0
    assert "damaged in 1 place\n" in err
    code, out, _ = invoke(capsys, "verify", "manifest", str(store_path), "--full")
    assert code == 3
    assert "line 1" in out
    assert "DAMAGED" in out


def test_manifest_build_finishes_and_rebuilds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    samples = make_samples([5, 6, 7])
    writer = create(tmp_path / "s", samples)
    stage(writer, 0, samples).commit()
    code, out, _ = invoke(capsys, "manifest", "build", str(tmp_path / "s"))
    assert code == 0
    assert out.strip() == Store.open(tmp_path / "s").manifest_id


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["info", "/nowhere"], 10, "does not exist"),
        (["inof"], 2, "did you mean 'info'"),
        (["info"], 2, "Missing argument"),
        (["verify", "manifest", "/nowhere"], 10, "does not exist"),
        (["ls", ".", "--limit", "0"], 2, "limit"),
        (["--nonsense"], 2, "no such option"),
    ],
)
def test_errors_are_one_sentence_and_a_code(
    capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, words: str
) -> None:
    found, _, err = invoke(capsys, *arguments)
    assert found == code
    assert words.lower() in err.lower()
    assert "Traceback" not in err


def test_a_sample_that_is_not_there(shared_store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = invoke(capsys, "show", str(shared_store.root), "no-such")
    assert code == 10
    assert "hsstore ls" in err


def test_a_reader_that_leaves_is_no_error(shared_store: Store) -> None:
    command = f"{sys.executable} -m hsstore.cli ls {shared_store.root} | head -1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.stdout.splitlines()[1] in ("141", "0"), "0 when all of it fitted into the pipe before head left"
    assert done.stderr == ""


def test_options_can_come_from_the_environment(shared_store: Store) -> None:
    done = run("ls", str(shared_store.root), HSSTORE_LS_LIMIT="1", HSSTORE_LS_JSON="1")
    assert len(done.stdout.splitlines()) == 1


def test_error_kinds_are_unique_and_coded() -> None:
    tree = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, errors.HsstoreError)]
    assert len({c.kind for c in tree}) == len(tree) > 10
    assert {c.exit_code for c in tree} <= {1, 2, 3, 4, 10, 11, 12}
    for c in tree:
        assert c.kind in (errors.__doc__ or "") or c.__name__ in (errors.__doc__ or "")
