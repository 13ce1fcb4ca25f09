"""Parts of a layout: from text, from the variables of batch systems."""

from __future__ import annotations

import pytest

from extractor.fleet.part import Part, parse_part
from hsstore.errors import UsageError

ARRAY = {"SLURM_ARRAY_TASK_ID": "5", "SLURM_ARRAY_TASK_COUNT": "4", "SLURM_ARRAY_TASK_MIN": "3"}
STEP = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "2", "SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "3"}
BATCH = {"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}
TORCHRUN = {"RANK": "7", "WORLD_SIZE": "16"}


@pytest.mark.parametrize("n", [1, 2, 3, 7, 40])
def test_parts_cover_every_shard_once(n: int) -> None:
    """Also when there are more parts than shards: a shard that no part holds would never be extracted."""
    parts = [Part(index=i, count=n) for i in range(n)]
    shards = [*range(10, 37), 99]
    taken = [part.of(shards) for part in parts]
    assert sorted(shard for of_part in taken for shard in of_part) == shards
    assert all(part.holds(shard) for part, of_part in zip(parts, taken, strict=True) for shard in of_part)


@pytest.mark.parametrize(
    ("text", "environment", "expected"),
    [
        ("0/1", {}, "0/1"),
        ("3/8", TORCHRUN | ARRAY, "3/8"),
        ("torchrun", TORCHRUN | ARRAY, "7/16"),
        ("auto", TORCHRUN, "7/16"),
        ("auto", TORCHRUN | STEP, "7/16"),
        ("slurm", TORCHRUN | ARRAY, "2/4"),
        ("auto", ARRAY, "2/4"),
        ("slurm", ARRAY | BATCH, "2/4"),
        ("slurm", ARRAY | {"SLURM_ARRAY_TASK_ID": "9", "SLURM_ARRAY_TASK_STEP": "2"}, "3/4"),
        ("slurm", STEP, "2/3"),
        ("slurm", {k: v for k, v in STEP.items() if k != "SLURM_STEP_NUM_TASKS"}, "2/8"),
        ("slurm", ARRAY | STEP, "8/12"),
        ("auto", BATCH, "0/1"),
    ],
)
def test_where_a_part_comes_from(text: str, environment: dict[str, str], expected: str) -> None:
    """What is written by hand wins; arrays may begin anywhere; an array of steps has count times tasks parts."""
    assert str(parse_part(text, environment)) == expected


@pytest.mark.parametrize(
    ("text", "environment", "said"),
    [
        ("8/8", {}, "0/8 to 7/8"),
        ("0/0", {}, "at least one part"),
        ("1", {}, "i/n such as 0/8"),
        ("-1/4", {}, "i/n such as 0/8"),
        ("a/b", {}, "i/n such as 0/8"),
        ("1/4/2", {}, "i/n such as 0/8"),
        ("", {}, "i/n such as 0/8"),
        ("SLURM", ARRAY, "auto, slurm, torchrun"),
        ("auto", {}, "neither SLURM_ARRAY_TASK_ID"),
        ("auto", {"RANK": "0"}, "neither SLURM_ARRAY_TASK_ID"),
        ("auto", TORCHRUN | ARRAY, "both RANK and SLURM_ARRAY_TASK_ID"),
        ("torchrun", {"RANK": "0"}, "WORLD_SIZE is not set"),
        ("torchrun", {"RANK": "zero", "WORLD_SIZE": "2"}, "RANK should be a number, found 'zero'"),
        ("torchrun", {"RANK": "2", "WORLD_SIZE": "2"}, "0/2 to 1/2"),
        ("slurm", {}, "SLURM_PROCID is not set"),
        ("slurm", {"SLURM_ARRAY_TASK_ID": "1"}, "SLURM_ARRAY_TASK_COUNT is not set"),
        ("slurm", ARRAY | {"SLURM_ARRAY_TASK_ID": "7"}, "with gaps"),
        ("slurm", ARRAY | {"SLURM_ARRAY_TASK_ID": "2"}, "with gaps"),
        ("slurm", ARRAY | {"SLURM_ARRAY_TASK_ID": "4", "SLURM_ARRAY_TASK_STEP": "2"}, "with gaps"),
        ("slurm", {"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, "not started by srun"),
    ],
)
def test_what_makes_no_part_is_refused(text: str, environment: dict[str, str], said: str) -> None:
    """A wrong part would leave shards to nobody, or to two: it must be said before an engine is loaded."""
    with pytest.raises(UsageError, match=said):
        parse_part(text, environment)
