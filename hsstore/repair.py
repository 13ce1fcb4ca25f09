"""Heal a store from its replicas: only what is bad is fetched, no file is written to in place, the manifest_id stays.

The order: documents (a replica's, when they are whole and ours), zarr.json (from the header), shard files (every block
checked, written anew, renamed over the damaged name), what is derived (compiled again); at the end a look at all of it.
What no replica has is told with its rows and samples, or quarantined on request. Leaves replicas to `replicas`,
documents to `restore`, one file to `rebuild`, looking to `verify`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from hsstore import durable, index, ledger, manifest, paths, zarrmeta
from hsstore.errors import DamagedError, NotFoundError
from hsstore.findings import Finding, at, runs
from hsstore.places import Place
from hsstore.quarantine import quarantine
from hsstore.rebuild import Workplace, in_the_way, rebuild
from hsstore.records import LayoutRecord, StoreHeader, read_plain, sha256_hex
from hsstore.repairlog import Event, Options, Summary
from hsstore.replicas import Replica, Replicas
from hsstore.restore import Restorer
from hsstore.shardblocks import Copies, Wanted
from hsstore.verify import Verifier

_CHUNK = re.compile(rf"{re.escape(zarrmeta.ROOT)}/(?P<array>.+)/c/(?P<shard>\d{{1,9}})(?:/0)*")
_DERIVED = {paths.MANIFEST, paths.MANIFEST_SUMS, *(f"{paths.INDEX}/{name}.npy" for name in index.COLUMNS)}
_KEPT = "not what the documents here imply, one of which is damaged or in doubt: kept as it is until that is mended"
_IN_THE_WAY = (IsADirectoryError, NotADirectoryError, FileExistsError)


@dataclass(slots=True)
class _Known:
    """The store's documents after they were restored."""

    header: StoreHeader
    layouts: dict[int, LayoutRecord]
    dead: set[int]
    """Quarantined shards."""
    restored_records: set[int]
    """Shards that could not be judged before."""
    lost: set[str]
    """Documents that are damaged or in doubt still: nothing may be derived from them."""
    restored: bool
    """Whether a dry run would put documents back."""
    pending: set[str]
    """In a dry run, documents that are whole here and would be replaced: nothing can be judged by those that are."""


class Repair:
    """One repair of one store. `run` does it; `tell` is called with each event as it happens."""

    def __init__(
        self,
        root: str | Path,
        places: Iterable[Place],
        options: Options | None = None,
        *,
        tell: Callable[[Event], None] = lambda event: None,
    ) -> None:
        self.root = Path(root)
        self.options = options or Options()
        self.summary = Summary(dry_run=self.options.dry_run)
        self.on_progress: Callable[[Verifier], None] = lambda verifier: None
        self._replicas = Replicas(places, self._refused)
        self._listener = tell
        self._lost: dict[str, int | None] = {}
        """Files that nobody has, with their shard."""
        self._left: set[str] = set()
        self._mended: set[str] = set()

    def run(self) -> Summary:
        """Whatever it raises, nothing here is worse than before.

        Raises `NotFoundError` where no store is, the first refusal when every replica is refused, and the `OSError` of
        the store's own disk.
        """
        try:
            known = self._documents()
            findings = self._heal(known) if known else []
            if not self.options.dry_run:
                durable.settle_tree(self.root)
            self._count_remaining(known, findings)
        finally:
            counts, summary = self._replicas.counts, self.summary
            summary.bytes_fetched, summary.replica_faults = counts.bytes_fetched, counts.replica_faults
            summary.blocks_fetched += counts.blocks_fetched
            summary.replicas_away = sum(replica.away for replica in self._replicas.all)
        return self.summary

    def _heal(self, known: _Known) -> list[Finding]:
        self._metadata(known)
        findings = [f for f in self._verify("full" if self.options.full else "quick") if not _is_moot(f, known)]
        with Workplace(self.root) as workplace:
            for wanted in self._suspects(known, findings):
                self._examine(wanted, workplace)
        self._kept_manifests(findings)
        if self.options.quarantine_rest and not self.options.dry_run and self._replicas.all_answered:
            self._quarantine(known)
        if not known.lost and not known.pending:
            self._derived(findings)
        return findings

    def _tell(self, event: Event) -> None:
        summary = self.summary
        match event.action:
            case "restored":
                summary.documents_restored += 1
            case "rebuilt":
                summary.derived_rebuilt += 1
            case "republished":
                summary.files_republished += 1
            case "refused":
                summary.replicas_refused += 1
            case "quarantined":
                summary.quarantined += 1
            case "lost":
                summary.lost += event.file not in self._lost
                self._lost[event.file] = event.shard
            case "left":
                self._left.add(event.file)
        if event.action in ("restored", "rebuilt", "republished"):
            self._mended.add(event.file)
        self._listener(event)

    def _refused(self, replica: str, why: str) -> None:
        self._tell(Event(action="refused", detail=why, replicas=(replica,)))

    def _verify(self, depth: str) -> Iterator[Finding]:
        verifier = Verifier(self.root, "full" if depth == "full" else "quick")
        verifier.on_progress = lambda: self.on_progress(verifier)
        yield from verifier.findings()
        self.summary.manifest_id = verifier.summary.manifest_id

    def _documents(self) -> _Known | None:
        """store.json, layouts, tombstones, records: what all the rest is judged by. None without a header here."""
        if not (self.root / paths.RECORDS).is_dir():
            manifest.load_header(self.root)  # no store at all: says what is there instead
        restorer = Restorer(self.root, self._replicas, self._document, self._leave, dry_run=self.options.dry_run)
        header = restorer.header()
        if header is None:
            return None
        self._replicas.identify(header.uuid)
        layouts = restorer.layouts(header)
        restorer.tombstones(header)
        dead = self._dead(header)
        restorer.records(header, layouts, dead)
        if self.options.dry_run and paths.HEADER in restorer.restored:
            return None  # nothing else can be judged before it is there
        restored = {paths.number_of(p.removeprefix(f"{paths.RECORDS}/")) for p in restorer.restored}
        return _Known(
            header=header,
            layouts=layouts,
            dead=dead,
            restored_records={n for n in restored if n is not None},
            lost=restorer.lost,
            restored=bool(restorer.restored) and self.options.dry_run,
            pending=restorer.doubted & restorer.restored if self.options.dry_run else set(),
        )

    def _dead(self, header: StoreHeader) -> set[int]:
        try:
            return set(manifest.quarantined(manifest.load_tombstones(self.root, header)))
        except DamagedError:
            return set()  # told as lost; the records of all shards are looked at then

    def _document(self, path: str, replica: Replica | None, why: str) -> None:
        directory, _, name = path.partition("/")
        shard = paths.number_of(name) if directory == paths.RECORDS else None
        if replica is None:
            self._tell(Event(action="lost", file=path, detail=f"{why}; no replica has it", shard=shard))
        else:
            detail = f"{why}; from {replica}"
            self._tell(Event(action="restored", file=path, detail=detail, shard=shard, replicas=(str(replica),)))

    def _leave(self, path: str, why: str) -> None:
        directory, _, name = path.partition("/")
        shard = paths.number_of(name) if directory == paths.RECORDS else None
        self._tell(Event(action="left", file=path, detail=why, shard=shard))

    def _metadata(self, known: _Known) -> None:
        """Every zarr.json, from the header and the layouts. One of before the last growth is stale, not damaged."""
        numbers = sorted(known.layouts)
        in_doubt = any(path.startswith(f"{paths.LAYOUTS}/") for path in known.lost)
        if in_doubt or not numbers or numbers != list(range(len(numbers))):
            return  # how many shards there are is not known
        stops = [known.layouts[n].numbers.stop for n in numbers]
        states = [zarrmeta.documents(known.header, stop) for stop in stops]
        for relative, expected in states[-1].items():
            try:
                found = read_plain(self.root / relative)
            except (DamagedError, NotFoundError):
                found = b""
            if all(found != state[relative] for state in states) and self._replace(relative, expected):
                self._tell(Event(action="rebuilt", file=relative, detail="from store.json and the layouts"))

    def _replace(self, relative: str, data: bytes) -> bool:
        """Put a file in its place. False when something that is no file is in the way: the last look tells of it."""
        if in_the_way(self.root, relative):
            return False
        if self.options.dry_run:
            return True
        try:
            durable.make_dirs((self.root / relative).parent, self.root)
            durable.replace(self.root / relative, data)
        except _IN_THE_WAY:
            return False
        return True

    def _suspects(self, known: _Known, findings: Iterable[Finding]) -> Iterator[Wanted]:
        """Files that something speaks against, by shard."""
        named = {f.file for f in findings if f.severity == "damage"} | self.options.suspects | self._noted(known)
        for shard in known.restored_records if not self.options.dry_run else ():
            named |= {zarrmeta.chunk_path(spec, shard) for spec in known.header.arrays}
        chunks = {name: match for name in named if (match := _CHUNK.fullmatch(name))}
        unknown = {name for name in self.options.suspects if name not in chunks and not self._is_ours(name)}
        for name in sorted(chunks, key=lambda name: (int(chunks[name]["shard"]), name)):
            shard = int(chunks[name]["shard"])
            if shard in known.dead or f"{paths.RECORDS}/{paths.numbered(shard)}" in known.lost | known.pending:
                continue  # a file is judged by its record
            wanted = self._wanted(known.header, name, chunks[name])
            if wanted is not None:
                yield wanted
            elif name in self.options.suspects:
                unknown.add(name)
        self.summary.suspects_unknown = len(unknown)

    def _noted(self, known: _Known) -> set[str]:
        """Files that a verification on this machine found damaged and that are unchanged since."""
        if self.options.state is None or self.options.full:
            return set()
        history = ledger.Ledger(known.header.uuid, self.options.state).read()
        bad = {identity for (identity, _), line in history.files.items() if not line.ok}
        if not bad:
            return set()
        shards = self._numbers() - known.dead
        names = (zarrmeta.chunk_path(spec, shard) for shard in shards for spec in known.header.arrays)
        return {name for name in names if _identity(self.root / name) in bad}

    def _numbers(self) -> set[int]:
        try:
            return set(paths.numbers_in(self.root / paths.RECORDS))
        except FileNotFoundError:
            return set()

    @staticmethod
    def _is_ours(name: str) -> bool:
        """Whether a name that is no shard file's is that of a document: all of those are looked at anyway."""
        directory = name.partition("/")[0]
        known = {paths.LAYOUTS, paths.RECORDS, paths.TOMBSTONES, paths.INDEX, paths.MANIFESTS, zarrmeta.ROOT}
        return directory in known or name in {paths.HEADER, *_DERIVED}

    def _wanted(self, header: StoreHeader, name: str, match: re.Match[str]) -> Wanted | None:
        try:
            record = manifest.load_record(self.root, header, int(match["shard"]))
            spec = header.array(match["array"])
            return Wanted.of(header, record, spec) if name in record.files else None
        except (DamagedError, NotFoundError):
            return None  # without its record no file can be judged, and of that one it is told

    def _examine(self, wanted: Wanted, workplace: Workplace) -> None:
        self.summary.files_examined += 1
        with Copies(self.root, wanted) as copies:
            bad = copies.bad()
        if bad is None:
            return
        obstacle = in_the_way(self.root, wanted.relative)
        if obstacle:
            self._obstructed(wanted, obstacle)
            return
        if self.options.dry_run:
            self._would_rebuild(wanted, bad)
            return
        result = rebuild(self.root, wanted, bad, self._replicas, workplace)
        if result.done:
            sources = ", ".join(f"{n} from {name}" for name, n in result.fetched.items())
            detail = f"{len(bad)} of {wanted.n_blocks} blocks were bad" + (f"; {sources}" if sources else "")
            self._republished(wanted, detail, sum(result.fetched.values()), tuple(result.fetched))
        elif result.obstacle:
            self._obstructed(wanted, result.obstacle)
        else:
            self._nobody_has(wanted, result.lost)

    def _obstructed(self, wanted: Wanted, obstacle: str) -> None:
        self._tell(Event(action="left", file=wanted.relative, detail=obstacle, shard=wanted.record.shard))

    def _would_rebuild(self, wanted: Wanted, bad: list[int]) -> None:
        offers = self._replicas.offers(wanted) if bad else []
        if bad and not offers:
            self._nobody_has(wanted, bad)
            return
        self.summary.blocks_fetched += len(bad)
        detail = f"{len(bad)} of {wanted.n_blocks} blocks are bad" + (f"; {offers[0]} has the file" if offers else "")
        self._republished(wanted, detail, len(bad), tuple(map(str, offers)))

    def _republished(self, wanted: Wanted, detail: str, blocks: int, replicas: tuple[str, ...]) -> None:
        file, shard = wanted.relative, wanted.record.shard
        event = Event(action="republished", file=file, detail=detail, shard=shard, blocks=blocks, replicas=replicas)
        self._tell(event)

    def _nobody_has(self, wanted: Wanted, blocks: Iterable[int]) -> None:
        for first, last in runs(list(blocks)):
            where = at(wanted.record, "lost", wanted.relative, "", wanted.rows(first, last))
            self._tell(
                Event(
                    action="lost",
                    file=wanted.relative,
                    detail=f"no replica has block {first} to {last}",
                    shard=wanted.record.shard,
                    rows=where.rows,
                    samples=where.samples,
                )
            )

    def _kept_manifests(self, findings: Iterable[Finding]) -> None:
        """Older manifests, which are named by their SHA-256: whoever has those bytes has the right ones."""
        for finding in findings:
            if finding.kind != "manifest":
                continue
            expected = paths.kept_id(finding.file.rpartition("/")[2])
            for replica, data in self._replicas.contents(finding.file):
                if sha256_hex(data) == expected and self._replace(finding.file, data):
                    self._document(finding.file, replica, finding.detail)
                    break

    def _quarantine(self, known: _Known) -> None:
        if None in self._lost.values():
            return  # a layout or a tombstone is lost: which shards may be used is not known
        for shard in sorted({s for s in self._lost.values() if s is not None}):
            names = sorted(name for name, of in self._lost.items() if of == shard)
            reason = f"repair: no replica has {', '.join(names)}"
            stone = quarantine(self.root, shard, reason)
            for name in names:
                del self._lost[name]
            known.lost.discard(f"{paths.RECORDS}/{paths.numbered(shard)}")
            file = paths.tombstone(Path(), shard, stone.number).as_posix()
            self._tell(Event(action="quarantined", file=file, detail=stone.reason, shard=shard))

    def _derived(self, findings: Iterable[Finding]) -> None:
        broken = sorted({f.file for f in findings if f.severity == "damage" and _is_derived(f.file)} - self._mended)
        if not broken and not self.summary.quarantined:
            return
        if any(in_the_way(self.root, name) for name in (*_DERIVED, f"{paths.MANIFESTS}/x")):
            return  # nothing is begun that could not be ended
        if not self.options.dry_run:
            try:
                manifest.write(self.root)
            except (DamagedError, *_IN_THE_WAY):
                return  # the last look tells what is in the way
        for name in broken:
            self._tell(Event(action="rebuilt", file=name, detail="from the records"))

    def _count_remaining(self, known: _Known | None, findings: Iterable[Finding]) -> None:
        """What is damaged still: what is lost, and what a last look finds."""
        damaged = {f.file: f for f in findings if f.severity == "damage"}
        touched = damaged or self._lost or self._mended or self.summary.quarantined
        if known is not None and touched and not self.options.dry_run:
            damaged = {f.file: f for f in self._verify("quick") if f.severity == "damage"}
        else:
            damaged = {name: f for name, f in damaged.items() if name not in self._mended}
        for name, finding in damaged.items():
            if name not in self._lost and name not in self._left:
                in_doubt = known is not None and known.lost and finding.kind in ("derived", "metadata")
                detail = _KEPT if in_doubt else in_the_way(self.root, name) or finding.detail
                self._tell(Event(action="left", file=name, detail=detail, shard=finding.shard))
        self.summary.remaining = len(damaged.keys() | self._lost.keys() | self._left)


def _is_moot(finding: Finding, known: _Known) -> bool:
    """Whether a dry run finds it only because a document is not put back yet.

    Not so for what is derived from documents that are lost: that stays.
    """
    if finding.file in (paths.RECORDS, paths.LAYOUTS):
        return known.restored and not known.lost  # the directory is gone: it comes back with what was in it
    if not known.pending:
        return False
    shards = {paths.number_of(path.removeprefix(f"{paths.RECORDS}/")) for path in known.pending} - {None}
    return finding.kind in ("derived", "metadata", "layout") or finding.shard in shards


def _is_derived(name: str) -> bool:
    return name in _DERIVED or name.startswith(f"{paths.MANIFESTS}/")


def _identity(path: Path) -> ledger.Identity | None:
    try:
        return ledger.identity(path.stat())
    except OSError:
        return None  # it is missing: that is found anyway
