"""Relocation: a store comes to another place shard by shard, resumable, usable as far as it has come.

Responsible for what is copied and in which order: first what makes the destination a store (header, layouts,
tombstones, Zarr metadata), then one shard after the other, at last what is derived. Copies the state that the source
has at the start. Records keep their bytes, so equal contents have one manifest_id. Leaves how a shard arrives to
`landing`, what makes a place the same store to `destination`, bytes and connections to `places`.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from hsstore import durable, manifest, paths, places
from hsstore.destination import (
    State,
    add_missing,
    begin,
    refuse_other,
    settle,
    settle_files,
    source_state_of,
    state_of,
    write_derived,
)
from hsstore.errors import DamagedError, NoSpaceError, NotFoundError, UsageError
from hsstore.landing import Flow, Landing, OvertakenError, SourceDamagedError, landing_at
from hsstore.leases import Leases
from hsstore.parallel import unordered
from hsstore.places import LocalPlace, Place
from hsstore.publishing import roll_forward
from hsstore.reading import RateLimit, raise_if_ours
from hsstore.records import ShardRecord, StoreHeader, sha256_hex

_BUSY_SECONDS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """What happened to a shard, or to a file that belongs to none."""

    kind: Literal["copied", "damaged", "busy", "note"]
    detail: str = ""
    """What was expected and what was found."""
    shard: int | None = None
    bytes: int = 0

    def __str__(self) -> str:
        where = f"shard {self.shard}: " if self.shard is not None else ""
        return f"{self.kind}: {where}{self.detail}"


@dataclass(slots=True)
class Summary:
    """What a copy did; filled while its events stream."""

    shards: int = 0
    """At the source when it was looked at, quarantined ones left out."""
    copied: int = 0
    already_there: int = 0
    damaged: int = 0
    """Shards, and kept manifests, that are damaged at the source and were not copied."""
    bytes: int = 0
    """Of shards that were copied by this run."""
    more_there: int = 0
    """Shards of the destination that the source does not have."""
    source_manifest_id: str = ""
    manifest_id: str = ""
    """Of the destination."""


class Copy:
    """One run of one copy. `events()` does the work; `summary` counts it. To resume: run it again."""

    def __init__(self, source: Place, destination: Place, *, jobs: int = 2, rate: RateLimit | None = None) -> None:
        """Raises `UsageError` for places of which one lies in the other."""
        _refuse_nested(source, destination)
        self.source, self.destination, self.jobs = source, destination, jobs
        self.summary = Summary()
        self.total_bytes = self.done_bytes = 0
        self.on_progress: Callable[[], None] = lambda: None
        self._rate, self._lock = rate, threading.Lock()
        self._overtaken: set[int] = set()

    def events(self) -> Iterator[Event]:
        """Everything that people should know, as it happens.

        Raises `NotFoundError` and `DamagedError` for a source that is no store, `ConflictError` for a destination that
        holds something else, `NoSpaceError`, `ServiceError`; what was committed by then stays.
        """
        source = source_state_of(self.source)
        if not self.destination.exists(paths.HEADER):  # nothing is begun that will not fit
            _refuse_full_disk(self.destination, source.records.values())
        there = self._prepare(source)
        self.summary.shards = len(source.records) + len(source.damaged)
        for shard, detail in source.damaged.items():
            yield self._damage(detail, shard)
        if not source.damaged and self.source.local is not None and not (self.source.local / paths.RECORDS).is_dir():
            yield self._damage(f"{self.source}/{paths.RECORDS} is missing, and nothing says which shards it had")
        if isinstance(self.destination, LocalPlace):
            for shard, detail in settle_files(self.destination.root, there).items():
                yield self._damage(f"{detail}; `hsstore repair {self.destination} --from {self.source}`", shard)
        todo = self._todo(source, there)
        yield from self._notes(source, there)
        yield from self._shards(source.header, todo)
        yield from self._kept_manifests()
        yield from self._grown(source)
        self._finish(source)

    def _prepare(self, source: State) -> State:
        """Make the destination a store, or bring it up to the source's layouts and tombstones. Returns its state."""
        place, there = self.destination, begin(self.destination, source)
        refuse_other(place, source, there)
        if isinstance(place, LocalPlace):
            settle(place.root, there)
        add_missing(place, source, there)
        if isinstance(place, LocalPlace):
            roll_forward(place.root, there.header, there.records.values())
        return state_of(place)

    def _todo(self, source: State, there: State) -> list[ShardRecord]:
        left_out = set(there.records) | set(there.damaged) | set(there.quarantined)
        todo = [record for shard, record in source.records.items() if shard not in left_out]
        self.summary.already_there = len(set(source.records) & set(there.records))
        self.total_bytes = sum(map(_n_bytes, todo))
        _refuse_full_disk(self.destination, todo)
        return todo

    def _notes(self, source: State, there: State) -> Iterator[Event]:
        honours = getattr(self.destination, "honours_conditions", None)
        if honours is not None and not honours():
            yield _note("the service ignores conditional puts; let no other copy write to the same place meanwhile")
        for shard in sorted(set(source.records) & set(there.quarantined)):
            yield _note("is quarantined at the destination, left as it is", shard)
        for shard, detail in there.damaged.items():
            yield self._damage(f"the destination's record cannot be read: {detail}", shard)
        if source.quarantined:
            yield _note(f"{_so_many(len(source.quarantined), 'quarantined')} left out, tombstones are copied")
        self.summary.more_there = len(set(there.records) - set(source.records) - set(source.damaged))
        if self.summary.more_there:
            n = self.summary.more_there
            yield _note(f"the destination has {n} shard{'s' * (n != 1)} that the source does not have")

    def _shards(self, header: StoreHeader, todo: list[ShardRecord]) -> Iterator[Event]:
        with contextlib.ExitStack() as stack:
            leases = None
            if isinstance(self.destination, LocalPlace):
                leases = stack.enter_context(Leases(self.destination.root))
            while todo:
                stop = threading.Event()
                flow = Flow(rate=self._rate, stop=stop, on_bytes=self._count)
                landing = landing_at(self.destination, header, flow)

                def work(record: ShardRecord, landing: Landing = landing) -> tuple[ShardRecord, Event]:
                    return record, self._one(record, landing, leases)

                busy = []
                for record, event in unordered(work, todo, jobs=self.jobs, stop=stop, tick=self.on_progress):
                    if event.kind == "busy":
                        busy.append(record)
                        continue
                    self._tally(event)
                    self.on_progress()
                    yield event
                if busy:  # another process has their leases: it commits them, or its leases end
                    wait_for_others()
                    self.on_progress()
                todo = busy

    def _one(self, record: ShardRecord, landing: Landing, leases: Leases | None) -> Event:
        if leases is not None and not leases.take(record.shard):
            return Event(kind="busy", shard=record.shard)
        try:
            landing.land(self.source, record)
        except OvertakenError:
            with self._lock:
                if record.shard in self._overtaken:
                    raise
                self._overtaken.add(record.shard)  # once: a destination that was removed looks like that for ever
            return Event(kind="busy", shard=record.shard)
        except SourceDamagedError as error:
            return Event(kind="damaged", detail=f"{error.message}; not copied", shard=record.shard)
        finally:
            if leases is not None:
                leases.release(record.shard)
        return Event(kind="copied", shard=record.shard, bytes=_n_bytes(record))

    def _tally(self, event: Event) -> None:
        if event.kind == "damaged":
            self.summary.damaged += 1
        elif event.kind == "copied":
            self.summary.copied += 1
            self.summary.bytes += event.bytes

    def _damage(self, detail: str, shard: int | None = None) -> Event:
        event = Event(kind="damaged", detail=detail, shard=shard)
        self._tally(event)
        return event

    def _count(self, n_bytes: int) -> None:
        with self._lock:
            self.done_bytes += n_bytes

    def _kept_manifests(self) -> Iterator[Event]:
        """Older states by which trainers may have pinned the store."""
        there = set(self.destination.names(paths.MANIFESTS))
        for name in self.source.names(paths.MANIFESTS):
            expected = paths.kept_id(name)
            if expected is None or name in there:
                continue
            path = f"{paths.MANIFESTS}/{name}"
            try:
                data = self.source.read(path)
            except (DamagedError, NotFoundError) as error:
                yield self._damage(f"{path} cannot be read: {error.message}")
                continue
            except OSError as error:
                raise_if_ours(error)
                yield self._damage(f"{path} cannot be read: {error.strerror}")
                continue
            if sha256_hex(data) != expected:
                yield self._damage(f"{path} is not the manifest that its name says; not copied")
                continue
            self.destination.write_new(path, data)

    def _grown(self, source: State) -> Iterator[Event]:
        known = {*source.records, *source.damaged, *source.quarantined}
        if more := len(set(places.record_numbers(self.source)) - known):
            yield _note(f"{_so_many(more, past=True)} committed at the source meanwhile; the same command copies them")

    def _finish(self, source: State) -> None:
        self.summary.source_manifest_id = source.manifest_id()
        if isinstance(self.destination, LocalPlace):
            self.summary.manifest_id = manifest.write(self.destination.root)
        else:
            self.summary.manifest_id = write_derived(self.destination)


def wait_for_others() -> None:
    """A while: other processes commit the shards whose leases they have."""
    threading.Event().wait(_BUSY_SECONDS)


def _note(detail: str, shard: int | None = None) -> Event:
    return Event(kind="note", detail=detail, shard=shard)


def _so_many(n: int, kind: str = "", *, past: bool = False) -> str:
    verb = ("was" if n == 1 else "were") if past else ("is" if n == 1 else "are")
    return f"{n} {kind}{' ' * bool(kind)}shard{'s' * (n != 1)} {verb}"


def _n_bytes(record: ShardRecord) -> int:
    return sum(entry.bytes for entry in record.files.values())


def _refuse_nested(source: Place, destination: Place) -> None:
    if source.local is None or destination.local is None:
        if str(source).rstrip("/") == str(destination).rstrip("/"):
            raise UsageError(f"{source} is both source and destination")
        return
    a, b = source.local.resolve(), destination.local.resolve()
    if a == b or a in b.parents or b in a.parents:
        raise UsageError(f"{source} and {destination} lie in one another", hint="give a destination elsewhere")


def _refuse_full_disk(destination: Place, todo: Iterable[ShardRecord]) -> None:
    """Before the first byte rather than after hours. A quota may still say no later."""
    if destination.local is None:
        return
    root = destination.local.absolute()
    disk = os.statvfs(next(p for p in (root, *root.parents) if p.exists()))
    free, wanted = disk.f_bavail * disk.f_frsize, 0
    for record in todo:
        staged = paths.staging(destination.local, record.shard, record.attempt)
        wanted += max(0, _n_bytes(record) - durable.bytes_in(staged))
    if wanted > free:
        raise NoSpaceError(
            f"{destination} has {free:,} bytes free, the copy needs {wanted:,}",
            hint="free some space, then run it again",
        )
