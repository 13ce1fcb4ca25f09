"""Ray, as far as a run needs it: connect, list nodes, start actors, ask them, end them.

The one place of the package that imports it. Leaves what is done with actors to `supervisor`. Lives in a process of its
own (`driver`): Ray prints, installs signal handlers, and ends its process when the cluster goes away.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import tempfile
import time
from typing import Any

import msgspec

from extractor.fleet.actor import FleetActor, Status
from extractor.fleet.places import Need, Node
from extractor.fleet.supervisor import LostActorError
from hsstore.errors import ServiceError, UsageError

_OBJECT_STORE_BYTES = 128 << 20  # states never go through it; Ray's own default is a third of the memory
_ANSWER_SECONDS = 0.2
LOCAL = "local"


class RayCluster:
    """A `supervisor.Cluster` of Ray actors."""

    def __init__(self, address: str, order: bytes) -> None:
        """Raises `UsageError` for an address that Ray does not know, `ServiceError` when nobody answers there."""
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # it would phone home
        if address == LOCAL and "RAY_AUTH_MODE" not in os.environ:
            # Ray itself would write a token into the home directory, and every later cluster of the user would want it.
            os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        import ray

        self._ray, self._order = ray, order
        self._asked: dict[Any, object] = {}
        """Handle by the answer that is on its way."""
        self._directory = ""
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
        if address == LOCAL:
            self._directory = tempfile.mkdtemp(prefix="hsray-", dir="/tmp")  # names of sockets must stay short
            options |= {"include_dashboard": False, "object_store_memory": _OBJECT_STORE_BYTES}
            options |= {"_temp_dir": self._directory}
        if address.startswith("ray://"):
            options = {"logging_level": logging.ERROR}
        try:
            ray.init(address=address, **options)
        except (ConnectionError, RuntimeError, TimeoutError) as error:
            raise ServiceError(
                f"no Ray cluster answers at {address}: {_first_line(error)}",
                hint="look with `ray status --address …`; a cluster with tokens wants RAY_AUTH_MODE=token here, too",
            ) from None
        except ValueError as error:
            raise UsageError(f"--ray {address}: {_first_line(error)}", hint="give auto, HOST:PORT or ray://…") from None
        self._actor = ray.remote(FleetActor)

    def nodes(self) -> list[Node]:
        return [
            Node(
                id=node["NodeID"],
                name=f"{node['NodeManagerHostname']} ({node['NodeID'][:6]})",
                resources=node["Resources"],
            )
            for node in self._ray.nodes()
            if node["Alive"]
        ]

    def start(self, node: str | None, need: Need) -> object:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        where: Any = "SPREAD" if node is None else NodeAffinitySchedulingStrategy(node_id=node, soft=False)
        options = {"num_cpus": need.cpus, "num_gpus": need.gpus, "max_restarts": 0, "scheduling_strategy": where}
        return self._actor.options(**options).remote(self._order)

    def poll(self, handles: list[object], seconds: float) -> list[tuple[object, Status | LostActorError]]:
        asked = {id(handle): handle for handle in self._asked.values()}
        for handle in handles:
            if id(handle) not in asked:
                self._asked[handle.status.remote()] = handle  # type: ignore[attr-defined]
        wanted = {id(handle) for handle in handles}
        self._asked = {ref: handle for ref, handle in self._asked.items() if id(handle) in wanted}
        if not self._asked:
            time.sleep(seconds)
            return []
        time.sleep(seconds)  # those that live answer at once, those that wait for room not at all
        refs = list(self._asked)
        ready, _ = self._ray.wait(refs, num_returns=len(refs), timeout=_ANSWER_SECONDS)
        return [(self._asked.pop(ref), answer) for ref in ready if (answer := self._answer(ref)) is not None]

    def _answer(self, ref: Any) -> Status | LostActorError | None:
        """None when it could not be reached this time."""
        errors = self._ray.exceptions
        try:
            return msgspec.json.decode(self._ray.get(ref), type=Status)
        except errors.ActorUnavailableError:
            return None
        except errors.RayError as error:
            return LostActorError(_reason(error))

    def stop(self, handle: object) -> None:
        handle.stop.remote()  # type: ignore[attr-defined]

    def kill(self, handle: object) -> None:
        self._asked = {ref: other for ref, other in self._asked.items() if other is not handle}
        with contextlib.suppress(self._ray.exceptions.RayError):
            self._ray.kill(handle)

    def close(self) -> None:
        self._ray.shutdown()
        if self._directory:
            shutil.rmtree(self._directory, ignore_errors=True)


def _reason(error: Exception) -> str:
    """What Ray knows of an actor's end, out of the many lines in which it says that."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if "creation task" in str(error):  # then a traceback follows
        return f"it cannot be made: {lines[-1][:500]}"
    cause = next((line for line in lines if line.startswith("The actor is dead because")), "")
    return (cause or _first_line(error))[:500]


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:500] if lines else type(error).__name__
