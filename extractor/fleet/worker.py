"""One extraction of a Ray run, in a process of its own below its actor: `python -m extractor.fleet.worker`.

Reads its order from stdin, writes events to stdout, one JSON document a line; what else is printed goes to stderr, a
log of the actor's. Runs the same road as `hsstore extract --resume`. SIGTERM, or the end of stdin (the actor is gone),
ends it in good order: open shards are dropped, leases given back. Leaves restarts to `extractor.fleet.supervisor`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path

import msgspec

from extractor.engines.base import EngineInfo
from extractor.fleet.messages import Committed, Ended, Erred, FromWorker, Order, Staged, Started, Troubled, settings_of
from extractor.settings import Settings
from extractor.signals import TerminatedError, exit_code, sigterm_raises
from extractor.watch.events import Deaf
from hsstore import manifest
from hsstore.errors import HsstoreError, UsageError, from_os_error
from hsstore.records import ShardRecord

GRACE_SECONDS = 60.0  # for an orderly end once nobody listens any more
_SIGHT_SECONDS = 15.0  # network file systems show a new file late


def main() -> int:
    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # Ray blocks signals in what it starts
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    tell = Teller()
    try:
        with sigterm_raises():
            order = msgspec.json.decode(sys.stdin.buffer.readline(), type=Order)
            threading.Thread(target=_end_with_the_actor, name="actor", daemon=True).start()
            tell(_extract(order, tell))
            return 0
    except TerminatedError as stop:
        tell(Erred(kind="terminated", message="told to end"))
        return exit_code(stop)
    except HsstoreError as error:
        return _fail(tell, error)
    except OSError as error:
        return _fail(tell, from_os_error(error))
    except Exception as error:  # noqa: BLE001 - said with its traceback; the supervisor decides
        traceback.print_exc()
        tell(Erred(kind="error", message=f"{type(error).__name__}: {error}"))
        return 1


def _fail(tell: Teller, error: HsstoreError) -> int:
    tell(Erred(kind=error.kind, message=error.message, hint=error.hint))
    return error.exit_code


class Teller:
    """Events go out where stdout led; what prints to stdout from now on lands in the log."""

    def __init__(self) -> None:
        self._file = os.fdopen(os.dup(1), "wb", buffering=0)
        os.dup2(2, 1)
        self._lock = threading.Lock()

    def __call__(self, event: FromWorker) -> None:
        # Without an actor there is nobody to tell: the end of stdin ends this process.
        with self._lock, contextlib.suppress(BrokenPipeError):
            self._file.write(msgspec.json.encode(event) + b"\n")


def _extract(order: Order, tell: Teller) -> Ended:
    from extractor.run import extract

    settings = settings_of(order)
    _refuse_blind(order, settings)
    with tempfile.TemporaryDirectory(prefix="hsstore-fleet-") as own:
        # The list of failures is the command's to write: it may lie where only that machine can.
        settings = dataclasses.replace(settings, failed_out=Path(own) / "failed.jsonl")
        extract(settings, [Reporter(tell, settings.out)])
    return Ended(store_uuid=manifest.load_header(settings.out).uuid)


def _refuse_blind(order: Order, settings: Settings) -> None:
    """Raise `UsageError` when this node does not see what the command sees."""
    end = time.monotonic() + _SIGHT_SECONDS
    while not os.path.exists(order.beacon):
        if time.monotonic() > end:
            raise UsageError(
                f"this node does not see {settings.out.parent} as the machine of the command does",
                hint="--out, --prompts and --model must lie on a file system that all nodes share, at one path",
            )
        time.sleep(0.5)
    if order.store_uuid:
        found = manifest.load_header(settings.out).uuid
        if found != order.store_uuid:
            raise UsageError(f"this node sees store {found} in {settings.out}, the command {order.store_uuid}")


class Reporter(Deaf):
    """Tells the supervisor what it needs to know of a run."""

    def __init__(self, tell: Teller, out: Path) -> None:
        self._tell, self._out = tell, out
        self._began = False

    def engine_started(self, info: EngineInfo, seconds: float) -> None:
        self._tell(Started(engine=f"{info.engine} {info.version}", seconds=seconds))

    def shard_staged(self, shard: int, n_samples: int, n_tokens: int) -> None:
        if not self._began:
            self._tell(Staged(store_uuid=manifest.load_header(self._out).uuid))
        self._began = True

    def shard_done(self, record: ShardRecord | None) -> None:
        if record is not None:
            self._tell(Committed(shard=record.shard))

    def engine_lost(self, reason: str) -> None:
        self._tell(Troubled(text=f"lost its engine: {reason}"))


def _end_with_the_actor() -> None:
    while os.read(0, 1):  # not by sys.stdin: its lock, held here, would end the interpreter's end by SIGABRT
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_SECONDS)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
