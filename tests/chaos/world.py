"""What the writers of a chaos run write, known beforehand to the last byte, and the judgement at the end of a round.

The states of a sample are a function of its source_index; in `noisy` rounds also of the attempt that computed them, as
on a GPU, where two runs of one sample differ in their last bits. So a shard that mixes files of two attempts shows, and
so does a record that names another attempt than the one whose files lie there.

Letters: T tokens of a sample, H hidden size.
"""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hsstore import growth, layout, manifest, paths, zarrmeta
from hsstore.digest import sample_uid
from hsstore.quarantine import quarantine
from hsstore.records import InputSummary, SampleEntry, ShardRecord, Split, sha256_hex
from hsstore.store import Store
from hsstore.verify import Verifier
from hsstore.writer import StagedShard, StoreWriter
from tests.stores import capture

STATES = ("after_2", "final")
HIDDEN = 8
SHAPE = {"shard_rows": 64, "chunk_rows": 16}


@dataclass(frozen=True, slots=True)
class Input:
    """One prompts file: what the store is created for, or grown by."""

    summary: InputSummary
    entries: tuple[SampleEntry, ...]
    """By line number, as an input gives them."""


def make_input(name: str, n: int) -> Input:
    """`n` samples of 5 to 60 tokens, two or three of them in a shard."""
    rng = np.random.default_rng(list(name.encode()))
    entries = []
    for line, length in enumerate(rng.integers(5, 61, n).tolist()):
        entries.append(SampleEntry(sample_uid(*tokens(name, line, length)), line, 0, length))
    sha = sha256_hex(name.encode())
    return Input(InputSummary(name=name, bytes=0, sha256=sha, lines=n, rejected={}, options={}), tuple(entries))


@functools.cache
def tokens(name: str, line: int, length: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]:
    """(input_ids [T], loss_mask [T]) of a line of an input."""
    rng = np.random.default_rng([*name.encode(), line])
    return rng.integers(0, 1000, length, dtype=np.int32), (rng.random(length) < 0.6).astype(np.uint8)


def states(source_index: int, length: int, state: str, attempt: str) -> npt.NDArray[np.uint16]:
    """[T, H] finite bfloat16 patterns; `attempt` is "" where every attempt computes the same."""
    rng = np.random.default_rng([source_index, STATES.index(state)])
    rows = rng.integers(0, 1 << 16, (length, HIDDEN), dtype=np.uint16) & np.uint16(0xBFFF)
    if attempt:
        rows[:, -1] = int(attempt[:4], 16) & 0xBFFF
    return rows


@dataclass(frozen=True, slots=True)
class World:
    """One round: a store, its inputs, and what is special about it."""

    root: Path
    inputs: tuple[Input, ...]
    noisy: bool

    def create(self) -> None:
        first = self.inputs[0]
        StoreWriter.create(
            self.root,
            capture=capture(HIDDEN, STATES),
            split=Split(salt="hsstore", validation_fraction=0.1),
            samples=first.entries,
            input_summary=first.summary,
            **SHAPE,
        )

    def offset(self, inp: Input) -> int:
        """What is added to its line numbers: the lines of the inputs before it (there is one order of growth)."""
        return sum(i.summary.lines for i in self.inputs[: self.inputs.index(inp)])

    def stage(self, writer: StoreWriter, inp: Input, shard: int, entries: Sequence[SampleEntry]) -> StagedShard:
        offset = self.offset(inp)
        ids = {e.source_index: tokens(inp.summary.name, e.source_index - offset, e.n_tokens) for e in entries}
        return writer.stage(shard, entries, ids)

    def fill(self, staged: StagedShard, state: str, entry: SampleEntry) -> None:
        """What an engine does: the rows of one sample in one array."""
        attempt = staged.attempt if self.noisy else ""
        with open(staged.files[state], "r+b") as file:
            file.seek(entry.row * HIDDEN * 2)
            file.write(states(entry.source_index, entry.n_tokens, state, attempt).tobytes())

    # The judgement.

    def violations(self, acks: Sequence[tuple[int, str]]) -> Iterator[str]:
        """Everything that is not as it must be when all writers have ended. `acks`: (shard, SHA-256 of its record)."""
        yield from self._lost(acks)
        for finding in Verifier(self.root, "full").findings():
            if finding.severity == "damage":
                yield f"verify --full: {finding}"
            elif finding.kind in ("open", "unpublished", "stale"):
                yield f"not finished: {finding}"
        yield from self._mismatches()
        yield from self._counted()
        yield from self._undisturbed()

    def _lost(self, acks: Sequence[tuple[int, str]]) -> Iterator[str]:
        for shard, sha256 in acks:
            path = paths.record(self.root, shard)
            if not path.is_file():
                yield f"lost commit: shard {shard} was acknowledged and has no record"
            elif sha256_hex(path.read_bytes()) != sha256:
                yield f"lost commit: shard {shard} was acknowledged with another record than the one there"
        for shard, n in Counter(shard for shard, _ in acks).items():
            if n > 1:
                yield f"duplicate commit: shard {shard} was acknowledged {n} times"

    def _mismatches(self) -> Iterator[str]:
        """Compares every file of every record, quarantined ones too, with what its attempt computed."""
        header = manifest.load_header(self.root)
        dead = manifest.quarantined(manifest.load_tombstones(self.root, header))
        for shard in paths.numbers_in(self.root / paths.RECORDS):
            record = manifest.load_record(self.root, header, shard)
            for state in STATES:
                spec = header.array(f"hidden/{state}")
                path = self.root / zarrmeta.chunk_path(spec, shard)
                if shard in dead and not path.is_file():  # quarantined before it was published: it stays in staging
                    path = paths.staging(self.root, shard, record.attempt) / paths.staged_name(spec.name)
                if not path.is_file():
                    yield f"lost commit: shard {shard} has no file {state}"
                elif not self._right(record, state, path):
                    yield f"mismatch: {state} of shard {shard} is not what attempt {record.attempt} computed"

    def _right(self, record: ShardRecord, state: str, path: Path) -> bool:
        rows = np.fromfile(path, "<u2", record.n_rows * HIDDEN).reshape(-1, HIDDEN)
        attempt = record.attempt if self.noisy else ""
        return all(
            np.array_equal(rows[s.row : s.row + s.n_tokens], states(s.source_index, s.n_tokens, state, attempt))
            for s in record.samples
        )

    def _counted(self) -> Iterator[str]:
        """Every line of every input is there once, with its own ids."""
        with Store.open(self.root) as store:
            rows = Counter(s.source_index for shard in store.manifest.shards for s in shard.samples)
            for number, n in rows.items():
                if n > 1:
                    yield f"duplicate: sample {number} is there {n} times"
            expected = {self.offset(i) + e.source_index: (i, e) for i in self.inputs for e in i.entries}
            for number in sorted(expected.keys() - rows.keys()):
                yield f"lost: sample {number} is not there"
            if extra := sorted(rows.keys() - expected.keys()):
                yield f"duplicate: samples {extra} are of no input"
                return
            yield from self.wrong_samples(store)

    def wrong_samples(self, store: Store) -> Iterator[str]:
        """What a reader sees of every sample, compared with what its attempt computed."""
        expected = {self.offset(i) + e.source_index: (i, e) for i in self.inputs for e in i.entries}
        for i, number in enumerate(store.index.source_index.tolist()):
            inp, entry = expected[number]
            ids, mask = tokens(inp.summary.name, entry.source_index, entry.n_tokens)
            if not (np.array_equal(store.input_ids(i), ids) and np.array_equal(store.loss_mask(i), mask)):
                yield f"mismatch: sample {number} has other tokens"
            attempt = store.record(int(store.index.shard[i])).attempt if self.noisy else ""
            for state in STATES:
                if not np.array_equal(store.hidden(i, state), states(number, entry.n_tokens, state, attempt)):
                    yield f"mismatch: sample {number} has another {state}"

    def _undisturbed(self) -> Iterator[str]:
        """The manifest on disk is that of the records, and where the states allow it, that of an undisturbed run."""
        with Store.open(self.root) as store:
            found = store.manifest_id
        on_disk = sha256_hex((self.root / paths.MANIFEST).read_bytes())
        if on_disk != found:
            yield f"manifest.json is {on_disk[:12]}, the records give {found[:12]}"
        if self.noisy:
            return
        expected = self._repeat(self.root.with_name("undisturbed"))
        if found != expected:
            yield f"manifest {found[:12]}, an undisturbed run gives {expected[:12]}"

    def _repeat(self, root: Path) -> str:
        """The same layouts and tombstones in the same order, by one writer that nothing happens to."""
        header = manifest.load_header(self.root)
        layouts = manifest.load_layouts(self.root, header)
        dead = manifest.quarantined(manifest.load_tombstones(self.root, header))
        calm = World(root, self.inputs, self.noisy)
        calm.create()
        places: dict[int, tuple[Input, tuple[SampleEntry, ...]]] = {}
        for number, lay in enumerate(layouts):
            inp = next(i for i in self.inputs if i.summary == lay.input)
            entries = growth.moved(inp.entries, self.offset(inp))
            if lay.samples:
                entries = [e for e in entries if e.source_index in set(lay.samples)]
            if number:
                StoreWriter.open(root).add_layout(entries, inp.summary, offset=lay.offset, redo=lay.is_redo)
            shards = layout.assign(entries, header.shard_rows)
            places |= {n: (inp, shard) for n, shard in zip(lay.numbers, shards, strict=True)}
        for shard in dead:
            quarantine(root, shard, "as in the disturbed run")
        writer = StoreWriter.open(root)
        for shard in writer.todo():
            staged = calm.stage(writer, places[shard][0], shard, places[shard][1])
            for entry in staged.entries:
                for state in STATES:
                    calm.fill(staged, state, entry)
            assert staged.commit() is not None
        return writer.finish()


def read_acks(directory: Path) -> list[tuple[int, str]]:
    """What writers were promised, as they noted it."""
    lines = [line for path in sorted(directory.iterdir()) for line in path.read_text().splitlines()]
    return [(a["shard"], a["sha256"]) for a in map(json.loads, lines)]
