"""What is still here of a store, as evidence for or against a document that a replica offers.

Witnesses are manifest.sha256 (the SHA-256 of every document and file), manifest.json (that of every shard file), the
documents that are whole (their uuid), and the shard files themselves. Each of them may be damaged too, so one witness
against a document is heard only while none of a better kind speaks for it. Looks once, before anything is changed.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from hsstore import paths, zarrmeta
from hsstore.errors import DamagedError, HsstoreError
from hsstore.places import LocalPlace, load_sealed
from hsstore.records import (
    LayoutRecord,
    Manifest,
    ShardRecord,
    StoreHeader,
    canonical,
    decode,
    read_plain,
    sha256_hex,
)
from hsstore.shardblocks import Copies, Wanted

_SUM = re.compile(r"([0-9a-f]{64})  (.+)")
_ALIKE = 32  # equal hex digits from which on two SHA-256s were the same one once


class Witness:
    """The evidence of one store."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._place = LocalPlace(root)
        self.sums = self._listed()
        """SHA-256 by path, as manifest.sha256 lists it."""
        self._is_our_list: bool | None = None
        self._manifest_files: dict[str, str] = {}
        self.manifest_shards: set[int] = set()
        """Shards that manifest.json has; empty when it cannot be read."""
        self._read_manifest()
        self._uuids: Counter[str] | None = None

    def _listed(self) -> dict[str, str]:
        matches = [m for line in self._text(paths.MANIFEST_SUMS).splitlines() if (m := _SUM.fullmatch(line))]
        times = Counter(match[2] for match in matches)
        # A name that is there twice was another one once: neither line says which.
        return {match[2]: match[1] for match in matches if times[match[2]] == 1}

    def _text(self, path: str) -> str:
        return self._bytes(path).decode("utf-8", "replace")

    def _bytes(self, path: str) -> bytes:
        try:
            return read_plain(self.root / path)
        except (HsstoreError, OSError):
            return b""  # a witness that cannot be heard

    def against_ours(self, path: str, sha256: str) -> str:
        """Why a document that is here, whole, and has this SHA-256 is in doubt; "" when manifest.sha256 is for it.

        A list that knows nothing here is another store's. One that differs in a few digits is what is damaged: two
        SHA-256s have about four of their 64 in common.
        """
        listed = self.sums.get(path, sha256)
        if sum(a == b for a, b in zip(listed, sha256, strict=True)) >= _ALIKE or not self._list_is_ours():
            return ""
        return f"has another SHA-256 than {paths.MANIFEST_SUMS} lists"

    def _list_is_ours(self) -> bool:
        if self._is_our_list is None:
            of_ours = (paths.HEADER, paths.MANIFEST, f"{paths.LAYOUTS}/", f"{paths.RECORDS}/")
            named = ((path, sha256) for path, sha256 in self.sums.items() if path.startswith(of_ours))
            self._is_our_list = any(sha256_hex(self._bytes(path)) == sha256 for path, sha256 in named)
        return self._is_our_list

    def accounts_for(self, header: StoreHeader, shard: int) -> bool:
        """Whether anything but a record of that name says that the shard was committed here."""
        listed = shard in self._listed_numbers(paths.RECORDS)
        return listed or shard in self.manifest_shards or shard in self._with_files(header)

    def _read_manifest(self) -> None:
        try:
            found = decode(self._text(paths.MANIFEST).encode(), Manifest, paths.MANIFEST)
        except HsstoreError:
            return
        for shard in found.shards:
            self.manifest_shards.add(shard.shard)
            self._manifest_files |= {name: sha for name, (_, sha) in shard.files.items()}

    def speaks_for(self, uuid: str) -> bool:
        """Whether the documents here belong to that store; so they do when none of them can say."""
        if self._owner(f"{paths.LAYOUTS}/{paths.numbered(0)}", LayoutRecord) == uuid:
            return True
        found = self.uuids()
        return not found or found[uuid] > 0

    def uuids(self) -> Counter[str]:
        """Of every layout and record that is whole."""
        if self._uuids is None:
            self._uuids = Counter()
            for directory, type_ in ((paths.LAYOUTS, LayoutRecord), (paths.RECORDS, ShardRecord)):
                for number in sorted(self._numbers(directory)):
                    owner = self._owner(f"{directory}/{paths.numbered(number)}", type_)
                    self._uuids.update([owner] if owner else [])
        return self._uuids

    def _owner(self, path: str, type_: type[LayoutRecord] | type[ShardRecord]) -> str:
        """Uuid of the store that a document belongs to; "" when it is not whole."""
        try:
            document: LayoutRecord | ShardRecord = load_sealed(self._place, path, type_)
        except (HsstoreError, OSError):
            return ""
        return document.store_uuid

    def _numbers(self, directory: str) -> set[int]:
        try:
            return set(paths.numbers_in(self.root / directory))
        except OSError:
            return set()

    def _listed_numbers(self, directory: str) -> set[int]:
        names = (p.removeprefix(f"{directory}/") for p in self.sums if p.startswith(f"{directory}/"))
        return {n for n in map(paths.number_of, names) if n is not None}

    def is_here(self, path: str) -> bool:
        """Whether something has that name."""
        try:
            (self.root / path).lstat()
        except OSError:
            return False
        return True

    def layouts(self) -> set[int]:
        """Numbers of layouts that there are or were."""
        here = self._numbers(paths.LAYOUTS)
        return here | set(range(max(here, default=0))) | self._listed_numbers(paths.LAYOUTS)

    def tombstones(self) -> set[tuple[int, int]]:
        """(shard, number) of tombstones that there are, and of listed ones of shards that the manifest leaves out."""
        directory = self.root / paths.TOMBSTONES
        here = {paths.tombstone_of(p.name) for p in directory.iterdir()} if directory.is_dir() else set()
        prefix = f"{paths.TOMBSTONES}/"
        listed = {paths.tombstone_of(p.removeprefix(prefix)) for p in self.sums if p.startswith(prefix)}
        return {s for s in here if s} | {s for s in listed if s and s[0] not in self.manifest_shards}

    def records(self, header: StoreHeader, planned: set[int]) -> set[int]:
        """Shards that are or were committed here: by name, manifest, sums, or the files it has."""
        known = self.manifest_shards | self._listed_numbers(paths.RECORDS) | self._with_files(header)
        return self._numbers(paths.RECORDS) | (known & planned if planned else known)

    def _with_files(self, header: StoreHeader) -> set[int]:
        """Shards with a published file: those have, or had, a record."""
        out: set[int] = set()
        for spec in header.arrays:
            directory = self.root / zarrmeta.ROOT / spec.name / "c"
            names = [p.name for p in directory.iterdir()] if directory.is_dir() else []
            out |= {int(n) for n in names if n.isascii() and n.isdecimal() and len(n) < 10 and str(int(n)) == n}
        return out

    def against_header(self, found: StoreHeader) -> str:
        """Why a header cannot be ours, "" when it is: some witness must speak for it."""
        uuids = self.uuids()
        if uuids:
            [(ours, _)] = uuids.most_common(1)
            return "" if found.uuid == ours else f"is of store {found.uuid}, the records here of {ours}"
        listed = self.sums.get(paths.HEADER) == sha256_hex(canonical(found))
        if listed or found.uuid in self._text(paths.HEADER):
            return ""
        return "cannot be compared with anything here: no record, layout or checksum is whole"

    def against_layout(self, path: str, found: LayoutRecord) -> str:
        """Why a layout cannot be ours."""
        if self.sums.get(path, "") in ("", sha256_hex(canonical(found))):
            return ""
        agreed = 0
        for shard, plan in zip(found.numbers, found.shards, strict=True):
            try:
                record = load_sealed(self._place, f"{paths.RECORDS}/{paths.numbered(shard)}", ShardRecord)
            except (HsstoreError, OSError):
                continue
            if (len(record.samples), record.n_rows) != (plan.n_samples, plan.n_rows):
                return "has other shards than the records here"
            agreed += 1
        return "" if agreed else "is another one than manifest.sha256 lists"

    def against_record(self, header: StoreHeader, found: ShardRecord) -> str:
        """Why a record cannot be that of the shard here.

        Hidden states decide: another extraction of the same samples has the same tokens.
        """
        path = f"{paths.RECORDS}/{paths.numbered(found.shard)}"
        if self.sums.get(path) == sha256_hex(canonical(found)):
            return ""
        votes = [self._agrees(header, found, i) for i, spec in enumerate(header.arrays) if spec.row_shape]
        if any(votes) or all(vote is None for vote in votes):
            return ""
        return "is that of other content than the files here have"

    def _agrees(self, header: StoreHeader, found: ShardRecord, array: int) -> bool | None:
        """Whether one file of a record is ours; None when nothing here can say."""
        try:
            wanted = Wanted.of(header, found, header.arrays[array])
        except DamagedError:
            return False
        listed = [self.sums.get(wanted.relative), self._manifest_files.get(wanted.relative)]
        if wanted.sha256 in listed:
            return True
        if listed[0] is not None and listed[0] == listed[1]:
            return False  # two witnesses that were not broken in the same way
        with Copies(self.root, wanted) as copies:
            return copies.mostly_match()
