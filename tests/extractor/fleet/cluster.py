"""A Ray cluster on this machine, in a process of its own: its warnings, handlers and children are not the tests'.

Reads one JSON object a line, answers each with one. Nodes are raylets: the head has no processors, so that no worker
runs on it, as on real clusters. Killing a node kills everything that it started, as a power cut does. Leaves nothing
behind: no process, no session directory.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, Any

PATIENT = {
    # A machine that is busy must not look like one that is dead; a dead one still shows after ten refused calls.
    "RAY_health_check_timeout_ms": "30000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_failure_threshold": "10",
    "RAY_worker_register_timeout_seconds": "300",
    "RAY_agent_register_timeout_ms": "300000",
    "RAY_raylet_start_wait_time_s": "300",
    "RAY_gcs_server_request_timeout_seconds": "300",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_metrics_collection": "0",
}
STORE_BYTES = 80 << 20  # about the least that Ray takes; pages are taken from /dev/shm as they are used


class Nodes:
    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": STORE_BYTES}
        self.cluster = Cluster()
        self.cluster.add_node(wait=False, **head)
        self._await_all()
        self.nodes: dict[str, Any] = {}

    def add(self) -> str:
        node = self.cluster.add_node(wait=False, num_cpus=1, object_store_memory=STORE_BYTES)
        self._await_all()
        name = next(n["NodeID"] for n in self._table() if n["ObjectStoreSocketName"] == node.plasma_store_socket_name)
        self.nodes[name] = node
        return str(name)

    def kill(self, name: str) -> None:
        from ray._private import ray_constants

        node = self.nodes.pop(name)
        raylet = node.all_processes[ray_constants.PROCESS_TYPE_RAYLET][0].process.pid
        for pid in descendants(raylet):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.cluster.remove_node(node, allow_graceful=False)

    def _table(self) -> list[dict[str, Any]]:
        return [n for n in self.cluster.global_state.node_table() if n["Alive"]]

    def _await_all(self) -> None:
        wanted = len(self.cluster.list_all_nodes())
        end = time.monotonic() + 300
        while len(self._table()) < wanted:
            assert time.monotonic() < end, "a node does not come up"
            time.sleep(0.1)


def descendants(pid: int) -> list[int]:
    """The process and all below it, parents first."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            children.setdefault(int((entry / "stat").read_text().rpartition(")")[2].split()[1]), []).append(
                int(entry.name)
            )
    found = [pid]
    for one in found:
        found += children.get(one, [])
    return found


def main() -> None:
    os.environ.update(PATIENT)  # with the token that the test has set
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what Ray prints
    directory = Path(tempfile.mkdtemp(prefix="hsray-", dir="/tmp"))  # its sockets' names must stay short
    os.environ["RAY_TMPDIR"] = str(directory)
    (directory / "ray").mkdir()  # Ray writes an address into it without making it
    logging.getLogger("ray").setLevel(logging.ERROR)
    try:
        serve(answers)
    finally:
        for pid in descendants(os.getpid())[1:]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for _ in range(100):  # a process that is just being killed may still make a file in it
            shutil.rmtree(directory, ignore_errors=True)
            if not directory.exists():
                break
            time.sleep(0.1)


def serve(answers: IO[str]) -> None:
    nodes = Nodes()
    try:
        print(json.dumps({"address": nodes.cluster.address}), file=answers, flush=True)
        for line in sys.stdin:
            order = json.loads(line)
            answer = nodes.add() if order["do"] == "add" else nodes.kill(order["node"])
            print(json.dumps({"node": answer}), file=answers, flush=True)
    finally:
        nodes.cluster.shutdown()


if __name__ == "__main__":
    main()
