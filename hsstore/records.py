"""The documents of a store as frozen records, and their one canonical spelling.

Responsible for: what store.json, layouts/N.json, records/N.json and manifest.json contain, how they are encoded
(canonical JSON: UTF-8, sorted keys, no spaces), hashed and decoded. Leaves to `manifest` how a manifest is compiled,
to `writer` when a record is written, to `verify` what a mismatch means.

Letters: S rows of a shard, C rows of a block (inner Zarr chunk), H hidden size, N samples.
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from hsstore.errors import DamagedError, FormatError, NotFoundError
from hsstore.plainfile import open_plain

FORMAT = 1
OMITTED = (
    msgspec.UNSET
)  # of a field that came later: left out of the JSON, so that documents of before keep their bytes
FLAG_FAILED = 1  # the verifier gave no states for this sample: its rows are zeros and no plan takes it

MOST_BYTES = 1 << 33  # of a document; the manifest of 10 M samples has a twelfth of it

_VERIFY = "run `hsstore verify manifest STORE`"

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """What was recorded and how. Two stores may be mixed only when these agree."""

    model: str
    """Name of the verifier: last component of its directory, or its hub id."""
    architecture: str
    """`architectures[0]` of its config.json."""
    revision: str
    """Hub revision, or "" for a plain directory."""
    weights_sha256: str
    """SHA-256 over the (name, bytes, SHA-256) lines of its weight files, in name order."""
    config_sha256: str
    """SHA-256 of config.json."""
    tokenizer_sha256: str
    """SHA-256 over tokenizer.json, or over the vocabulary files in name order."""
    chat_template_sha256: str
    """SHA-256 of the chat template's UTF-8 text, "" when there is none."""
    layers: tuple[str, ...]
    """Captured states in ascending order, `after_k` names, then `final`."""
    norm: Literal["post", "pre"]
    """Whether `final` is after (SGLang, transformers) or before (vLLM) the verifier's final norm."""
    hidden_size: int
    """H."""
    vocab_size: int
    """Verifier vocabulary."""
    n_layers: int
    """Number of decoder layers n; `final` is after n."""
    dtype: Literal["bfloat16"]
    """Logical dtype of the stored states."""
    engine: str
    """`sglang` or `transformers`."""
    engine_version: str
    compute_dtype: str
    """dtype the verifier ran in, e.g. `bfloat16` or `float32`."""
    flags: dict[str, str]
    """Engine settings that can change a state's bits, by name."""
    layer_ids: dict[str, tuple[int, ...]] | msgspec.UnsetType = OMITTED
    """The `after_k` of `layers` as other projects number them, see `spelled`. Follows from `layers`, for people."""

    def with_layers(self, layers: tuple[str, ...], **changes: Any) -> Capture:
        """The same with other states; `layer_ids` follow."""
        return dataclasses.replace(self, layers=layers, layer_ids=spelled(layers), **changes)


def spelled(layers: tuple[str, ...]) -> dict[str, tuple[int, ...]]:
    """Ids of the `after_k` among the states in both numberings there are: `hidden_states` is k, the index into
    transformers' `hidden_states` and vLLM's id; `layer_output` is k - 1, the 0-based layer whose output it is, as in
    SGLang, SpecForge and ModelOpt (which cannot name k = 0)."""
    ks = tuple(int(name.removeprefix("after_")) for name in layers if name != "final")
    return {"hidden_states": ks, "layer_output": tuple(k - 1 for k in ks)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Train/validation by a hash of the sample's uid: never by order, so that it survives growth and moves."""

    salt: str
    validation_fraction: float
    """Share of samples in `validation`, in [0, 1)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArraySpec:
    """One Zarr array of the store."""

    name: str
    """Path inside arrays.zarr, e.g. `hidden/after_2` or `tokens/input_ids`."""
    dtype: Literal["uint16", "int32", "uint8"]
    """Stored Zarr type."""
    logical_dtype: Literal["bfloat16", "int32", "uint8"]
    row_shape: tuple[int, ...]
    """Shape behind the token axis: (H,) or ()."""

    @property
    def row_bytes(self) -> int:
        width = {"uint16": 2, "int32": 4, "uint8": 1}[self.dtype]
        for n in self.row_shape:
            width *= n
        return width


@dataclass(frozen=True, slots=True, kw_only=True)
class Derivation:
    """The store that a smaller one was taken from."""

    uuid: str
    manifest_id: str
    """State of that store when it was read."""
    selection: dict[str, str]
    """What was asked for, by option: layers, samples, split, limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreHeader:
    """store.json: immutable, written once."""

    format: int
    uuid: str
    created: str
    """UTC, ISO 8601."""
    capture: Capture
    shard_rows: int
    """S."""
    chunk_rows: int
    """C."""
    arrays: tuple[ArraySpec, ...]
    """Hidden arrays in the order of `capture.layers`, then tokens."""
    split: Split
    derived_from: Derivation | msgspec.UnsetType = OMITTED
    """Only in a subset of another store."""
    self_sha256: str = ""

    def array(self, name: str) -> ArraySpec:
        for spec in self.arrays:
            if spec.name == name:
                return spec
        raise NotFoundError(f"the store has no array {name!r}; it has {', '.join(a.name for a in self.arrays)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class InputSummary:
    """Where the samples of a layout came from."""

    name: str
    """File name, without its directory."""
    bytes: int
    sha256: str
    lines: int
    rejected: dict[str, int]
    """Lines that gave no sample, counted by reason."""
    options: dict[str, str]
    """Settings that change which ids a line becomes (max_length, truncation …)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPlan:
    """What a layout puts into one shard."""

    n_samples: int
    n_rows: int
    """Rows in use; at most S."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutRecord:
    """layouts/N.json: which shards an input became. Immutable; growth adds the next one."""

    format: int
    store_uuid: str
    first_shard: int
    shards: tuple[ShardPlan, ...]
    n_samples: int
    n_tokens: int
    layout_sha256: str
    """SHA-256 over every placement; equal inputs give equal layouts, whoever computes them."""
    input: InputSummary
    first_source_index: int | msgspec.UnsetType = OMITTED
    """Of growth: added to the line number of its input; 0 when left out."""
    samples: tuple[int, ...] | msgspec.UnsetType = OMITTED
    """Of a redo: the source_index of every sample that is placed once more, ascending: its shard is quarantined, or it
    has no states there."""
    self_sha256: str = ""

    @property
    def is_redo(self) -> bool:
        """Whether it places samples of an earlier layout again, instead of an input's."""
        return self.samples is not OMITTED

    @property
    def offset(self) -> int:
        """What is added to a line number of its input to give a source_index."""
        return self.first_source_index or 0

    @property
    def numbers(self) -> range:
        """Its shards."""
        return range(self.first_shard, self.first_shard + len(self.shards))


@dataclass(frozen=True, slots=True, kw_only=True)
class Tombstone:
    """tombstones/N.n.json: whether shard N may be used; the highest n decides. Immutable."""

    format: int
    store_uuid: str
    shard: int
    number: int
    """n, from 0, without gaps."""
    action: Literal["quarantine", "release"]
    reason: str
    """For people."""
    created: str
    """UTC, ISO 8601."""
    writer: dict[str, str]
    """Version, host, pid."""
    self_sha256: str = ""


# One placed sample, spelled as an array in JSON: [uid, source_index, row, n_tokens, flags].
class SampleEntry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    uid: str
    """First 16 bytes of SHA-256 over its ids and mask, as 32 hex digits."""
    source_index: int
    """0-based line of the input (over all inputs of the store)."""
    row: int
    """First row inside the shard."""
    n_tokens: int
    flags: int = 0

    @property
    def ok(self) -> bool:
        return not self.flags & FLAG_FAILED


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """One sealed file of a shard."""

    bytes: int
    sha256: str
    crc32c_blocks: str
    """Base64 of little-endian u32, one per C rows in use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayStatistics:
    """Over the rows in use of one array of one shard."""

    rms: float
    absmax: float
    nan: int
    inf: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardRecord:
    """records/N.json: its existence commits shard N."""

    format: int
    store_uuid: str
    shard: int
    attempt: str
    """Unique name of the attempt that won; staging/N.<attempt> held its files."""
    n_rows: int
    samples: tuple[SampleEntry, ...]
    files: dict[str, FileEntry]
    """By path relative to the store."""
    statistics: dict[str, ArrayStatistics]
    """By array name, hidden arrays only."""
    failures: dict[str, str]
    """Reason by source_index (as text) of each sample flagged FAILED."""
    writer: dict[str, str]
    """Version, host, pid, engine: for people."""
    committed: str
    """UTC, ISO 8601."""
    self_sha256: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestShard:
    shard: int
    n_rows: int
    samples: tuple[SampleEntry, ...]
    files: dict[str, tuple[int, str]]
    """(bytes, sha256) by path relative to the store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """manifest.json: compiled from the records; its SHA-256 is the manifest_id.

    Holds contents only (no attempt, host, time or uuid), so that equal contents have equal ids wherever they lie.
    """

    format: int
    capture: Capture
    shard_rows: int
    chunk_rows: int
    arrays: tuple[ArraySpec, ...]
    split: Split
    shards: tuple[ManifestShard, ...]
    n_samples: int
    """Without failed ones."""
    n_failed: int
    n_tokens: int
    n_bytes: int


def canonical(document: Any) -> bytes:
    """The one spelling that is hashed: compact JSON, UTF-8, keys sorted at every level."""
    return msgspec.json.encode(document, order="sorted")


def sha256_hex(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def sealed(document: T) -> T:
    """Return the record with `self_sha256` = SHA-256 of its canonical JSON with `self_sha256` empty."""
    bare = dataclasses.replace(document, self_sha256="")  # type: ignore[type-var]
    return dataclasses.replace(bare, self_sha256=sha256_hex(canonical(bare)))  # type: ignore[type-var]


def decode(data: bytes, type_: type[T], where: str | Path, *, hint: str = _VERIFY) -> T:
    """Decode strictly. Raises `DamagedError` naming the file and the JSON path that does not fit."""
    try:
        return msgspec.json.decode(data, type=type_, strict=True)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DamagedError(f"{where} is not a valid {type_.__name__}: {error}", hint=hint) from None


def load_sealed(path: Path, type_: type[T], *, hint: str = _VERIFY) -> T:
    """Read, decode and check a self-hashed record.

    Raises `NotFoundError` when missing, `FormatError` for another format, `DamagedError` when the bytes on disk are
    not exactly the canonical spelling of a record with that hash (so any flipped bit shows, also in white space).
    `hint` is what helps against damage.
    """
    data = read_plain(path, hint=hint)
    check_format(data, path, hint=hint)
    document = decode(data, type_, path, hint=hint)
    if canonical(sealed(document)) != data:
        raise DamagedError(f"{path} does not match its own SHA-256", hint=hint)
    return document


def read_plain(path: Path, *, hint: str = _VERIFY) -> bytes:
    """A plain file's bytes.

    Raises `NotFoundError` when missing, `DamagedError` for anything else under that name (a FIFO would wait for ever),
    for a size that no document has (it may be one hole of a terabyte) and for a medium that gives an error.
    """
    try:
        with open(path, "rb", opener=lambda name, _: open_plain(name, hint=hint)) as file:
            size = os.fstat(file.fileno()).st_size
            if size > MOST_BYTES:
                raise DamagedError(f"{path} has {size} bytes, which is no document's size", hint=hint)
            return file.read()
    except (FileNotFoundError, NotADirectoryError):
        raise NotFoundError(f"{path} does not exist") from None
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        raise DamagedError(f"{path} cannot be read: {error.strerror}", hint=hint) from None


def check_format(data: bytes, where: str | Path, *, hint: str = _VERIFY) -> None:
    """Refuse a document of another format before its fields can confuse anybody.

    Raises `FormatError` for a whole document of another format, `DamagedError` when its own hash says that the number
    was damaged. What is no JSON object is left to `decode`.
    """
    try:
        document = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return
    if not isinstance(document, dict) or not isinstance(document.get("format"), int) or document["format"] == FORMAT:
        return
    claimed = document.get("self_sha256")
    if claimed is not None and claimed != sha256_hex(canonical(document | {"self_sha256": ""})):
        raise DamagedError(f"{where} does not match its own SHA-256", hint=hint)
    raise FormatError(
        f"{where} has format {document['format']}; this hsstore reads format {FORMAT}", hint="use a matching release"
    )
