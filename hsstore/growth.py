"""Where the samples of one input lie in a store that was grown, quarantined and redone.

An input has one layout of its own, and one more for every redo. This module finds them, recomputes their placements
from the samples (they are not stored) and places again what lies in quarantined shards, and on request what the engine
gave no states for. Leaves layouts as such to `writer` and `layout`.

A sample's last placement counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hsstore import layout, manifest
from hsstore.errors import ConflictError
from hsstore.records import InputSummary, LayoutRecord, SampleEntry
from hsstore.writer import StoreWriter

Placed = dict[int, tuple[SampleEntry, ...]]
"""Samples of each shard, in row order."""


def layout_of(layouts: Sequence[LayoutRecord], summary: InputSummary) -> int | None:
    """Number of the layout that was made for an input; None when the store does not know it."""
    for number, lay in enumerate(layouts):
        if not lay.is_redo and (lay.input.sha256, lay.input.options) == (summary.sha256, summary.options):
            return number
    return None


def moved(samples: Sequence[SampleEntry], offset: int) -> list[SampleEntry]:
    """The same samples with `offset` added to their line numbers."""
    return [SampleEntry(s.uid, s.source_index + offset, s.row, s.n_tokens, s.flags) for s in samples]


def place(writer: StoreWriter, number: int, samples: Sequence[SampleEntry]) -> Placed:
    """Every shard, of layout `number` and its redos, that these samples (with line numbers) have.

    Raises `ConflictError` when they are not those that the layouts were made for.
    """
    base = writer.layouts[number]
    ours = moved(samples, base.offset)
    shards = layout.assign(ours, writer.header.shard_rows)
    writer.check_layout(shards, number)
    placed = dict(zip(base.numbers, shards, strict=True))
    for redo_number, redo in _redos(writer.layouts, base):
        again = set(redo.samples or ())
        shards = layout.assign([s for s in ours if s.source_index in again], writer.header.shard_rows)
        writer.check_layout(shards, redo_number)
        placed |= zip(redo.numbers, shards, strict=True)
    return placed


def redo(writer: StoreWriter, number: int, placed: Placed, *, failed: bool = False) -> Placed:
    """Place the samples again whose last place is a quarantined shard, and with `failed` those that have no states
    there. Returns all places, the new ones too.

    Raises `ConflictError` when another process changed the layouts meanwhile: open the store again.
    """
    last = {e.source_index: (shard, e) for shard in sorted(placed) for e in placed[shard]}
    without = failed_samples(writer, placed) if failed else set()
    lost = [e for i, (shard, e) in sorted(last.items()) if shard in writer.quarantined or i in without]
    if not lost:
        return placed
    base = writer.layouts[number]
    record = writer.add_layout(lost, base.input, offset=base.offset, redo=True)
    return placed | dict(zip(record.numbers, layout.assign(lost, writer.header.shard_rows), strict=True))


def failed_samples(writer: StoreWriter, placed: Placed) -> set[int]:
    """source_index of the samples whose last place is committed without states, and that have none elsewhere."""
    last = {e.source_index: shard for shard in sorted(placed) for e in placed[shard]}
    failed: set[int] = set()
    usable: set[int] = set()
    for record in manifest.load_records(writer.root, writer.header):
        for s in record.samples if record.shard in placed else ():
            if s.ok:
                usable.add(s.source_index)
            elif last[s.source_index] == record.shard:
                failed.add(s.source_index)
    return failed - usable


def grow(writer: StoreWriter, samples: Sequence[SampleEntry], summary: InputSummary) -> int:
    """Add an input. Returns the number of its layout; one that is there already is found, not added again.

    Raises `ConflictError` when another process was first: open the store again.
    """
    known = layout_of(writer.layouts, summary)
    if known is not None:
        return known
    offset = writer.next_source_index()
    writer.add_layout(moved(samples, offset), summary, offset=offset)
    return len(writer.layouts) - 1


def open_input(
    root: Path,
    samples: Sequence[SampleEntry],
    summary: InputSummary,
    *,
    append: bool = False,
    retry_failed: bool = False,
) -> tuple[StoreWriter, int, Placed]:
    """Open a store for writing at one input: (writer, number of its layout, its shards with what must be redone).

    With `retry_failed` samples that have no states are placed again.

    Races with other processes that grow the store are tried again. Raises `ConflictError` for an input that the store
    does not know, unless `append`.
    """
    for _ in range(100):  # every turn another process added a layout: it is progress, and it ends
        writer = StoreWriter.open(root)
        number = layout_of(writer.layouts, summary)
        try:
            if number is None and append:
                number = grow(writer, samples, summary)
            if number is not None:
                return writer, number, redo(writer, number, place(writer, number, samples), failed=retry_failed)
        except ConflictError:
            if len(manifest.load_layouts(root, writer.header)) == len(writer.layouts):
                raise
            continue
        names = ", ".join(repr(lay.input.name) for lay in writer.layouts if not lay.is_redo)
        raise ConflictError(
            f"{root} holds samples of {names}, not of {summary.name!r}",
            hint="add --append to grow the store by it, or give the original prompts file and options",
        )
    raise ConflictError(f"{root}: the layouts kept changing", hint="run the same command again")


def _redos(layouts: Sequence[LayoutRecord], base: LayoutRecord) -> list[tuple[int, LayoutRecord]]:
    ours = (base.input, base.offset)
    return [(n, lay) for n, lay in enumerate(layouts) if lay.is_redo and (lay.input, lay.offset) == ours]
