"""Bad files are counted by reason and named, never run, never the end of an import; and the sum comes out."""

from __future__ import annotations

import gzip
import io
import json
import os
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from extractor.foreign import pickles
from extractor.foreign.reasons import REASONS, Rejected
from hsstore.cli import run
from hsstore.store import Store
from hsstore.verify import Verifier
from tests.extractor.foreign import data

Change = Callable[[dict[str, Any]], None]


def import_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    """Exit code and document of an import."""
    capsys.readouterr()
    code = run(["import", *arguments, *data.MODEL, "--json", "--quiet"])
    return code, json.loads(capsys.readouterr().out)


def drop(name: str) -> Change:
    return lambda entries: entries.pop(name)  # type: ignore[no-any-return]


def put(name: str, make: Callable[[Any], Any]) -> Change:
    def change(entries: dict[str, Any]) -> None:
        entries[name] = make(entries[name])

    return change


def set_at(value: float, row: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def make(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.clone()
        tensor[..., row] = value
        return tensor

    return make


CHANGES: list[tuple[str, str, Change]] = [
    ("missing_tensor", "skipped", drop("aux_hidden_state")),
    ("missing_tensor", "skipped", drop("input_ids")),
    ("wrong_type", "skipped", put("hidden_state", lambda t: t.tolist())),
    ("wrong_type", "skipped", put("hidden_state", lambda t: t[0].to_sparse())),
    ("wrong_shape", "skipped", put("hidden_state", lambda t: t.reshape(-1))),
    ("wrong_shape", "skipped", put("hidden_state", lambda t: t[:, :1].expand(1, 1 << 40, t.shape[2]))),
    ("wrong_shape", "skipped", put("input_ids", lambda t: t.reshape(3, -1))),
    ("wrong_dtype", "skipped", put("hidden_state", lambda t: t.to(torch.float16))),
    ("wrong_dtype", "skipped", put("input_ids", lambda t: t.to(torch.float32))),
    ("wrong_width", "skipped", put("aux_hidden_state", lambda t: t[..., :-1])),
    ("wrong_width", "skipped", put("aux_hidden_state", lambda t: t[..., : 2 * data.HIDDEN])),
    ("length_mismatch", "skipped", put("hidden_state", lambda t: t[:, 1:])),
    ("length_mismatch", "skipped", put("loss_mask", lambda t: t[1:])),
    ("length_mismatch", "skipped", put("input_ids", lambda t: torch.cat([t, t[:1]]))),
    ("too_short", "skipped", lambda e: e.update({k: v[:1] if v.dim() == 1 else v[:, :1] for k, v in e.items()})),
    ("too_short", "skipped", lambda e: e.update({k: v[:0] if v.dim() == 1 else v[:, :0] for k, v in e.items()})),
    ("ids_outside_vocabulary", "skipped", put("input_ids", set_at(-1, 2))),
    ("ids_outside_vocabulary", "skipped", put("input_ids", set_at(data.VOCAB, 2))),
    ("ids_outside_vocabulary", "skipped", put("input_ids", set_at(1 << 40, 2))),
    ("bad_mask", "skipped", put("loss_mask", set_at(2, 0))),
    ("not_finite", "failed", put("hidden_state", set_at(float("inf"), 1))),
    ("not_finite", "failed", put("aux_hidden_state", set_at(float("nan"), -1))),
]


def test_every_kind_of_damage_is_named_and_the_rest_is_imported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One file for each kind, among sound ones; the store that results is whole."""
    n = len(CHANGES)
    samples = data.make_samples([9] * (n + 3))
    root = tmp_path / "x"
    data.write_specforge(root, samples)
    for i, (_, _, change) in enumerate(CHANGES):
        path = root / "rows_0-2000" / f"data_{i}.ckpt"
        entries = torch.load(path, weights_only=True)
        change(entries)
        torch.save(entries, path)
    code, outcome = import_json(capsys, "specforge", str(root), "--out", str(tmp_path / "b"))
    assert code == 4
    expected = Counter(reason for reason, _, _ in CHANGES)
    assert outcome["rejected"] == dict(sorted(expected.items()))
    assert outcome["read"] == outcome["written"] + outcome["failed"] + outcome["skipped"] == n + 3
    assert outcome["written"] == 3
    listed = {row["file"]: (row["reason"], row["status"]) for row in data.failures(tmp_path / "b")}
    assert listed == {f"rows_0-2000/data_{i}.ckpt": (reason, status) for i, (reason, status, _) in enumerate(CHANGES)}
    verifier = Verifier(tmp_path / "b", "full")
    assert not [f for f in verifier.findings() if f.severity == "damage"]
    with Store.open(tmp_path / "b") as store:
        sound = [i for i in range(len(store.index)) if not int(store.index.flags[i])]
        for i, sample in zip(sound, samples[n:], strict=True):
            np.testing.assert_array_equal(store.hidden(i, "final"), sample.states["final"])


class Bomb:
    """Touches a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("packed", [False, True])
def test_a_malicious_pickle_does_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str], packed: bool) -> None:
    import pickle

    target = tmp_path / "it-ran"
    root = tmp_path / "x"
    data.write_specforge(root, data.make_samples([9, 9, 9, 9]), packed=packed)
    group, suffix = root / "rows_0-2000", ".ckpt.gz" if packed else ".ckpt"
    buffer = io.BytesIO()
    torch.save({"input_ids": Bomb(target)}, buffer)
    plain = pickle.dumps({"input_ids": Bomb(target)})
    for i, body in enumerate((buffer.getvalue(), plain)):
        (group / f"data_{i}{suffix}").write_bytes(gzip.compress(body) if packed else body)
    torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)  # the bomb is a real one
    assert target.exists()
    target.unlink()
    code, outcome = import_json(capsys, "specforge", str(root), "--out", str(tmp_path / "b"))
    assert code == 4
    assert not target.exists()
    assert outcome["rejected"] == {"unsafe": 2}
    assert outcome["written"] == 2


def test_a_flipped_bit_of_a_state_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """torch.load takes such a file without a word; the checksum inside it does not."""
    samples = data.make_samples([40, 41, 42])
    root = tmp_path / "x"
    data.write_specforge(root, samples)
    path = root / "rows_0-2000" / "data_1.ckpt"
    body = bytearray(path.read_bytes())
    needle = samples[1].states["final"].tobytes()
    at = bytes(body).index(needle[:64])
    body[at + 13] ^= 4
    path.write_bytes(body)
    assert torch.load(path, weights_only=True)["hidden_state"].shape == (1, 41, data.HIDDEN)
    code, outcome = import_json(capsys, "specforge", str(root), "--out", str(tmp_path / "b"))
    assert code == 4
    assert outcome["rejected"] == {"damaged": 1}
    assert outcome["failed"] == 1
    (row,) = data.failures(tmp_path / "b")
    assert row["file"] == "rows_0-2000/data_1.ckpt"
    assert "checksum" in row["detail"]


def test_files_without_checksums_are_taken_and_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """torch can be told to write none: that is no damage, but it is no check either."""
    samples = data.make_samples([9, 10])
    torch.serialization.set_crc32_options(False)
    try:
        data.write_specforge(tmp_path / "x", samples)
    finally:
        torch.serialization.set_crc32_options(True)
    assert run(["import", "specforge", str(tmp_path / "x"), "--out", str(tmp_path / "b"), *data.MODEL]) == 0
    assert "2 files carry no checksums" in capsys.readouterr().err
    with Store.open(tmp_path / "b") as store:
        data.assert_same(store, samples)


@pytest.mark.parametrize("kind", ["ckpt", "gz", "legacy"])
def test_no_cut_and_no_noise_gives_anything_but_a_reason(tmp_path: Path, kind: str) -> None:
    """Cut at many places, and with random bytes: a file loads whole and equal, or is rejected with a known reason."""
    (sample,) = data.make_samples([9])
    good = {"input_ids": data.long(sample.input_ids), "hidden_state": data.bf16(sample.states["final"])}
    buffer = io.BytesIO()
    torch.save(good, buffer, _use_new_zipfile_serialization=kind != "legacy")
    body = gzip.compress(buffer.getvalue()) if kind == "gz" else buffer.getvalue()
    rng = np.random.default_rng(0)
    path = tmp_path / f"a.{'ckpt.gz' if kind == 'gz' else 'ckpt'}"
    reasons: Counter[str] = Counter()
    for cut in [0, 1, 2, 3, 10, *rng.integers(4, len(body), 60).tolist()]:
        reasons[outcome_of(path, body[:cut], good)] += 1
    assert reasons.total() == 65
    assert reasons["loaded"] == 0
    for _ in range(150):
        noisy = bytearray(body)
        for at in rng.integers(0, len(body), 3).tolist():
            noisy[at] ^= int(rng.integers(1, 256))
        reasons[outcome_of(path, bytes(noisy), good)] += 1
    assert set(reasons) <= {*REASONS, "loaded"}
    assert reasons["damaged"] > 100 or kind == "legacy"  # that format carries no checksums at all


def outcome_of(path: Path, body: bytes, good: dict[str, torch.Tensor]) -> str:
    """`loaded` when the file loads (equal to the good one, where it has checksums), else the reason."""
    path.write_bytes(body)
    try:
        entries, _, unchecked = pickles.load(path, whole=True)
    except Rejected as rejected:
        return rejected.reason
    if not unchecked:
        assert entries.keys() == good.keys()
        assert all(torch.equal(entries[k].view(torch.uint8), good[k].view(torch.uint8)) for k in good)
    return "loaded"


def test_a_small_file_that_unpacks_to_anything_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pickles, "LARGEST_UNPACKED", 1 << 20)
    path = tmp_path / "a.ckpt.gz"
    path.write_bytes(gzip.compress(bytes(2 << 20)))
    with pytest.raises(Rejected) as caught:
        pickles.load(path, whole=False)
    assert caught.value.reason == "damaged"


def test_nothing_usable_ends_with_the_reasons(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tmp_path / "x"
    data.write_specforge(root, data.make_samples([9, 9]))
    for path in root.rglob("*.ckpt"):
        path.write_bytes(path.read_bytes()[:100])
    assert run(["import", "specforge", str(root), "--out", str(tmp_path / "b"), *data.MODEL]) == 2
    err = capsys.readouterr().err
    assert "damaged 2" in err
    assert "data_0.ckpt" in err
    assert not (tmp_path / "b").exists()


def test_bad_lines_of_a_torchspec_manifest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No JSON, no file, a path that leads out, an id twice, a file of another sample, no mask."""
    root = tmp_path / "x"
    samples = data.make_samples([9] * 5)
    data.write_torchspec(root, samples, prenorm=False)
    rows = [json.loads(line) for line in (root / "manifest.jsonl").read_text().splitlines()]
    (tmp_path / "outside.pt").write_bytes((root / rows[0]["file"]).read_bytes())
    swapped = {**rows[1], "file": rows[2]["file"]}
    record = torch.load(root / rows[3]["file"], weights_only=True)
    torch.save(record | {"packed_loss_mask": None}, root / rows[3]["file"])
    lines = [
        json.dumps(rows[0]),
        "{nonsense",
        json.dumps({"split": "train", "data_id": "x"}),
        json.dumps({"split": "train", "data_id": "y", "file": "../outside.pt"}),
        json.dumps(rows[0]),
        json.dumps(swapped),
        json.dumps(rows[3]),
        json.dumps({**rows[2], "file": "samples/not-there.pt"}),
    ]
    (root / "manifest.jsonl").write_text("\n".join(lines) + "\n")
    code, outcome = import_json(capsys, "torchspec", str(root), "--out", str(tmp_path / "b"))
    assert code == 4
    assert outcome["rejected"] == {
        "bad_line": 3, "duplicate": 1, "label_differs": 1, "no_mask": 1, "unreadable": 1
    }  # fmt: skip
    assert (outcome["read"], outcome["written"]) == (8, 1)


def test_two_files_of_one_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """data_0.ckpt and data_0.ckpt.gz: the first is taken, the other named."""
    root = tmp_path / "x"
    samples = data.make_samples([9, 8])
    data.write_specforge(root, samples)
    data.write_specforge(root, samples[:1], packed=True)
    code, outcome = import_json(capsys, "specforge", str(root), "--out", str(tmp_path / "b"))
    assert code == 4
    assert outcome["rejected"] == {"duplicate": 1}
    assert outcome["written"] == 2


def test_states_of_other_widths_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a model most files decide which width is meant, even when the first one differs."""
    root = tmp_path / "x"
    data.write_specforge(root, data.make_samples([9, 8, 7]))
    data.write_specforge(tmp_path / "y", data.make_samples([9], hidden=16))
    (tmp_path / "y" / "rows_0-2000" / "data_0.ckpt").replace(root / "rows_0-2000" / "data_0.ckpt")
    code, outcome = import_json(capsys, "specforge", str(root), "--out", str(tmp_path / "b"))
    assert code == 4
    assert outcome["rejected"] == {"wrong_width": 1}
    assert outcome["written"] == 2


def test_cast_rounds_other_floats_as_torch_does(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    (sample,) = data.make_samples([9])
    root = tmp_path / "x"
    data.write_specforge(root, [sample])
    path = root / "rows_0-2000" / "data_0.ckpt"
    entries = torch.load(path, weights_only=True)
    final = torch.from_numpy(rng.standard_normal((1, 9, data.HIDDEN)).astype(np.float32))
    torch.save(entries | {"hidden_state": final}, path)
    arguments = ["import", "specforge", str(root), *data.MODEL]
    assert run([*arguments, "--out", str(tmp_path / "a")]) == 2
    assert run([*arguments, "--out", str(tmp_path / "b"), "--cast"]) == 0
    with Store.open(tmp_path / "b") as store:
        stored = torch.from_numpy(store.hidden(0, "final").view(np.int16).copy())
        assert torch.equal(stored, final[0].to(torch.bfloat16).view(torch.int16))
        assert store.capture.flags["import.cast"] == "to bfloat16"


def test_the_archive_that_torch_writes_is_the_one_that_is_checked(tmp_path: Path) -> None:
    """Every tensor is a stored member with a CRC-32: what `check_archive` rests on."""
    data.write_specforge(tmp_path, data.make_samples([9]))
    (path,) = tmp_path.rglob("*.ckpt")
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
    assert len([m for m in members if "/data/" in m.filename and m.CRC and m.compress_type == zipfile.ZIP_STORED]) == 4


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ["data_1.ckpt", "data_1.ckpt.gz"])
def test_a_fifo_among_the_inputs_is_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    data.write_specforge(tmp_path / "x", data.make_samples([5, 6]))
    (tmp_path / "x/rows_0-2000/data_1.ckpt").unlink()
    os.mkfifo(tmp_path / "x/rows_0-2000" / name)
    code, outcome = import_json(capsys, "specforge", str(tmp_path / "x"), "--out", str(tmp_path / "b"))
    assert (code, outcome["rejected"]) == (4, {"no_plain_file": 1})


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ["dataset.json", "manifest.jsonl"])
def test_a_fifo_for_a_document_of_torchspec_is_refused(tmp_path: Path, name: str) -> None:
    data.write_torchspec(tmp_path / "x", data.make_samples([5, 6]), prenorm=True)
    (tmp_path / "x" / name).unlink()
    os.mkfifo(tmp_path / "x" / name)
    assert run(["import", "torchspec", str(tmp_path / "x"), "--out", str(tmp_path / "b"), *data.MODEL]) == 2


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ["data_config.json", "data_1.pt"])
def test_a_fifo_for_a_file_of_speculators_is_refused_or_counted(tmp_path: Path, name: str) -> None:
    data.write_speculators_pt(tmp_path / "x", data.make_samples([5, 6]))
    (tmp_path / "x" / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / "x" / name)
    code = run(["import", "speculators", str(tmp_path / "x"), "--out", str(tmp_path / "b"), *data.MODEL])
    assert code == (2 if name.endswith(".json") else 4)
