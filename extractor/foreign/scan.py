"""First pass of an import: every input opened, its lengths and ids read, its shapes checked; no state is read.

What is found wrong here gives no sample and is skipped, with its reason. What only reading the states shows is found in
the second pass, in `copying`, and flagged as failed in its shard. Memory grows by a few words for each input.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from extractor.foreign.assume import Assumed
from extractor.foreign.reasons import Rejected, unreadable
from extractor.foreign.sample import ForeignSample, Item, Norm, Reader
from extractor.foreign.settings import ImportSettings
from hsstore.console import Progress
from hsstore.digest import sample_uid
from hsstore.errors import HsstoreError
from hsstore.records import InputSummary, SampleEntry


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """One input that gave no sample, or whose states could not be had."""

    number: int
    """0-based, in the order of the items; the source_index of a sample."""
    name: str
    reason: str
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Scan:
    """All that the first pass found."""

    items: list[Item]
    entries: list[SampleEntry]
    """Samples, by source_index; their `row` is not set."""
    rejections: list[Rejection]
    hidden_size: int
    summary: InputSummary


def first_norm(reader: Reader, items: Iterable[Item]) -> Norm | None:
    """What the first readable file says about its norm."""
    for item in items:
        if item.fault is None:
            try:
                return reader.read(item, whole=False).norm
            except Rejected:
                continue
    return None


def _size(item: Item) -> int:
    try:
        return item.path.stat().st_size
    except OSError as error:
        raise unreadable(error) from None


def tokens_of(sample: ForeignSample, settings: ImportSettings) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]:
    """Ids and mask, equally long and at least 2 tokens. Raises `Rejected`."""
    mask = sample.loss_mask
    if mask is None and settings.mask_missing == "reject":
        raise Rejected("no_mask")
    if mask is None:
        mask = np.ones(sample.n_tokens, np.uint8)
    lengths = {"ids": sample.n_tokens, "mask": len(mask)} | {f"state {i}": len(s) for i, s in enumerate(sample.states)}
    if len(set(lengths.values())) > 1:
        raise Rejected("length_mismatch", ", ".join(f"{name} {n}" for name, n in lengths.items()))
    if sample.n_tokens < 2:
        raise Rejected("too_short", f"{sample.n_tokens} tokens")
    return sample.input_ids, mask


def check(sample: ForeignSample, assumed: Assumed) -> None:
    """Raise `Rejected` where a sample is not what the import takes all of them for."""
    widths = {int(rows.shape[1]) for rows in sample.states}
    if len(widths) > 1:
        raise Rejected("wrong_width", f"states of width {', '.join(map(str, sorted(widths)))}")
    if len(sample.states) != len(assumed.layers):
        found = f"{len(sample.states) - 1} auxiliary states of width {sample.hidden_size}"
        raise Rejected("wrong_width", f"{found}, expected {len(assumed.layers) - 1}: {', '.join(assumed.layers[:-1])}")
    if int(sample.input_ids.max()) >= assumed.vocab_size:
        raise Rejected("ids_outside_vocabulary", f"{int(sample.input_ids.max())} of {assumed.vocab_size}")
    if sample.norm != assumed.norm and (sample.norm or assumed.norm_is_declared):
        raise Rejected("norm_differs", f"{sample.norm or 'not said'}, expected {assumed.norm}")


class Scanner:
    """Runs the first pass."""

    def __init__(self, reader: Reader, settings: ImportSettings, assumed: Assumed, hidden_size: int | None) -> None:
        """`hidden_size` is the model's; without one, most files decide."""
        self._reader, self._settings, self._assumed = reader, settings, assumed
        self._hidden_size = hidden_size
        self._found: list[tuple[int, SampleEntry]] = []
        self._rejections: list[Rejection] = []
        self._digest = hashlib.sha256()
        self._n_bytes = 0

    def run(self, items: list[Item]) -> Scan:
        """Raises `HsstoreError` when nothing is left, naming the reasons."""
        with Progress(len(items), f"reading {self._settings.source.name}", unit="files") as progress:
            for number, item in enumerate(items):
                self._look(number, item)
                progress.update(number + 1, f"{len(self._rejections):,} rejected" if self._rejections else "")
        hidden_size = self._hidden_size or self._usual_width()
        entries = [entry for width, entry in self._found if width == hidden_size]
        for width, entry in self._found:
            if width != hidden_size:
                number = entry.source_index
                self._reject(number, items[number], Rejected("wrong_width", f"{width}, expected {hidden_size}"))
        self._rejections.sort(key=lambda r: r.number)
        return Scan(
            items=items,
            entries=entries,
            rejections=self._rejections,
            hidden_size=hidden_size,
            summary=self._summary(len(items)),
        )

    def _look(self, number: int, item: Item) -> None:
        try:
            if item.fault is not None:
                raise Rejected(*item.fault)
            sample = self._reader.read(item, whole=False)
            ids, mask = tokens_of(sample, self._settings)
            check(sample, self._assumed)
            size = _size(item)
        except Rejected as rejected:
            self._reject(number, item, rejected)
            return
        uid = sample_uid(ids, mask)
        self._n_bytes += size
        self._digest.update(f"{item.name} {size} {uid}\n".encode(errors="surrogateescape"))
        self._found.append((sample.hidden_size, SampleEntry(uid, number, 0, len(ids))))

    def _reject(self, number: int, item: Item, why: Rejected) -> None:
        self._rejections.append(Rejection(number=number, name=item.name, reason=why.reason, detail=why.detail))
        self._digest.update(f"{item.name} {why.reason}\n".encode(errors="surrogateescape"))

    def _usual_width(self) -> int:
        widths = Counter(width for width, _ in self._found)
        return widths.most_common(1)[0][0] if widths else 0

    def _summary(self, n_items: int) -> InputSummary:
        settings = self._settings
        options = {"format": self._assumed.flags["import"], "mask_missing": settings.mask_missing}
        counts = Counter(r.reason for r in self._rejections)
        return InputSummary(
            name=settings.source.absolute().name,
            bytes=self._n_bytes,
            sha256=self._digest.hexdigest(),
            lines=n_items,
            rejected=dict(sorted(counts.items())),
            options=options | ({"cast": "bfloat16"} if settings.cast else {}),
        )


def refuse_nothing(scan: Scan, source: object) -> None:
    """Raise when no input gave a sample."""
    if scan.entries:
        return
    reasons = ", ".join(f"{reason} {n}" for reason, n in scan.summary.rejected.items()) or "there are no files"
    first = scan.rejections[0] if scan.rejections else None
    detail = f"; the first: {first.name}: {first.reason} ({first.detail})" if first else ""
    raise NothingImportedError(
        f"nothing in {source} can be imported: {reasons}{detail}", hint="docs/import.md says what each reason means"
    )


class NothingImportedError(HsstoreError):
    """Not one input gave a sample."""

    kind = "usage"
    exit_code = 2
    http_status = 422
