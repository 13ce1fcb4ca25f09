"""The store of a run: opened or made, once it is sure that this run and that store are of one capture.

Responsible for comparing what a run would capture with what the store was begun with, before the verifier is loaded
and again when the engine has said what it is. Leaves the comparison itself to `fingerprint`, shards to `capture`.
"""

from __future__ import annotations

from dataclasses import dataclass

from extractor import fingerprint
from extractor.engines import choose_engine
from extractor.engines.base import EngineInfo
from extractor.input import Input, differences_from_store, digest_weights
from extractor.settings import Settings
from hsstore import manifest
from hsstore.errors import ConflictError, UsageError
from hsstore.growth import Placed, open_input
from hsstore.records import Capture, Split, StoreHeader
from hsstore.writer import StoreWriter

_DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A store opened for writing at one input."""

    writer: StoreWriter
    number: int
    """Of the input's layout."""
    placed: Placed
    """Every shard that the input has."""

    @property
    def offset(self) -> int:
        """What is added to a line number to give a source_index."""
        return self.writer.layouts[self.number].offset

    def todo(self) -> list[int]:
        return [n for n in self.writer.todo() if n in self.placed]


class Opening:
    """What this run would capture, next to what the store was begun with."""

    def __init__(self, settings: Settings, given: Input, header: StoreHeader | None) -> None:
        self._settings, self._given = settings, given
        stored = header.capture if header else None
        self.engine_name = choose_engine(settings.engine, stored.engine if stored else "", settings.urls)
        self._mode = settings.weights_digest or (fingerprint.digest_mode(stored) if stored else "full")
        self._weights = digest_weights(given.verifier, self._mode)
        self.dtype = settings.dtype
        if self.dtype == "auto":
            self.dtype = given.verifier.dtype if given.verifier.dtype in _DTYPES else "bfloat16"
        self._split = Split(salt=settings.split_salt, validation_fraction=settings.validation_fraction)

    def open(self) -> Target:
        """The store that is there, once it is sure that it was made by this model, input and options.

        Compares all that is known before the engine is up. Raises `ConflictError` naming every difference.
        """
        out = self._settings.out
        header = manifest.load_header(out)
        new = self._capture(fingerprint.info_before_start(header.capture, self.engine_name, self.dtype))
        differences = fingerprint.capture_differences(header.capture, new)
        differences += differences_from_store(self._settings, self._given.prompts)
        fingerprint.refuse(out, differences)
        summary = self._given.prompts.summary
        writer, number, placed = open_input(
            out,
            self._given.entries,
            summary,
            append=self._settings.append,
            retry_failed=self._settings.retry_failed,
        )
        return Target(writer=writer, number=number, placed=placed)

    def matching(self, target: Target | None, info: EngineInfo) -> Target:
        """The open store, or a new one, once the engine has said what it is."""
        longest = self._given.prompts.longest
        if longest > info.longest_tokens:
            raise UsageError(
                f"the {info.engine} engine takes at most {info.longest_tokens} tokens, the longest sample {longest}",
                hint=f"give --max-length {info.longest_tokens}, or a larger pool with --engine-option",
            )
        capture = self._capture(info)
        try:
            target = target or self._create(capture)
        except ConflictError:
            if not self._settings.continues:
                raise
            target = self.open()  # another process with the same command was first: share the work
        stored = target.writer.header.capture
        fingerprint.refuse(target.writer.root, fingerprint.capture_differences(stored, capture))
        return target

    def _create(self, capture: Capture) -> Target:
        writer = StoreWriter.create(
            self._settings.out,
            capture=capture,
            split=self._split,
            samples=self._given.entries,
            input_summary=self._given.prompts.summary,
            shard_rows=self._settings.shard_rows,
        )
        return Target(writer=writer, number=0, placed=dict(self._given.shape.shards))

    def _capture(self, info: EngineInfo) -> Capture:
        return fingerprint.capture_of(self._given.verifier, self._given.layers, self._weights, self._mode, info)
