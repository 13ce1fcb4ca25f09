"""How many workers a node takes: pure arithmetic over what nodes have and what a worker needs.

Leaves to Ray where an actor lands when the user gave a number of them, to `supervisor` what becomes of each.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from extractor.fleet.messages import Resources
from hsstore.errors import UsageError

_EPSILON = 1e-6  # Ray counts in ten-thousandths


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A living node of the cluster."""

    id: str
    name: str
    """For people."""
    resources: Mapping[str, float]
    """All that it has, used or not, as Ray counts: CPU, GPU …"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What one worker takes."""

    cpus: float
    gpus: float

    def __str__(self) -> str:
        amounts = ((self.gpus, "GPU"), (self.cpus, "CPU"))
        return " and ".join(f"{n:g} {what}{'' if n == 1 else 's'}" for n, what in amounts if n) or "nothing"


def need_of(resources: Resources, nodes: Iterable[Node]) -> Need:
    """What the user said; else as many GPUs as the engine takes, none in a cluster that has no GPU at all."""
    gpus = resources.gpus
    if gpus is None:
        gpus = float(resources.engine_gpus) if any(n.resources.get("GPU", 0) for n in nodes) else 0.0
    return Need(cpus=resources.cpus, gpus=gpus)


def capacity(node: Node, need: Need) -> int:
    """As many workers as its GPUs are enough for; one where none are needed, since an engine takes a whole CPU."""
    if node.resources.get("CPU", 0) + _EPSILON < need.cpus:
        return 0
    if not need.gpus:
        return 1
    by_gpus = int(node.resources.get("GPU", 0) / need.gpus + _EPSILON)
    return min(by_gpus, int(node.resources["CPU"] / need.cpus + _EPSILON)) if need.cpus else by_gpus


def refuse_too_small(nodes: Iterable[Node], need: Need) -> None:
    """Raise `UsageError` when no node takes a worker."""
    there = list(nodes)
    if any(capacity(node, need) for node in there):
        return
    have = "; ".join(
        f"{n.name}: {n.resources.get('GPU', 0):g} GPUs, {n.resources.get('CPU', 0):g} CPUs" for n in there[:8]
    )
    raise UsageError(
        f"a worker needs {need}, and no node of the Ray cluster has that ({have or 'it has no nodes'})",
        hint="give --ray-gpus-per-actor or --ray-cpus-per-actor, or --ray-actors N to wait for nodes that have it",
    )
