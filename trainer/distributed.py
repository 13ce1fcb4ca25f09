"""The ranks of a run and the few things they say to each other besides gradients.

Responsible for: joining and leaving the process group, the device of this rank, small exact sums over all ranks.
Leaves gradients to DDP and starting the processes to `launch`.

Counts and metrics travel as CPU tensors over gloo, also where gradients go over nccl: they cost no GPU
synchronisation. Floats are gathered and added in rank order, so a sum does not depend on how a ring was cut.

Letters: W ranks.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from hsstore.errors import UsageError

T = TypeVar("T")
TIMEOUT = timedelta(minutes=30)  # saving 14 GB to a slow disk, or one rank's first read, may take long


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """This process among the W of the run."""

    rank: int
    world: int
    """W."""
    device: torch.device

    @property
    def first(self) -> bool:
        return self.rank == 0

    def sum(self, values: Sequence[int]) -> list[int]:
        """Elementwise over all ranks."""
        if self.world == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.int64)
        dist.all_reduce(tensor)
        return [int(v) for v in tensor.tolist()]

    def sum_floats(self, values: Sequence[float]) -> list[float]:
        """Elementwise over all ranks, in rank order: the same bits whatever the ring does."""
        if self.world == 1:
            return list(values)
        mine = torch.tensor(values, dtype=torch.float64)
        all_ = [torch.empty_like(mine) for _ in range(self.world)]
        dist.all_gather(all_, mine)
        return [float(v) for v in torch.stack(all_).cumsum(0)[-1].tolist()]

    def share(self, value: T) -> T:
        """Rank 0's value, on every rank."""
        if self.world == 1:
            return value
        box: list[Any] = [value if self.first else None]
        dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        shared: T = box[0]
        return shared

    def barrier(self) -> None:
        self.sum([0])


def join(environment: Mapping[str, str], device: str) -> Ranks:
    """Take this process's place: from RANK, WORLD_SIZE, LOCAL_RANK as torchrun sets them, else alone."""
    rank, world = int(environment.get("RANK", 0)), int(environment.get("WORLD_SIZE", 1))
    local = int(environment.get("LOCAL_RANK", rank))
    place = _device(device, local)
    if world > 1:
        backend = "cpu:gloo,cuda:nccl" if place.type == "cuda" else "gloo"
        init = environment.get("HSSTORE_RENDEZVOUS", "env://")
        dist.init_process_group(backend, init_method=init, rank=rank, world_size=world, timeout=TIMEOUT)
    return Ranks(rank=rank, world=world, device=place)


def leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def use_threads(threads: int | None, world: int) -> int:
    """Fix the CPU threads of this rank: the order of a sum, hence its last bit, depends on their number."""
    local_world = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    count = threads or max(1, len(os.sched_getaffinity(0)) // local_world)
    torch.set_num_threads(count)
    return count


def deterministic(device: torch.device) -> None:
    """Choose the kernels whose result does not depend on timing, where torch has them."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=device.type == "cuda")
    # Nothing here reads memory it has not written.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def _device(wanted: str, local: int) -> torch.device:
    cards = torch.cuda.device_count() if wanted != "cpu" else 0
    if wanted == "cpu" or (wanted == "auto" and cards == 0):
        return torch.device("cpu")
    if local >= cards:
        raise UsageError(
            f"rank {local} of this machine has no GPU: {cards} visible",
            hint="use --nproc at most that, or --device cpu",
        )
    torch.cuda.set_device(local)
    return torch.device("cuda", local)
