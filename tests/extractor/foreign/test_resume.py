"""Stopped and gone on with: an import and an export end as if they had never been stopped, or refuse."""

from __future__ import annotations

import builtins
import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from extractor.foreign import exporting, files
from extractor.foreign.copying import ShardCopier
from hsstore import zarrmeta
from hsstore.cli import run
from hsstore.store import Store
from tests.extractor.foreign import data

LENGTHS = [200, 150, 90, 255, 180, 60, 222, 130, 250, 99, 170, 140]


def interrupted_at(monkeypatch: pytest.MonkeyPatch, owner: type | object, name: str, n: int) -> None:
    """Let the n-th call of `owner.name` be Ctrl-C."""
    real, calls = getattr(owner, name), []

    def call(*args: object, **kwargs: object) -> object:
        calls.append(1)
        if len(calls) == n:
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, name, call)


def test_a_stopped_import_ends_as_one_never_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    samples = data.make_samples(LENGTHS)
    data.write_specforge(tmp_path / "x", samples)
    arguments = ["import", "specforge", str(tmp_path / "x"), *data.MODEL, "--shard-rows", "512"]
    assert run([*arguments, "--out", str(tmp_path / "whole")]) == 0
    with monkeypatch.context() as patch:
        interrupted_at(patch, ShardCopier, "_states", 8)
        assert run([*arguments, "--out", str(tmp_path / "b")]) == 130
    assert "--resume" in capsys.readouterr().err
    assert 0 < len(list((tmp_path / "b" / "records").iterdir())) < 4
    assert not list((tmp_path / "b" / "staging").iterdir())
    assert run([*arguments, "--out", str(tmp_path / "b")]) == 2  # not without --resume
    assert run([*arguments, "--out", str(tmp_path / "b"), "--resume"]) == 0
    assert run([*arguments, "--out", str(tmp_path / "b"), "--resume"]) == 0
    with Store.open(tmp_path / "whole") as whole, Store.open(tmp_path / "b") as back:
        data.assert_same(back, samples)
        assert back.manifest_id == whole.manifest_id
        assert len(back.manifest.shards) > 3


@pytest.mark.parametrize("call", range(9))
def test_a_lack_of_descriptors_stops_an_import_instead_of_leaving_samples_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], call: int
) -> None:
    """Counted as damage of the file it would be a hole for ever: the layout is fixed when the import begins."""
    samples = data.make_samples([9, 8, 7, 12])
    data.write_specforge(tmp_path / "x", samples)
    arguments = ["import", "specforge", str(tmp_path / "x"), *data.MODEL, "--out", str(tmp_path / "b"), "--resume"]
    hits = []
    with monkeypatch.context() as patch:
        for owner, name in ((os, "open"), (builtins, "open")):
            patch.setattr(owner, name, failing(getattr(owner, name), hits, call))
        code = run(arguments)
    assert code == (1 if len(hits) > call else 0)
    if code:
        assert "too many open files" in capsys.readouterr().err
    assert code or len(hits) > 4, "the file was not opened by its name"
    assert run(arguments) == 0
    with Store.open(tmp_path / "b") as back:
        data.assert_same(back, samples)


def failing(real: Callable[..., object], hits: list[int], n: int) -> Callable[..., object]:
    """`open`, whose n-th call on data_2.ckpt finds no descriptor free."""

    def call(path: object, *args: object, **kwargs: object) -> object:
        if str(path).endswith("data_2.ckpt"):
            hits.append(1)
            if len(hits) == n + 1:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))
        return real(path, *args, **kwargs)

    return call


def test_another_directory_or_other_options_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Everything that would mix two imports is named."""
    samples = data.make_samples([9, 8, 7])
    data.write_specforge(tmp_path / "x", samples)
    arguments = ["import", "specforge", str(tmp_path / "x"), "--out", str(tmp_path / "b"), *data.MODEL]
    assert run(arguments) == 0
    again = [*arguments, "--resume"]
    assert run([*again, "--layers", "1,2,3"]) == 2
    assert "layers: after_2,after_4,after_5,final → after_1,after_2,after_3,final" in capsys.readouterr().err
    assert run([*again, "--split-salt", "other"]) == 2
    assert "--split-salt: hsstore → other" in capsys.readouterr().err
    data.write_specforge(tmp_path / "x", data.make_samples([9, 8, 7], seed=1))
    assert run(again) == 2
    assert "files: those of x" in capsys.readouterr().err


def test_a_file_that_changes_under_the_import_fails_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the passes one file gets other ids, one vanishes: both are named, the rest is whole."""
    samples = data.make_samples([9, 8, 7, 6])
    data.write_specforge(tmp_path / "x", samples)
    group = tmp_path / "x" / "rows_0-2000"
    real = ShardCopier.copy

    def copy(self: ShardCopier, *args: object) -> object:
        entries = torch.load(group / "data_1.ckpt", weights_only=True)
        entries["input_ids"][2] += 1
        torch.save(entries, group / "data_1.ckpt")
        (group / "data_2.ckpt").unlink()
        return real(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(ShardCopier, "copy", copy)
    assert run(["import", "specforge", str(tmp_path / "x"), "--out", str(tmp_path / "b"), *data.MODEL]) == 4
    assert [(r["file"], r["status"], r["reason"]) for r in data.failures(tmp_path / "b")] == [
        ("rows_0-2000/data_1.ckpt", "failed", "changed"),
        ("rows_0-2000/data_2.ckpt", "failed", "unreadable"),
    ]
    with Store.open(tmp_path / "b") as store:
        assert store.index.flags.tolist() == [0, 1, 1, 0]


@pytest.mark.parametrize(("target", "norm"), data.CASES)
def test_a_stopped_export_ends_as_one_never_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str, norm: str
) -> None:
    """Equal files under equal names; those that were there are not written again, and none is half there."""
    data.make_store(tmp_path / "a", norm, data.make_samples()).close()
    arguments = ["export", target, str(tmp_path / "a")]
    assert run([*arguments, "--out", str(tmp_path / "whole")]) == 0
    with monkeypatch.context() as patch:
        interrupted_at(patch, exporting, "write_whole", 4)
        assert run([*arguments, "--out", str(tmp_path / "x")]) == 130
    written = {p: p.stat().st_ino for p in (tmp_path / "x").rglob("*") if p.is_file()}
    assert len(written) == 4  # three samples and the record
    assert run([*arguments, "--out", str(tmp_path / "x")]) == 0
    assert all(p.stat().st_ino == inode for p, inode in written.items())
    names = {p.relative_to(tmp_path / "whole") for p in (tmp_path / "whole").rglob("*") if p.is_file()}
    assert {p.relative_to(tmp_path / "x") for p in (tmp_path / "x").rglob("*") if p.is_file()} == names
    for name in names:
        if name.suffix != ".json" and name.suffix != ".arrow":
            assert (tmp_path / "x" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name


def test_what_a_killed_export_left_goes_when_it_is_ended(tmp_path: Path) -> None:
    """Files that never got their name, and only those that were there before."""
    data.make_store(tmp_path / "a", "pre", data.make_samples()).close()
    arguments = ["export", "speculators", str(tmp_path / "a"), "--out", str(tmp_path / "x")]
    assert run(arguments) == 0
    old = tmp_path / "x" / "hidden_states" / f".hs_0.safetensors.{'0' * 16}.tmp"
    young = old.with_name(f".hs_1.safetensors.{'0' * 16}.tmp")
    work = tmp_path / "x" / ".dataset.abc"
    work.mkdir()
    for path in (old, young, work / "rows.arrow"):
        path.write_text("half")
    for path, when in ((old, 1), (work, 1), (young, 2**33)):
        os.utime(path, (when, when))
    assert run(arguments) == 0
    assert [p.exists() for p in (old, work, young)] == [False, False, True]
    assert (tmp_path / "x" / "state.json").exists()


def test_an_error_of_the_disk_leaves_whole_files_and_the_same_command_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    samples = data.make_samples()
    data.make_store(tmp_path / "a", "post", samples).close()
    arguments = ["export", "specforge", str(tmp_path / "a"), "--out", str(tmp_path / "x")]
    real, calls = os.fsync, []

    def fsync(fd: int) -> None:
        calls.append(fd)
        if len(calls) == 9:
            raise OSError(28, "No space left on device")
        real(fd)

    with monkeypatch.context() as patch:
        patch.setattr(files.os, "fsync", fsync)
        assert run(arguments) == 4
    assert "no space" in capsys.readouterr().err
    assert not [p for p in (tmp_path / "x").rglob("*") if p.name.endswith(".tmp")]
    assert run(arguments) == 0
    assert run(["import", "specforge", str(tmp_path / "x"), "--out", str(tmp_path / "b")]) == 0
    with Store.open(tmp_path / "b") as back:
        data.assert_same(back, samples)


def test_an_export_into_something_else_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data.make_store(tmp_path / "a", "post", data.make_samples()).close()
    data.make_store(tmp_path / "other", "post", data.make_samples(seed=1)).close()
    export = ["export", "specforge", str(tmp_path / "a"), "--out"]
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    assert run([*export, str(tmp_path / "full")]) == 2
    assert "holds something else" in capsys.readouterr().err
    assert run([*export, str(tmp_path / "full" / "notes.txt")]) == 2
    assert run([*export, str(tmp_path / "a" / "x")]) == 2
    assert run([*export, str(tmp_path / "x")]) == 0
    capsys.readouterr()
    assert run([*export, str(tmp_path / "x"), "--limit", "2"]) == 2
    assert "--limit none → 2" in capsys.readouterr().err
    assert run(["export", "modelopt", str(tmp_path / "a"), "--out", str(tmp_path / "x")]) == 2
    assert "format specforge → modelopt" in capsys.readouterr().err
    assert run(["export", "specforge", str(tmp_path / "other"), "--out", str(tmp_path / "x")]) == 2
    assert "manifest" in capsys.readouterr().err
    assert sorted(p.name for p in (tmp_path / "full").iterdir()) == ["notes.txt"]


def test_damaged_samples_of_a_store_are_not_spread(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One flipped bit: the samples in its block are left out and named, exit code 3; the others are exported."""
    samples = data.make_samples([16, 16, 16, 16])
    with data.make_store(tmp_path / "a", "post", samples) as store:
        spec, columns = store.header.array("hidden/after_4"), store.index
        file = tmp_path / "a" / zarrmeta.chunk_path(spec, int(columns.shard[2]))
        at = int(columns.row[2]) * spec.row_bytes + 5
    file.chmod(0o644)
    body = bytearray(file.read_bytes())
    body[at] ^= 1
    file.write_bytes(body)
    out = tmp_path / "x"
    assert run(["export", "specforge", str(tmp_path / "a"), "--out", str(out)]) == 3
    assert "written 3 + kept 0 + failed 0 + damaged 1 = asked 4" in capsys.readouterr().out
    assert sorted(p.name for p in out.rglob("*.ckpt")) == ["data_0.ckpt", "data_1.ckpt", "data_3.ckpt"]
    assert [row["file"] for row in data.failures(out)] == ["sample 2"]
