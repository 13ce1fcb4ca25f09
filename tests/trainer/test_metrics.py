"""Sums before quotients, and a JSONL file that a resumed run can go on with."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from trainer.distributed import Ranks
from trainer.metrics import JsonLines, acceptance_length, add, console_line, names, over_ranks

ALONE = Ranks(rank=0, world=1, device=torch.device("cpu"))


def test_a_mean_is_over_rows_and_not_over_batches() -> None:
    """3 of 4 right and 0 of 96 right are 3 %, not the mean of 75 % and 0 %."""
    sums: dict[str, tuple[float, float]] = {}
    add(sums, {"full_acc_0": (3.0, 4.0)})
    add(sums, {"full_acc_0": (0.0, 96.0)})
    assert over_ranks(sums, ALONE, ["full_acc_0"]) == {"full_acc_0": 0.03}


def test_what_was_never_counted_is_no_number() -> None:
    ratios = over_ranks({"loss_0": (0.0, 0.0)}, ALONE, ["loss_0", "cond_acc_1"])
    assert all(math.isnan(value) for value in ratios.values())


def test_acceptance_is_one_plus_all_right_so_far() -> None:
    ratios = dict.fromkeys(names(3), 0.0) | {"full_acc_0": 0.5, "full_acc_1": 0.25, "full_acc_2": 0.125}
    assert acceptance_length(ratios, 3) == 1.875
    assert console_line(ratios | {"cond_acc_2": math.nan}, 3).endswith("cond_acc_2 – · accept 1.88")


def write(path: Path, *documents: dict[str, object]) -> None:
    path.write_text("".join(json.dumps(d) + "\n" for d in documents))


def test_a_resumed_file_is_cut_back_to_the_checkpoint(tmp_path: Path) -> None:
    """Steps that will be made again must not stand there twice."""
    path = tmp_path / "metrics.jsonl"
    write(path, {"step": 0}, {"step": 1}, {"step": 2}, {"step": 2, "kind": "validation"}, {"step": 3})
    lines = JsonLines(path, keep_to_step=2)
    lines.write({"step": 3, "loss": 1.5})
    lines.sync()
    lines.close()
    assert [json.loads(x)["step"] for x in path.read_text().splitlines()] == [0, 1, 2, 2, 3]


@pytest.mark.parametrize("torn", ['{"step": 2, "lo', '{"step": 2}', "\x00\x00", "5\n", '{"x": 1}\n'])
def test_a_torn_last_line_is_dropped(tmp_path: Path, torn: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n' + torn)
    JsonLines(path, keep_to_step=9).close()
    assert path.read_text() == '{"step": 1}\n'


def test_a_new_run_starts_an_empty_file_and_writes_json(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, {"step": 0})
    lines = JsonLines(path, keep_to_step=-1)
    lines.write({"step": 0, "cond_acc_1": math.nan})
    lines.close()
    assert path.read_text() == '{"step": 0, "cond_acc_1": null}\n', "NaN is no JSON"
