"""Reading a store: maps of its shard files, rows as zero-copy views, samples by index.

Compiles the manifest from the records at opening and keeps to it: what is committed later is seen by opening again.
Safe under fork (maps are inherited, nothing else is shared) and in threads. Leaves packing to `plan` and `gather`.

Letters: T tokens of a sample, V verifier vocabulary, S rows of a shard, C rows of a block.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections import OrderedDict
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hsstore import index, manifest, paths, zarrmeta
from hsstore.digest import decode_blocks
from hsstore.errors import DamagedError
from hsstore.records import Capture, ShardRecord, StoreHeader

MAX_MAPS = 256


class Store:
    """A store opened for reading. `close` or use as a context manager; views handed out keep their map alive."""

    def __init__(self, root: str | Path, *, max_maps: int = MAX_MAPS) -> None:
        """Raises `NotFoundError` where no store is, `DamagedError` or `FormatError` when it cannot be trusted."""
        self.root = Path(root)
        self.header: StoreHeader = manifest.load_header(self.root)
        records = manifest.load_records(self.root, self.header)
        self.manifest = manifest.compile_manifest(self.header, records)
        self.manifest_id = manifest.manifest_id(self.manifest)
        self.index = index.build(self.manifest)
        self._records: dict[int, ShardRecord] = {r.shard: r for r in records}
        self._maps: OrderedDict[tuple[str, int], memoryview] = OrderedDict()
        self._crcs: dict[tuple[str, int], npt.NDArray[np.uint32]] = {}
        self._max_maps = max_maps
        self._lock = threading.Lock()

    @classmethod
    def open(cls, root: str | Path) -> Store:
        return cls(root)

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[type[Store], tuple[str]]:
        return Store, (str(self.root.absolute()),)

    def close(self) -> None:
        """Let go of every map; views that are still held keep theirs until they go."""
        with self._lock:
            self._maps.clear()

    @property
    def name(self) -> str:
        """Last component of its directory."""
        return self.root.absolute().name

    @property
    def capture(self) -> Capture:
        return self.header.capture

    @property
    def layers(self) -> tuple[str, ...]:
        """Captured states, `after_k` ascending, then `final`."""
        return self.header.capture.layers

    def record(self, shard: int) -> ShardRecord:
        return self._records[shard]

    def rows(self, array: str, shard: int, row: int, n_rows: int) -> memoryview:
        """`n_rows` rows of an array as a read-only byte view of the map: no copy.

        Raises `DamagedError` when the file is missing or has another size than its record says.
        """
        width = self.header.array(array).row_bytes
        return self._map(array, shard)[row * width : (row + n_rows) * width]

    def sample(self, i: int, array: str) -> memoryview:
        """All rows of sample `i` (a row of the index) of one array."""
        at = self.index
        return self.rows(array, int(at.shard[i]), int(at.row[i]), int(at.n_tokens[i]))

    def input_ids(self, i: int) -> npt.NDArray[np.int32]:
        """int32 [T]."""
        return np.frombuffer(self.sample(i, "tokens/input_ids"), "<i4")

    def loss_mask(self, i: int) -> npt.NDArray[np.uint8]:
        """uint8 [T], 1 = a trained (assistant) token."""
        return np.frombuffer(self.sample(i, "tokens/loss_mask"), np.uint8)

    def hidden(self, i: int, state: str) -> npt.NDArray[np.uint16]:
        """bfloat16 bit patterns as uint16 [T, H] of one captured state (`after_2` …, `final`)."""
        return np.frombuffer(self.sample(i, f"hidden/{state}"), "<u2").reshape(-1, self.capture.hidden_size)

    def block_crcs(self, array: str, shard: int) -> npt.NDArray[np.uint32]:
        """CRC32C of each block of C rows, from the record."""
        key = (array, shard)
        if key not in self._crcs:
            entry = self._records[shard].files[zarrmeta.chunk_path(self.header.array(array), shard)]
            self._crcs[key] = decode_blocks(entry.crc32c_blocks)
        return self._crcs[key]

    def token_counts(self, split: index.SplitName = "train") -> npt.NDArray[np.int64]:
        """int64 [V]: how often each token is a trained one (loss mask 1) in a split."""
        counts = np.zeros(self.capture.vocab_size, np.int64)
        members = index.members(self.index, self.header.split, split)
        # One bincount costs V whatever it counts: 1,024 samples at a time, not one.
        for start in range(0, len(members), 1024):
            chosen = (int(i) for i in members[start : start + 1024])
            trained = [self.input_ids(i)[self.loss_mask(i) != 0] for i in chosen]
            counts += np.bincount(np.concatenate(trained), minlength=len(counts))
        return counts

    def _map(self, array: str, shard: int) -> memoryview:
        key = (array, shard)
        with self._lock:
            view = self._maps.get(key)
            if view is not None:
                self._maps.move_to_end(key)
                return view
            view = self._open_map(array, shard)
            self._maps[key] = view
            while len(self._maps) > self._max_maps:
                self._maps.popitem(last=False)
            return view

    def _open_map(self, array: str, shard: int) -> memoryview:
        spec, record = self.header.array(array), self._records[shard]
        relative = zarrmeta.chunk_path(spec, shard)
        path = self.root / relative
        if not path.exists():  # committed, not published yet: its staged name is as good
            path = paths.staging(self.root, shard, record.attempt) / paths.staged_name(spec.name)
        try:
            fd = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            raise DamagedError(f"{relative} is missing", hint=self._hint) from None
        try:
            size, expected = os.fstat(fd).st_size, record.files[relative].bytes
            # Past the end of a map is SIGBUS, not an exception: never map what is not all there.
            if size != expected:
                raise DamagedError(f"{relative} has {size} bytes, its record says {expected}", hint=self._hint)
            return memoryview(mmap.mmap(fd, size, prot=mmap.PROT_READ))
        finally:
            os.close(fd)

    @property
    def _hint(self) -> str:
        return f"run `hsstore verify manifest {self.root}`"
