"""`hsstore extract --ray`: checks the call, has workers do the shards, watches the store, accounts for every line.

All that can be wrong is found here first, as in a run on one machine; then workers on other machines run the same road
(`extractor.run`). Progress is read off the store: what is committed is done, whoever did it. Leaves workers to the
driver process.
"""

from __future__ import annotations

import dataclasses
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from extractor.account import account
from extractor.fleet.drive import Driver
from extractor.fleet.follow import Follower
from extractor.fleet.messages import Command, Erred, FromDriver, Resources, Said, Strength, make_order
from extractor.report import Outcome
from extractor.run import Prepared, prepare, tidy
from extractor.settings import Settings
from extractor.watch.events import Watcher
from extractor.watching import facts_of, watching
from extractor.words import counted
from hsstore import durable, manifest, paths
from hsstore.console import Progress, human_bytes, human_count, note, warn
from hsstore.errors import IncompleteError, MissingExtraError, UsageError, class_of, extra_hint

_LOOK_SECONDS = 1.0
_RENEW_SECONDS = 60.0
_LOST = ("error", "incomplete")
"""Kinds of ends that say nothing about the data."""


def extract_on_ray(settings: Settings) -> Outcome:
    """Run the extraction on a Ray cluster. Raises the errors of `hsstore.errors`; committed shards are kept."""
    address = _address(settings)
    with watching(settings, ()) as watchers:
        prepared = prepare(settings)
        watchers.run_started(
            facts_of(settings, prepared.given, prepared.opening.engine_name, prepared.shape, prepared.todo)
        )
        seconds, tokens = 0.0, 0
        if prepared.todo:
            seconds, tokens = _run(settings, prepared, address, watchers)
        else:
            note(f"{settings.out} is complete already")
        target = prepared.opening.open()
        tidy(settings.out)
        outcome = account(target, prepared.given, settings, seconds, tokens)
        watchers.run_finished(outcome.written, outcome.failed, outcome.skipped, outcome.remaining)
    return outcome


def _address(settings: Settings) -> str:
    """Where the cluster is. Raises `UsageError` where that is in doubt, `MissingExtraError` without Ray."""
    if find_spec("ray") is None:
        raise MissingExtraError("--ray needs the package ray", hint=extra_hint("ray"))
    if settings.shard is not None:
        raise UsageError("--shard and --ray exclude each other: Ray's workers share all shards", hint="leave one out")
    if not settings.ray and (known := os.environ.get("RAY_ADDRESS")):
        raise UsageError(
            f"--ray without an address starts Ray on this machine, but RAY_ADDRESS is {known}",
            hint="give --ray auto for that cluster, --ray local for this machine",
        )
    return settings.ray or "local"


def _run(settings: Settings, prepared: Prepared, address: str, watchers: Watcher) -> tuple[float, int]:
    """Returns the seconds it took and the tokens that were captured meanwhile."""
    uuid = manifest.load_header(settings.out).uuid if prepared.target else ""
    started = time.monotonic()
    with _beacon(settings) as beacon, Driver(_command(settings, prepared, address, beacon, uuid)) as driver:
        follower = Follower(settings.out, prepared.given, prepared.target)
        _watch(driver, follower, beacon, prepared, watchers)
        result = driver.result
    follower.look()
    if isinstance(result, Erred) and result.kind in _LOST and follower.n_samples == len(prepared.given.entries):
        warn(f"{result.message}; every sample was committed before")
    elif isinstance(result, Erred):
        error = IncompleteError if result.kind == "error" else class_of(result.kind)
        raise error(result.message, hint=result.hint)
    return time.monotonic() - started, follower.n_tokens


def _command(settings: Settings, prepared: Prepared, address: str, beacon: Path, uuid: str) -> Command:
    resources = Resources(
        cpus=settings.ray_cpus_per_actor,
        gpus=settings.ray_gpus_per_actor,
        engine_gpus=0 if settings.urls else _engine_gpus(prepared.opening.engine_name, settings.engine_options),
        actors=settings.ray_actors,
        patience_seconds=settings.ray_patience,
    )
    # Chosen here once: on another node `auto` might choose another one.
    chosen = settings if settings.urls else dataclasses.replace(settings, engine=prepared.opening.engine_name)
    return Command(address=address, resources=resources, order=make_order(chosen, beacon, uuid))


def _engine_gpus(engine: str, options: dict[str, str]) -> int:
    """GPUs that an engine takes where there are some."""
    if engine not in ("sglang", "transformers") or options.get("device") == "cpu":
        return 0
    if engine == "transformers":
        return 1
    from extractor.sglang_plugin.settings import parse_options

    parsed = parse_options(options)
    return parsed.tp * parsed.dp


def _watch(driver: Driver, follower: Follower, beacon: Path, prepared: Prepared, watchers: Watcher) -> None:
    """Until the driver has ended."""
    n_todo = len(prepared.given.entries) - follower.n_samples
    if follower.n_samples:
        note(f"{human_count(follower.n_samples)} of {human_count(len(prepared.given.entries))} samples are committed")
    before, workers, renewed = follower.n_samples, "", time.monotonic()
    with Progress(n_todo, "extracting", unit="samples") as progress:
        while driver.result is None:
            for event in driver.hear(_LOOK_SECONDS):
                workers = _show(event) or workers
            for record in follower.look():
                watchers.shard_elsewhere(record.shard, len(record.samples), sum(s.n_tokens for s in record.samples))
                for name, s in record.statistics.items():
                    if s.nan or s.inf:
                        warn(f"shard {record.shard} has {s.nan} NaN and {s.inf} Inf in {name}: try another --dtype")
            rate = follower.n_tokens / max(1.0, progress.seconds)
            written = human_bytes(follower.n_tokens * prepared.given.bytes_per_token)
            failed = f"{follower.n_failed} failed" if follower.n_failed else ""
            parts = [f"{human_count(round(rate))} tok/s", written, workers, failed]
            progress.update(follower.n_samples - before, " · ".join(filter(None, parts)))
            if time.monotonic() - renewed > _RENEW_SECONDS:
                beacon.touch()
                renewed = time.monotonic()


def _show(event: FromDriver) -> str:
    """Say what people should read; returns words about the workers, "" when the event has none."""
    match event:
        case Said(warning=True):
            warn(event.text)
        case Said():
            note(event.text)
        case Strength():
            starting = f", {event.starting} starting" if event.starting else ""
            return f"{counted(event.working, 'worker')}{starting}"
    return ""


@contextmanager
def _beacon(settings: Settings) -> Iterator[Path]:
    """A file in the store, or beside it while there is none, that tells workers that they see the same file system.

    It has a name that `hsstore gc` removes, should nobody else.
    """
    out, mark = settings.out.absolute(), secrets.token_hex(8)
    path = out.with_name(f".{out.name}.{mark}.creating")
    if settings.out_is_store:
        path = out / paths.STAGING / f".beacon.{mark}.tmp"
    durable.make_dirs(path.parent)
    path.touch()
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)
