"""What others commit of one input, read off the store as it comes.

Leaves following a whole store to `hsstore.follow`; this one may begin before there is a store.
"""

from __future__ import annotations

from pathlib import Path

from extractor.input import Input
from extractor.opening import Target
from hsstore import manifest, paths
from hsstore.growth import layout_of
from hsstore.records import ShardRecord, StoreHeader


class Follower:
    """Counts the samples of an input that are committed."""

    def __init__(self, out: Path, given: Input, target: Target | None) -> None:
        """`target`: the store, when it is there already; what it holds now is counted, its tokens are not."""
        self._out, self._summary = out, given.prompts.summary
        self._header: StoreHeader | None = None
        self._lines = range(0)
        self._seen: set[int] = set()
        self._samples: dict[int, bool] = {}
        self.n_tokens = 0
        """Committed since this began."""
        if target is not None:
            self.look()
            self.n_tokens = 0

    @property
    def n_samples(self) -> int:
        """With states, or given up."""
        return len(self._samples)

    @property
    def n_failed(self) -> int:
        return sum(not ok for ok in self._samples.values())

    def look(self) -> list[ShardRecord]:
        """Records of the input that were not there at the last look."""
        if not self._find():
            return []
        assert self._header is not None
        new = [n for n in paths.numbers_in(self._out / paths.RECORDS) if n not in self._seen]
        if not new:
            return []
        self._seen.update(new)
        dead = manifest.quarantined(manifest.load_tombstones(self._out, self._header))
        records = [manifest.load_record(self._out, self._header, n) for n in new if n not in dead]
        ours = [r for r in records if any(s.source_index in self._lines for s in r.samples)]
        for record in ours:
            for s in record.samples:
                self._samples[s.source_index] = s.ok or self._samples.get(s.source_index, False)
            self.n_tokens += sum(s.n_tokens for s in record.samples)
        return ours

    def _find(self) -> bool:
        """Whether the store is there and knows the input."""
        if not self._lines and (self._out / paths.HEADER).is_file():
            self._header = manifest.load_header(self._out)
            layouts = manifest.load_layouts(self._out, self._header)
            number = layout_of(layouts, self._summary)
            if number is not None:
                first = layouts[number].offset
                self._lines = range(first, first + max(1, self._summary.lines))
        return bool(self._lines)
