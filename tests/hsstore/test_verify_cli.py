"""`hsstore verify manifest` as people and programs call it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hsstore import cli
from hsstore.store import Store
from hsstore.verify import Options, Verifier
from tests.hsstore.test_verify import writable


def invoke(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.run(["verify", "manifest", *arguments])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HSSTORE_STATE_DIR", str(tmp_path / "state"))
    return tmp_path / "state"


@pytest.mark.parametrize(
    "depth", ["--quick", "--full", "--part 1/2", "--sample 5%", "--sample 100%", "--bytes 10kB --seed 4", ""]
)
def test_every_depth_finds_a_sound_store_sound(
    shared_store: Store, capsys: pytest.CaptureFixture[str], depth: str
) -> None:
    code, out, _ = invoke(capsys, str(shared_store.root), *depth.split())
    assert code == 0
    assert out.startswith("sound (")
    code, out, err = invoke(capsys, str(shared_store.root), *depth.split(), "--json", "--quiet")
    (line,) = map(json.loads, out.splitlines())
    assert (code, line["type"], line["damage"], err) == (0, "summary", 0, "")
    assert line["bytes_read"] == line["bytes_to_read"] > 0
    assert invoke(capsys, str(shared_store.root), *depth.split(), "--quiet") == (0, "", "")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--full --part 1/2", "--full and --part, which exclude each other"),
        ("--quick --sample 5%", "--quick and --sample"),
        ("--part 1/2 --sample 5% --bytes 1GB", "--part and --sample and --bytes"),
        ("--part 3/2", "'3/2'"),
        ("--sample 5", "5%"),
        ("--bytes many", "64GiB"),
        ("--rate-limit fast", "200MB/s"),
        ("--rate-limit 0MB/s", "200MB/s"),
        ("--full --newer-than soon", "7d"),
        ("--seed 3", "--seed goes with"),
        ("--resume", "--resume and --newer-than go with --full or --part"),
        ("--sample 5% --resume", "--resume and --newer-than go with --full or --part"),
        ("--full --resume --newer-than 7d", "not both"),
        ("--full --jobs 0", "--jobs"),
        ("--sample 5% --seed -1", "--seed"),
    ],
)
def test_what_does_not_go_together_is_one_sentence(
    shared_store: Store, capsys: pytest.CaptureFixture[str], options: str, words: str
) -> None:
    code, out, err = invoke(capsys, str(shared_store.root), *options.split())
    assert (code, out) == (2, "")
    assert words in err
    assert "Traceback" not in err


def test_a_drawn_sample_can_be_drawn_again(
    store_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hsstore.depth.SMALL_FILE_BYTES", 0)
    monkeypatch.setattr("hsstore.depth.SPOT_BLOCK_BYTES", 0)
    path = writable(store_path / "arrays.zarr/hidden/final/c/0/0")
    path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])
    codes = {}
    for _ in range(40):
        code, out, err = invoke(capsys, str(store_path), "--sample", "30%", "--json")
        summary = json.loads(out.splitlines()[-1])
        assert f"--seed {summary['seed']}" in err
        codes[summary["seed"]] = code
    assert set(codes.values()) == {0, 3}, "a bad block is in some of the draws"
    for seed, code in codes.items():
        assert invoke(capsys, str(store_path), "--sample", "30%", "--seed", str(seed))[0] == code


def test_damage_is_told_also_when_quiet(store_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (store_path / "arrays.zarr/hidden/final/c/0/0").unlink()
    code, out, err = invoke(capsys, str(store_path), "--quiet")
    assert code == 3
    assert len(out.splitlines()) == 1
    assert "hsstore repair" in err


def test_info_shows_what_was_verified(store_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def info(*options: str) -> str:
        assert cli.run(["info", str(store_path), *options]) == 0
        return capsys.readouterr().out

    assert "verified  never on this machine" in info()
    assert invoke(capsys, str(store_path), "--full")[0] == 0
    assert "verified  in full: 2 of 2 shards, oldest just now; last: full just now, sound" in info()
    document = json.loads(info("--json"))["verified"]
    assert (document["shards"], document["whole"], document["damaged"]) == (2, 2, 0)
    assert document["last"]["full"]["damage"] == 0


def test_newer_than_leaves_out_and_says_so(store_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(capsys, str(store_path), "--full")[0] == 0
    code, out, err = invoke(capsys, str(store_path), "--full", "--newer-than", "7d")
    assert code == 0
    assert "10 of 10 files were verified before and are left out" in err
    assert "10 of them verified before" in out
    code, out, err = invoke(capsys, str(store_path), "--full", "--resume")
    assert "no verification of depth full was stopped" in err


def test_an_unwritable_state_directory_is_one_warning(
    store_path: Path, capsys: pytest.CaptureFixture[str], state: Path
) -> None:
    state.write_text("in the way")
    code, out, err = invoke(capsys, str(store_path), "--full")
    assert (code, err.count("warning")) == (0, 1)
    assert out.startswith("sound")


def noted(state: Path) -> int:
    return sum(path.read_bytes().count(b'"type":"file"') for path in state.glob("*.jsonl"))


def start(store: Path, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "hsstore.cli", "verify", "manifest", str(store), *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for_lines(process: subprocess.Popen[str], state: Path) -> None:
    deadline = time.monotonic() + 240
    while not noted(state):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_ctrl_c_ends_at_once_and_says_how_to_go_on(
    store_path: Path, capsys: pytest.CaptureFixture[str], state: Path
) -> None:
    """All of the store would take hours at that rate; a thread is waiting for its turn when the signal comes."""
    process = start(store_path, "--full", "--rate-limit", "3kB/s", "--jobs", "2")
    wait_for_lines(process, state)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=240)
    assert process.returncode == 130
    assert f"hsstore verify manifest {store_path} --full --resume" in err
    assert "Traceback" not in err
    assert "sound" not in out
    n = noted(state)
    code, out, err = invoke(capsys, str(store_path), "--full", "--resume", "--json")
    summary = json.loads(out.splitlines()[-1])
    assert (code, summary["files_skipped"], summary["files_whole"]) == (0, n, 10 - n)
    assert 0 < n < 10


def test_a_killed_run_is_resumed(store_path: Path, capsys: pytest.CaptureFixture[str], state: Path) -> None:
    process = start(store_path, "--full", "--rate-limit", "3kB/s", "--jobs", "1")
    wait_for_lines(process, state)
    process.kill()
    process.communicate(timeout=240)
    n = noted(state)
    code, out, _ = invoke(capsys, str(store_path), "--full", "--resume", "--json")
    assert (code, json.loads(out.splitlines()[-1])["files_skipped"]) == (0, n)


def test_verification_leaves_no_trace_in_the_store(store_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Not a byte, name, mode or time of it, of directories neither; damaged or not."""

    def everything() -> dict[str, tuple[object, ...]]:
        out = {}
        for path in [store_path, *store_path.rglob("*")]:
            status = path.lstat()
            data = path.read_bytes() if path.is_file() else b""
            out[str(path)] = (status.st_mode, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, data)
        return out

    writable(store_path / "arrays.zarr/hidden/final/c/1/0").write_bytes(b"torn")
    (store_path / "records/000001.json").chmod(0)
    before = everything()
    for options in ("--full", "--quick", "--part 1/2", "--sample 50%", "--full --newer-than 1d"):
        assert invoke(capsys, str(store_path), *options.split())[0] == 3
    assert everything() == before


def test_a_store_on_a_read_only_path_is_verified(store_path: Path, tmp_path: Path) -> None:
    """Every way to write below the store fails: nothing is tried."""
    code = (
        "import os, sys\n"
        "def guard(event, arguments):\n"
        "    if event == 'open' and str(arguments[0]).startswith(sys.argv[1]):\n"
        "        assert not arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT), arguments\n"
        "    if event in ('os.mkdir', 'os.rename', 'os.remove', 'os.link', 'os.utime', 'os.chmod', 'os.truncate'):\n"
        "        assert not str(arguments[0]).startswith(sys.argv[1]), (event, arguments)\n"
        "sys.addaudithook(guard)\n"
        "from hsstore import cli\n"
        "sys.exit(cli.run(['verify', 'manifest', sys.argv[1], '--full']))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(store_path)], capture_output=True, text=True)
    assert (done.returncode, "Error" in done.stderr) == (0, False), done.stderr
    shutil.rmtree(store_path / "index")
    done = subprocess.run([sys.executable, "-c", code, str(store_path)], capture_output=True, text=True)
    assert done.returncode == 3, done.stderr


def test_verification_in_a_forked_child_works(store_path: Path) -> None:
    assert list(Verifier(store_path, "full", Options(jobs=4)).findings()) == []
    child = os.fork()
    if child == 0:
        os._exit(len(list(Verifier(store_path, "full", Options(jobs=4)).findings())))
    assert os.waitpid(child, 0)[1] == 0
