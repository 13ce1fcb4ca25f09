"""Reading a store: one state of it, rows of its arrays as views or copies, samples by index.

Opening takes the state the store is in, or an older one by its manifest_id, and keeps to it until `refresh`. Safe under
fork (files and maps are inherited, nothing else is shared), in threads, and when pickled. Leaves what a state is to
`snapshot`, how bytes are read to `shardfiles`, packing to `plan` and `gather`.

Letters: T tokens of a sample, V verifier vocabulary, S rows of a shard, C rows of a block.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from hsstore import manifest, paths, plausible, shardfiles, snapshot, zarrmeta
from hsstore.digest import decode_blocks
from hsstore.errors import DamagedError, NotFoundError, UsageError
from hsstore.index import Index, SplitName
from hsstore.index import members as split_members
from hsstore.locks import ForkLock
from hsstore.prefault import prefault
from hsstore.records import Capture, Manifest, ShardRecord, StoreHeader, decode
from hsstore.shardfiles import MAX_MAPS, Backend, SealedFile
from hsstore.snapshot import Snapshot, Totals

_KEPT_CRCS = 1024
"""Shards whose block CRCs are kept, 6 kB each at full size."""
Crcs = dict[str, npt.NDArray[np.uint32]]


class Store:
    """A store opened for reading. `close` or use as a context manager; views handed out keep their map alive."""

    def __init__(
        self,
        root: str | Path,
        *,
        backend: Backend = "mmap",
        max_maps: int = MAX_MAPS,
        manifest_id: str | None = None,
        shards: Sequence[int] | None = None,
    ) -> None:
        """Open the state the store is in, or the one of `manifest_id`.

        `backend="pread"` copies instead of mapping: for network disks. `max_maps` caps live maps, or open files.
        `shards` helps to find a state that no manifest was ever built for. Raises `NotFoundError` where no store is,
        `DamagedError` or `FormatError` when it cannot be trusted, `ConflictError` when it has no such state.
        """
        if backend not in get_args(Backend):
            raise UsageError(f"backend must be one of {', '.join(get_args(Backend))}, found {backend!r}")
        if max_maps < 1:
            raise UsageError(f"max_maps must be at least 1, found {max_maps}")
        self.root = Path(root)
        self.header: StoreHeader = manifest.load_header(self.root)
        self._refuse(paths.HEADER, plausible.header(self.header))
        self._state: Snapshot = (
            snapshot.current(self.root, self.header)
            if manifest_id is None
            else snapshot.pinned(self.root, self.header, manifest_id, shards)
        )
        self._options: dict[str, Any] = {"backend": backend, "max_maps": max_maps}
        self._reader = shardfiles.reader(backend, self._locate, max_maps)
        self._manifest: tuple[str, Manifest] | None = None
        self._crcs: OrderedDict[int, Crcs] = OrderedDict()
        self._lock = ForkLock()

    @classmethod
    def open(
        cls,
        root: str | Path,
        *,
        backend: Backend = "mmap",
        max_maps: int = MAX_MAPS,
        manifest_id: str | None = None,
    ) -> Store:
        return cls(root, backend=backend, max_maps=max_maps, manifest_id=manifest_id)

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        state = {"manifest_id": self.manifest_id, "shards": tuple(self._state.shards)}
        return _reopened, (str(self.root.absolute()), self._options | state)

    def close(self) -> None:
        """Let go of every file; views that are still held keep theirs until they go."""
        self._reader.close()

    def refresh(self) -> bool:
        """Take up what was committed, or quarantined, since. Returns whether anything was.

        Views stay valid. Rows of `index` move: a plan keeps to the columns it was made from.
        """
        if snapshot.live_shards(self.root, self.header) == list(self._state.shards):
            return False
        before, self._state = self._state, snapshot.current(self.root, self.header)
        return before.manifest_id != self._state.manifest_id

    @property
    def name(self) -> str:
        """Last component of its directory."""
        return self.root.absolute().name

    @property
    def state(self) -> Snapshot:
        """What was opened: replaced as a whole by `refresh`."""
        return self._state

    @property
    def manifest_id(self) -> str:
        return self._state.manifest_id

    @property
    def index(self) -> Index:
        return self._state.index

    @property
    def totals(self) -> Totals:
        return Totals.of(self._state)

    @property
    def manifest(self) -> Manifest:
        """The whole manifest of the state, every sample an object: read when it is first asked for."""
        if self._manifest is None or self._manifest[0] != self.manifest_id:
            data = self.manifest_bytes()
            self._manifest = (self.manifest_id, decode(data, Manifest, f"manifest {self.manifest_id[:12]}"))
        return self._manifest[1]

    def manifest_bytes(self) -> bytes:
        """The canonical manifest of the state: its SHA-256 is `manifest_id`."""
        return snapshot.manifest_bytes(self.root, self.header, self._state)

    @property
    def capture(self) -> Capture:
        return self.header.capture

    @property
    def layers(self) -> tuple[str, ...]:
        """Captured states, `after_k` ascending, then `final`."""
        return self.header.capture.layers

    def record(self, shard: int) -> ShardRecord:
        """The record of a shard, read now. Raises `DamagedError` unless it is the one that the manifest was made of."""
        known = self._shard(shard)
        record = manifest.load_record(self.root, self.header, shard)
        if {name: (entry.bytes, entry.sha256) for name, entry in record.files.items()} != known.files:
            path = paths.record(self.root, shard)
            raise DamagedError(f"{path} commits other files than manifest {self.manifest_id[:12]}", hint=self._hint)
        self._refuse(f"{paths.RECORDS}/{paths.numbered(shard)}", plausible.record(record, self.header))
        return record

    def rows(self, array: str, shard: int, row: int, n_rows: int) -> memoryview:
        """`n_rows` rows of an array as read-only bytes: a view of the map without a copy, or what `pread` gave.

        Raises `DamagedError` when the file is missing or has another size than its record says.
        """
        width = self.header.array(array).row_bytes
        return self._reader.view((array, shard), row * width, n_rows * width)

    def read_into(self, array: str, shard: int, row: int, out: memoryview) -> None:
        """Fill `out` (flat, writable bytes) with the rows from `row` on.

        Raises `DamagedError` naming rows that cannot be read, also when the file became shorter while it was mapped.
        """
        self._reader.read_into((array, shard), row * self.header.array(array).row_bytes, out)

    def sample(self, i: int, array: str) -> memoryview:
        """All rows of sample `i` (a row of the index) of one array."""
        return self.rows(array, *self._place(i))

    def input_ids(self, i: int) -> npt.NDArray[np.int32]:
        """int32 [T], a copy."""
        return self._copied(i, "tokens/input_ids").view("<i4")

    def loss_mask(self, i: int) -> npt.NDArray[np.uint8]:
        """uint8 [T], 1 = a trained (assistant) token; a copy."""
        return self._copied(i, "tokens/loss_mask")

    def hidden(self, i: int, state: str) -> npt.NDArray[np.uint16]:
        """bfloat16 bit patterns as uint16 [T, H] of one captured state (`after_2` …, `final`).

        Raises `DamagedError` for rows that cannot be read. Of a mapped store the pages are in memory on return, and
        the array is a view of them: who must survive a file that is cut later copies it, or opens with `pread`.
        """
        array = f"hidden/{state}"
        view = self.sample(i, array)
        shard, row, n_rows = self._place(i)
        prefault(view, f"rows {row} to {row + n_rows - 1} of shard {shard} of {array}")
        return np.frombuffer(view, "<u2").reshape(-1, self.capture.hidden_size)

    def block_crcs(self, array: str, shard: int) -> npt.NDArray[np.uint32]:
        """CRC32C of each block of C rows, from the record."""
        with self._lock:
            crcs = self._crcs.get(shard)
            if crcs is not None:
                self._crcs.move_to_end(shard)
        if crcs is None:
            files = self.record(shard).files
            chunks = {spec.name: files[zarrmeta.chunk_path(spec, shard)] for spec in self.header.arrays}
            crcs = {name: decode_blocks(entry.crc32c_blocks) for name, entry in chunks.items()}
            with self._lock:
                self._crcs[shard] = crcs
                while len(self._crcs) > _KEPT_CRCS:
                    self._crcs.popitem(last=False)
        return crcs[array]

    def token_counts(self, split: SplitName = "train") -> npt.NDArray[np.int64]:
        """int64 [V]: how often each token is a trained one (loss mask 1) in a split."""
        counts = np.zeros(self.capture.vocab_size, np.int64)
        members = split_members(self.index, self.header.split, split)
        # One bincount costs V whatever it counts: 1,024 samples at a time, not one.
        for start in range(0, len(members), 1024):
            chosen = (int(i) for i in members[start : start + 1024])
            trained = [self.input_ids(i)[self.loss_mask(i) != 0] for i in chosen]
            counts += np.bincount(np.concatenate(trained), minlength=len(counts))
        return counts

    def _refuse(self, document: str, wrong: str) -> None:
        """Raise for a document whose own hash is right and whose contents make no sense: nothing may rest on it."""
        if wrong:
            raise DamagedError(f"{self.root / document} {wrong}", hint=self._hint)

    def _place(self, i: int) -> tuple[int, int, int]:
        at = self.index
        return int(at.shard[i]), int(at.row[i]), int(at.n_tokens[i])

    def _copied(self, i: int, array: str) -> npt.NDArray[np.uint8]:
        shard, row, n_rows = self._place(i)
        out = np.empty(n_rows * self.header.array(array).row_bytes, np.uint8)
        self.read_into(array, shard, row, out.data)
        return out

    def _shard(self, shard: int) -> snapshot.ShardFiles:
        if shard not in self._state.shards:
            raise NotFoundError(f"the store has no shard {shard}", hint=self._hint)
        return self._state.shards[shard]

    def _locate(self, key: shardfiles.Key) -> SealedFile:
        array, shard = key
        spec = self.header.array(array)
        relative = zarrmeta.chunk_path(spec, shard)

        def staged() -> Path:  # committed, not published yet: its staged name is as good
            return paths.staging(self.root, shard, self.record(shard).attempt) / paths.staged_name(array)

        return SealedFile(
            relative=relative,
            # Once more: between the first two looks a writer may have published it.
            paths=(lambda: self.root / relative, staged, lambda: self.root / relative),
            n_bytes=self._shard(shard).files[relative][0],
            row_bytes=spec.row_bytes,
            shard=shard,
            hint=self._hint,
        )

    @property
    def _hint(self) -> str:
        return f"run `hsstore verify manifest {self.root}`"


def _reopened(root: str, options: dict[str, Any]) -> Store:
    return Store(root, **options)
