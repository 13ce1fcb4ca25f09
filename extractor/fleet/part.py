"""Which shards of a layout one of n processes takes: part i of n has the shards whose number is i modulo n.

Pure: the variables of SLURM and torchrun are arguments, and are looked at only when the user says so. Leaves to
`extractor.run` what a part is for, to leases that two processes with the same part share it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hsstore.errors import UsageError

SOURCES = ("auto", "slurm", "torchrun")
_HINT = "give --shard i/n by hand: 0/n on the first of n processes, (n-1)/n on the last"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The i-th of n parts."""

    index: int
    """Counted from 0."""
    count: int

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    def holds(self, shard: int) -> bool:
        return shard % self.count == self.index

    def of(self, shards: Iterable[int]) -> list[int]:
        """Those of the shards that are in this part, in their order."""
        return [shard for shard in shards if self.holds(shard)]


def parse_part(text: str, environment: Mapping[str, str]) -> Part:
    """`3/8`, or where to take it from: `slurm`, `torchrun`, `auto` (whichever is there).

    Raises `UsageError` for anything else, and for variables that are missing or make no part.
    """
    match text:
        case "slurm":
            return _of_slurm(environment)
        case "torchrun":
            return _of_torchrun(environment)
        case "auto":
            return _of_either(environment)
    found = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", text)
    if found is None:
        raise UsageError(f"--shard takes i/n such as 0/8, or {', '.join(SOURCES)}; found {text!r}", hint=_HINT)
    return _part(int(found[1]), int(found[2]), f"--shard {text}")


def _part(index: int, count: int, source: str) -> Part:
    if count < 1:
        raise UsageError(f"{source}: there must be at least one part", hint=_HINT)
    if not 0 <= index < count:
        raise UsageError(f"{source}: parts of {count} are 0/{count} to {count - 1}/{count}", hint=_HINT)
    return Part(index=index, count=count)


def _of_either(environment: Mapping[str, str]) -> Part:
    torchrun = "RANK" in environment and "WORLD_SIZE" in environment
    array = "SLURM_ARRAY_TASK_ID" in environment
    if torchrun and array:
        raise UsageError(
            "--shard auto: both RANK and SLURM_ARRAY_TASK_ID are set", hint="say which: --shard torchrun or slurm"
        )
    if torchrun:  # inside srun it is the inner of the two, and the one that started this process
        return _of_torchrun(environment)
    if array or "SLURM_PROCID" in environment:
        return _of_slurm(environment)
    raise UsageError(
        "--shard auto: neither SLURM_ARRAY_TASK_ID, SLURM_PROCID nor RANK and WORLD_SIZE are set", hint=_HINT
    )


def _of_torchrun(environment: Mapping[str, str]) -> Part:
    rank, world = (_number(environment, name, "torchrun") for name in ("RANK", "WORLD_SIZE"))
    return _part(rank, world, f"--shard torchrun: RANK={rank}, WORLD_SIZE={world}")


def _of_slurm(environment: Mapping[str, str]) -> Part:
    """A task of an array, a task of a step, or the tasks of a step in each task of an array."""
    step = _of_step(environment)
    if "SLURM_ARRAY_TASK_ID" not in environment:
        if step is None:
            _number(environment, "SLURM_PROCID", "slurm")
            tasks = _number(environment, "SLURM_NTASKS", "slurm")
            if tasks > 1:
                raise UsageError(
                    f"--shard slurm: the job has {tasks} tasks, but this process was not started by srun: nobody would"
                    " take the parts of the other tasks",
                    hint="start it with srun, or use a job array",
                )
            return Part(index=0, count=1)
        return step
    array = _of_array(environment)
    if step is None:
        return array
    return Part(index=array.index * step.count + step.index, count=array.count * step.count)


def _of_array(environment: Mapping[str, str]) -> Part:
    number, count, first = (
        _number(environment, f"SLURM_ARRAY_TASK_{name}", "slurm") for name in ("ID", "COUNT", "MIN")
    )
    stride = _number(environment, "SLURM_ARRAY_TASK_STEP", "slurm") if "SLURM_ARRAY_TASK_STEP" in environment else 1
    index, rest = divmod(number - first, max(1, stride))
    if rest or not 0 <= index < count:
        raise UsageError(
            f"--shard slurm: task {number} of an array of {count} that begins with {first} has no place in it: an array"
            " with gaps does not say which of its tasks this is",
            hint=f"submit --array=0-{max(count, 1) - 1}; any array of any size may finish what another began",
        )
    return Part(index=index, count=count)


def _of_step(environment: Mapping[str, str]) -> Part | None:
    """Of the tasks that one srun started; None outside of srun."""
    if "SLURM_STEP_ID" not in environment or "SLURM_PROCID" not in environment:
        return None
    name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environment else "SLURM_NTASKS"
    index, count = _number(environment, "SLURM_PROCID", "slurm"), _number(environment, name, "slurm")
    return _part(index, count, f"--shard slurm: SLURM_PROCID={index}, {name}={count}")


def _number(environment: Mapping[str, str], name: str, source: str) -> int:
    text = environment.get(name)
    if text is None:
        raise UsageError(f"--shard {source}: {name} is not set", hint=_HINT)
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise UsageError(f"--shard {source}: {name} should be a number, found {text!r}", hint=_HINT)
    return int(text)
