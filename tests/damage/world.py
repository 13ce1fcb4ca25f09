"""The store that is damaged, its sound bytes, and what must be found when the bytes have changed.

The oracle knows nothing about how a file was damaged: it compares what lies there with what lay there, block by block.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hsstore import growth, manifest, zarrmeta
from hsstore.findings import Finding, printable
from hsstore.quarantine import quarantine
from hsstore.records import ArraySpec, SampleEntry, ShardRecord
from tests.stores import Sample, create, input_summary, make_samples

LAYERS = ("after_2", "after_5", "final")
FIRST = [60, 20, 50, 40, 30, 64, 7, 33, 12, 55, 21, 9]
MORE = [25, 64, 10, 48, 31, 17]
BLOCK_ROWS, SHARD_ROWS = 16, 128
NO_FILE = None
"""What lies under a name that is no plain file."""

Tree = dict[str, bytes | None]
Rows = tuple[int, int]


def build(root: Path, seed: int) -> None:
    """Two inputs, one shard quarantined and redone: three layouts, a tombstone, kept manifests."""
    first = make_samples(FIRST, seed=seed, layers=LAYERS)
    more = make_samples(MORE, seed=seed + 1, layers=LAYERS)
    create(root, first, shard_rows=SHARD_ROWS, chunk_rows=BLOCK_ROWS)
    _fill(root, first, "synthetic.jsonl")
    _fill(root, more, "more.jsonl")
    quarantine(root, 1, "made for a test")
    _fill(root, first, "synthetic.jsonl")


def _fill(root: Path, samples: Sequence[Sample], name: str) -> None:
    summary = input_summary(len(samples))
    if name != summary.name:
        summary = dataclasses.replace(summary, name=name, sha256="4" * 64)
    entries = [s.entry for s in samples]
    writer, number, placed = growth.open_input(root, entries, summary, append=True)
    offset = writer.layouts[number].offset
    by_index = {s.entry.source_index + offset: s for s in samples}
    for shard in [n for n in writer.todo() if n in placed]:
        tokens = {i: (s.input_ids, s.loss_mask) for i, s in by_index.items()}
        staged = writer.stage(shard, placed[shard], tokens)
        for state, path in staged.files.items():
            with open(path, "r+b") as file:
                for e in placed[shard]:
                    rows = by_index[e.source_index].states[state]
                    file.seek(e.row * rows.shape[1] * 2)
                    file.write(rows.tobytes())
        assert staged.commit() is not None
    writer.finish()


@dataclass(frozen=True)
class ShardFile:
    """What is known of a shard file of the sound store."""

    record: ShardRecord
    spec: ArraySpec

    @property
    def block_bytes(self) -> int:
        return BLOCK_ROWS * self.spec.row_bytes

    @property
    def n_blocks(self) -> int:
        return zarrmeta.used_blocks(self.record.n_rows, BLOCK_ROWS)

    @property
    def data_bytes(self) -> int:
        return self.n_blocks * self.block_bytes

    def rows(self, block: int) -> set[int]:
        return set(range(block * BLOCK_ROWS, min((block + 1) * BLOCK_ROWS, self.record.n_rows)))

    def damaged_rows(self, old: bytes, new: bytes | None) -> set[int]:
        """Rows of every block that is not there as it was."""
        size = self.block_bytes
        blocks = range(self.n_blocks)
        parts = (slice(b * size, (b + 1) * size) for b in blocks)
        bad = [b for b, part in zip(blocks, parts, strict=True) if new is None or new[part] != old[part]]
        return set().union(*(self.rows(b) for b in bad))


class World:
    """A store that is damaged and mended again and again, and another one of the same shape."""

    def __init__(self, directory: Path) -> None:
        self.root, self.other = directory / "store", directory / "other"
        build(self.root, seed=1)
        build(self.other, seed=100)
        header = manifest.load_header(self.root)
        self.sound, self.foreign = tree(self.root), tree(self.other)
        records = manifest.load_records(self.root, header)
        self.files = {zarrmeta.chunk_path(spec, r.shard): ShardFile(r, spec) for r in records for spec in header.arrays}
        self.dead = [*sorted(n for n in self.sound if "/c/1" in n and n not in self.files), "records/000001.json"]
        self.documents = sorted(set(self.sound) - set(self.files) - set(self.dead))

    def read(self, name: str) -> bytes:
        data = self.sound[name]
        assert data is not None
        return data

    def write(self, name: str, data: bytes) -> None:
        """Put a new file in a name's place."""
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if os.path.lexists(path):
            path.unlink()
        path.write_bytes(data)

    def mend(self) -> None:
        """Every byte as it was."""
        now = tree(self.root)
        for name in now.keys() - self.sound.keys():
            _remove(self.root / name)
        for name, data in self.sound.items():
            if now.get(name) != data:
                _remove(self.root / name)
                self.write(name, data or b"")
        for directory in sorted((p for p in self.root.rglob("*") if p.is_dir()), reverse=True):
            if not any(directory.iterdir()) and directory.name != "staging":
                directory.rmdir()

    def misjudged(self, findings: list[Finding]) -> list[str]:
        """What the findings leave out, place wrongly or make up, given what lies there now."""
        now = tree(self.root)
        touched = {n for n in now.keys() | self.sound.keys() if now.get(n, b"gone") != self.sound.get(n, b"gone")}
        touched |= now.keys() ^ self.sound.keys()
        damage = [f for f in findings if f.severity == "damage"]
        return [*self._missed(now, touched, damage), *self._made_up(touched, damage)]

    def _missed(self, now: Tree, touched: set[str], damage: list[Finding]) -> Iterator[str]:
        if "store.json" in touched:
            touched = {"store.json"}  # nothing else can be judged without it
        # Nothing names a kept manifest, and nothing but a reader that pins it misses one.
        gone = {n for n in touched if n.startswith("manifests/") and n not in now}
        touched = touched - gone - set(self.dead)
        for name in sorted(touched):
            found = [f for f in damage if f.file == printable(name)]
            file = self.files.get(name)
            if file is None:
                if not found:
                    yield f"{name}: not found"
            elif f"records/{file.record.shard:06d}.json" not in touched:
                yield from self._located(name, file, now.get(name), found)

    def _located(self, name: str, file: ShardFile, new: bytes | None, found: list[Finding]) -> Iterator[str]:
        if not found:
            yield f"{name}: not found"
        expected = file.damaged_rows(self.read(name), new)
        rows = {row for f in found if f.rows for row in range(f.rows[0], f.rows[1] + 1)}
        if rows != expected:
            yield f"{name}: rows {sorted(rows)}, damaged are {sorted(expected)}"
        samples: set[SampleEntry] = {s for f in found for s in f.samples}
        hit = {s for s in file.record.samples if expected & set(range(s.row, s.row + s.n_tokens))}
        if samples != hit:
            named, right = (sorted(s.source_index for s in part) for part in (samples, hit))
            yield f"{name}: samples {named}, hit are {right}"

    def _made_up(self, touched: set[str], damage: list[Finding]) -> Iterator[str]:
        for finding in damage:
            if finding.file not in {printable(n) for n in touched} and not self._follows(finding, touched):
                yield f"not damaged: {finding}"

    def _follows(self, finding: Finding, touched: set[str]) -> bool:
        """Whether it is a consequence: documents that name what is damaged, or what is named by it."""
        kinds = {n.partition("/")[0] for n in touched}
        if "layouts" in kinds:
            return finding.file.startswith(("layouts/", "records/", "arrays.zarr/")) or finding.kind == "derived"
        if "tombstones" in kinds:
            return finding.kind == "derived"
        listed = finding.file.startswith(("layouts/", "tombstones/")) and finding.kind == "missing"
        return "manifest.sha256" in kinds and listed


def tree(root: Path) -> Tree:
    """Every name below a directory that is no directory itself, and its bytes; `NO_FILE` for what is no plain file."""
    out: Tree = {}
    for directory, names, files in os.walk(root):
        links = [n for n in names if os.path.islink(os.path.join(directory, n))]
        for name in files + links:
            path = Path(directory, name)
            plain = stat.S_ISREG(path.lstat().st_mode)
            out[path.relative_to(root).as_posix()] = path.read_bytes() if plain else NO_FILE
    return out


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    elif os.path.lexists(path):
        path.unlink()
