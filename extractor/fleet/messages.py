"""What the processes of a Ray run say to each other: an order down, events up, one JSON document a line.

    hsstore extract --ray  ── Order ──▶  extractor.fleet.driver (the only one that holds a Ray connection)
                                           └─ Order ──▶  actor on a node  ──▶  extractor.fleet.worker (an extraction)

Leaves what is done about an event to `extractor.fleet.supervisor`.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import msgspec

from extractor.settings import Settings
from hsstore import __version__
from hsstore.errors import UsageError


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What every worker is to do."""

    version: str
    """Of the hsstore that gives the order: settings of another one may mean something else."""
    settings: msgspec.Raw
    beacon: str
    """A file that is there while the run lasts, beside the store: who does not see it has another file system."""
    store_uuid: str = ""
    """Of the store that is continued; "" when there is none yet."""


class Started(msgspec.Struct, frozen=True, kw_only=True, tag="started"):
    """The engine of a worker is up."""

    engine: str
    seconds: float


class Staged(msgspec.Struct, frozen=True, kw_only=True, tag="staged"):
    """A worker has begun a shard."""

    store_uuid: str
    """Of the store that it writes to."""


class Committed(msgspec.Struct, frozen=True, kw_only=True, tag="committed"):
    """A worker has committed a shard."""

    shard: int


class Troubled(msgspec.Struct, frozen=True, kw_only=True, tag="troubled"):
    """A worker goes on after something that people should know."""

    text: str


class Ended(msgspec.Struct, frozen=True, kw_only=True, tag="ended"):
    """A worker, or the run, found nothing left to do."""

    store_uuid: str = ""


class Erred(msgspec.Struct, frozen=True, kw_only=True, tag="erred"):
    """A worker, or the run, ended early."""

    kind: str
    """Of `hsstore.errors`; `terminated` when it was told to end."""
    message: str
    hint: str = ""


class Said(msgspec.Struct, frozen=True, kw_only=True, tag="said"):
    """For people."""

    text: str
    warning: bool = False


class Strength(msgspec.Struct, frozen=True, kw_only=True, tag="strength"):
    """How many workers there are."""

    working: int
    """With an engine that is up."""
    starting: int


FromWorker = Started | Staged | Committed | Troubled | Ended | Erred
FromDriver = Said | Strength | Ended | Erred


class Resources(msgspec.Struct, frozen=True, kw_only=True):
    """What the driver gives an actor, and how many of them there are to be."""

    cpus: float = 1.0
    gpus: float | None = None
    """None = what the engine takes: tp times dp where there are GPUs."""
    engine_gpus: int = 0
    actors: int | None = None
    """None = as many as fit on each node, one where no GPUs are needed."""
    patience_seconds: float = 600.0


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """First line that the driver reads. End of file is the order to stop."""

    address: str
    """As `ray.init` takes it; `local` = start Ray here."""
    resources: Resources
    order: Order


def make_order(settings: Settings, beacon: Path, store_uuid: str) -> Order:
    """An order to continue the store, with paths that mean the same in every working directory."""
    model = Path(settings.model)
    there = dataclasses.replace(
        settings,
        model=str(model.absolute()) if model.exists() else settings.model,
        prompts=settings.prompts.absolute(),
        out=settings.out.absolute(),
        resume=not settings.append,
        retry_failed=False,  # they have their new places already
        token_file=settings.token_file.absolute() if settings.token_file else None,
        metrics_port=None,  # the command's own: several workers may be on one machine
        log_json=None,
    )
    return Order(
        version=__version__,
        settings=msgspec.Raw(msgspec.json.encode(there, enc_hook=str)),
        beacon=str(beacon.absolute()),
        store_uuid=store_uuid,
    )


def settings_of(order: Order) -> Settings:
    """Raises `UsageError` when another version of hsstore gave the order."""
    if order.version != __version__:
        raise UsageError(
            f"this node has hsstore {__version__}, the command was given by {order.version}",
            hint="install the same version on every node",
        )
    return msgspec.json.decode(order.settings, type=Settings, dec_hook=lambda type_, value: type_(value))
