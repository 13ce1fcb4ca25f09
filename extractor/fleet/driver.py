"""The process that holds the Ray connection: `python -m extractor.fleet.driver`, started by `hsstore extract --ray`.

Reads a `Command` from stdin, writes events to stdout, one JSON document a line; what Ray prints goes to stderr, a log.
The end of stdin is the order to stop: also when the command was killed, every worker ends in good order.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback

import msgspec

from extractor.fleet.messages import Command, Erred, FromDriver
from hsstore.errors import HsstoreError


def main() -> int:
    out = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)

    def say(event: FromDriver) -> None:
        try:
            out.write(msgspec.json.encode(event) + b"\n")
        except BrokenPipeError:
            stop.set()

    stop = threading.Event()
    command = msgspec.json.decode(sys.stdin.buffer.readline(), type=Command)
    threading.Thread(target=_listen, args=(stop,), name="command", daemon=True).start()
    try:
        say(_drive(command, stop, say))
    except HsstoreError as error:
        say(Erred(kind=error.kind, message=error.message, hint=error.hint))
    except Exception as error:  # noqa: BLE001 - said with its traceback in the log
        traceback.print_exc()
        say(Erred(kind="error", message=f"Ray failed: {type(error).__name__}: {error}"))
    return 0


def _drive(command: Command, stop: threading.Event, say: object) -> FromDriver:
    from extractor.fleet.cluster import RayCluster
    from extractor.fleet.supervisor import Supervisor

    cluster = RayCluster(command.address, msgspec.json.encode(command.order))
    # Ray has installed handlers of its own; the end of stdin is what ends this process.
    signal.signal(signal.SIGTERM, lambda _signal, _frame: stop.set())
    try:
        supervisor = Supervisor(cluster, command.resources, command.order.store_uuid, say)  # type: ignore[arg-type]
        supervisor.begin()
        return supervisor.run(stop.is_set)
    finally:
        cluster.close()


def _listen(stop: threading.Event) -> None:
    while os.read(0, 1):  # not by sys.stdin: its lock, held here, would end the interpreter's end by SIGABRT
        pass
    stop.set()


if __name__ == "__main__":
    sys.exit(main())
