"""One extraction from start to end: read, lay out, refuse what cannot be, capture, finish, account.

The order is the point: everything that can be wrong with the call (model, layers, prompts, another capture in the
store, a disk too small) is found before the verifier is loaded. Leaves the loop over shards to `extractor.capture`,
words and exit codes to `extractor.report` and `extractor.cli`.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from extractor import estimate, fingerprint
from extractor.capture import ShardRun
from extractor.engines import choose_engine, start_engine
from extractor.engines.base import Engine, EngineInfo
from extractor.input import Input, differences_from_store, digest_weights, read_input
from extractor.report import Failure, Outcome, skipped, warn_failures, write_failures
from extractor.settings import Settings
from extractor.target import refuse_unwritable
from extractor.words import counted
from hsstore import garbage, manifest, paths
from hsstore.console import Progress, human_bytes, human_count, note, warn
from hsstore.errors import ConflictError, HsstoreError, NotFoundError, UsageError
from hsstore.growth import Placed, layout_of, open_input
from hsstore.records import Capture, ShardRecord, Split, StoreHeader
from hsstore.writer import StoreWriter

_DTYPES = ("bfloat16", "float16", "float32")


def extract(settings: Settings) -> Outcome:
    """Run the extraction. Raises the errors of `hsstore.errors`; whatever is raised, committed shards are kept."""
    exists = _existing(settings)
    refuse_unwritable(settings)
    given = read_input(settings)
    run = _Run(settings, given, manifest.load_header(settings.out) if exists else None)
    target = run.open() if exists else None
    if target and (freed := _tidy(settings.out)):
        note(f"removed {human_bytes(freed)} that a killed run had left in {settings.out / paths.STAGING}")
    shape = replace(given.shape, shards=target.placed) if target else given.shape
    todo = target.todo() if target else sorted(shape.shards)
    estimate.refuse_if_full(settings.out, estimate.needed_bytes(shape, todo, given.bytes_per_token))
    seconds, n_tokens = 0.0, 0
    if todo:
        with run.engine() as engine:
            target = run.matching_target(target, engine.info)
            seconds, n_tokens = _capture(target, todo, engine, given, settings)
    else:
        note(f"{settings.out} is complete already")
    assert target is not None
    _tidy(settings.out)
    return _finish(target, given, settings, seconds, n_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Target:
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


def _tidy(out: Path) -> int:
    """Remove what dead runs left in the store. Returns the bytes that this freed."""
    try:
        return garbage.remove(garbage.find(out))
    except OSError as error:
        if error.errno != errno.EROFS:  # a complete store on a read-only disk keeps its garbage
            raise
        return 0


def dry_run(settings: Settings) -> estimate.Estimate:
    """What the extraction would take. Loads the tokenizer, not the model; changes nothing."""
    refuse_unwritable(settings)
    given = read_input(settings)
    shape, prompts, per_token = given.shape, given.prompts, given.bytes_per_token
    todo = sorted(shape.shards)
    if settings.continues:
        fingerprint.refuse(settings.out, differences_from_store(settings, given.prompts))
        todo = _open_shards(settings.out, given)
    return estimate.Estimate(
        samples=len(prompts.samples),
        tokens=prompts.n_tokens,
        assistant_tokens=sum(int(s.loss_mask.sum()) for s in prompts.samples),
        truncated=prompts.n_truncated,
        longest_tokens=prompts.longest,
        bytes_per_token=per_token,
        bytes_per_sample_mean=prompts.n_tokens * per_token // len(prompts.samples),
        bytes_per_sample_max=prompts.longest * per_token,
        total_bytes=estimate.shard_bytes(shape, shape.shards, per_token),
        needed_bytes=estimate.needed_bytes(shape, todo, per_token),
        free_bytes=estimate.free_bytes(settings.out),
        shards=len(shape.shards),
        shards_done=len(shape.shards) - len(todo),
        shard_rows=shape.shard_rows,
        chunk_rows=shape.chunk_rows,
        lines=prompts.summary.lines,
        rejected=prompts.summary.rejected,
        layers=given.layers,
        hidden_size=given.verifier.hidden_size,
    )


def _open_shards(out: Path, given: Input) -> list[int]:
    """Which shards of the input's own layout, counted from 0, have no usable record in the store."""
    header = manifest.load_header(out)
    layouts = manifest.load_layouts(out, header)
    number = layout_of(layouts, given.prompts.summary)
    if number is None:
        return sorted(given.shape.shards)
    done = set(paths.numbers_in(out / paths.RECORDS))
    done -= set(manifest.quarantined(manifest.load_tombstones(out, header)))
    return [i for i, shard in enumerate(layouts[number].numbers) if shard not in done]


def _existing(settings: Settings) -> bool:
    """Whether there is a store to write on. Raises `ConflictError` when one is there and no option allows it."""
    out = settings.out
    if settings.out_is_store:
        if not settings.continues:
            hint = "add --resume to continue it, --append to grow it by other prompts, or give another --out"
            raise ConflictError(f"{out} is a store already", hint=hint)
        return True
    if settings.append:
        raise NotFoundError(f"--append: {out} is no store", hint="leave --append out to make one")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConflictError(f"{out} exists and is no store", hint="give another --out")
    return False


class _Run:
    """What this run would capture, next to what the store was begun with."""

    def __init__(self, settings: Settings, given: Input, header: StoreHeader | None) -> None:
        self._settings, self._given = settings, given
        stored = header.capture if header else None
        self._name = choose_engine(settings.engine, stored.engine if stored else "")
        self._mode = settings.weights_digest or (fingerprint.digest_mode(stored) if stored else "full")
        self._weights = digest_weights(given.verifier, self._mode)
        self._dtype = settings.dtype
        if self._dtype == "auto":
            self._dtype = given.verifier.dtype if given.verifier.dtype in _DTYPES else "bfloat16"
        self._split = Split(salt=settings.split_salt, validation_fraction=settings.validation_fraction)

    def open(self) -> _Target:
        """The store that is there, once it is sure that it was made by this model, input and options.

        Compares all that is known before the engine is up. Raises `ConflictError` naming every difference.
        """
        out = self._settings.out
        header = manifest.load_header(out)
        new = self._capture(fingerprint.info_before_start(header.capture, self._name, self._dtype))
        differences = fingerprint.capture_differences(header.capture, new)
        differences += differences_from_store(self._settings, self._given.prompts)
        fingerprint.refuse(out, differences)
        summary = self._given.prompts.summary
        writer, number, placed = open_input(out, self._given.entries, summary, append=self._settings.append)
        return _Target(writer=writer, number=number, placed=placed)

    @contextmanager
    def engine(self) -> Iterator[Engine]:
        """The verifier, loaded; closed at the end."""
        note(f"starting {self._name} with {self._given.verifier.name} in {self._dtype}")
        engine = start_engine(
            self._name,
            self._given.verifier.path,
            layers=self._given.layers,
            dtype=self._dtype,
            trust_remote_code=self._settings.trust_remote_code,
            options=self._settings.engine_options,
        )
        try:
            yield engine
        finally:
            engine.close()

    def matching_target(self, target: _Target | None, info: EngineInfo) -> _Target:
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

    def _create(self, capture: Capture) -> _Target:
        writer = StoreWriter.create(
            self._settings.out,
            capture=capture,
            split=self._split,
            samples=self._given.entries,
            input_summary=self._given.prompts.summary,
            shard_rows=self._settings.shard_rows,
        )
        return _Target(writer=writer, number=0, placed=dict(self._given.shape.shards))

    def _capture(self, info: EngineInfo) -> Capture:
        return fingerprint.capture_of(self._given.verifier, self._given.layers, self._weights, self._mode, info)


class _Listener:
    """Progress of a run, in samples of its input."""

    def __init__(self, progress: Progress, done: int, per_token: int) -> None:
        self._progress, self._done, self._per_token = progress, done, per_token
        self.n_tokens = 0
        self._started = time.monotonic()
        self._waits = False

    def sample_done(self, n_tokens: int, ok: bool) -> None:
        self._done += 1
        self.n_tokens += n_tokens
        rate = self.n_tokens / max(1e-9, time.monotonic() - self._started)
        self._progress.update(
            self._done, f"{human_count(round(rate))} tok/s · {human_bytes(self.n_tokens * self._per_token)}"
        )

    def shard_elsewhere(self, n_samples: int) -> None:
        self._done += n_samples
        self._progress.update(self._done, self._progress.detail)

    def waiting(self, n_shards: int) -> None:
        if not self._waits:
            note(f"other processes are at the last {counted(n_shards, 'shard')}; waiting for them (or their end)")
        self._waits = True

    def shard_done(self, record: ShardRecord | None) -> None:
        if record is None:
            return
        bad = {name: s for name, s in record.statistics.items() if s.nan or s.inf}
        for name, s in bad.items():
            warn(
                f"shard {record.shard} has {s.nan} NaN and {s.inf} Inf in {name}: the verifier overflowed; try --dtype"
            )


def _capture(target: _Target, todo: list[int], engine: Engine, given: Input, settings: Settings) -> tuple[float, int]:
    """Returns the seconds it took and the tokens that this process captured."""
    samples = {s.source_index + target.offset: s for s in given.prompts.samples}
    n_todo = sum(len(target.placed[n]) for n in todo)
    if n_todo < len(samples):
        note(f"{human_count(len(samples) - n_todo)} of {human_count(len(samples))} samples are committed already")
    started = time.monotonic()
    with Progress(n_todo, "extracting", unit="samples") as progress:
        listener = _Listener(progress, 0, given.bytes_per_token)
        run = ShardRun(target.writer, target.placed, samples, engine, listener, settings.lease_seconds)
        run.run(todo)
    return time.monotonic() - started, listener.n_tokens


def _finish(target: _Target, given: Input, settings: Settings, seconds: float, tokens: int) -> Outcome:
    """Rebuild what is derived, and account for every line of the input."""
    writer = target.writer
    records = [r for r in manifest.load_records(writer.root, writer.header) if r.shard in target.placed]
    manifest_id = writer.finish()
    samples = {s.source_index: s for record in records for s in record.samples}
    reasons = {int(i): reason for record in records for i, reason in record.failures.items()}
    failed = [
        Failure(line=i + 1 - target.offset, status="failed", reason="engine", detail=r)
        for i, r in sorted(reasons.items())
    ]
    listed = write_failures(settings.report, [*skipped(given.prompts), *failed])
    warn_failures(failed, listed)
    outcome = Outcome(
        store=str(settings.out),
        manifest_id=manifest_id,
        complete=not target.todo(),
        input=given.prompts.summary.lines,
        written=len(samples) - len(failed),
        failed=len(failed),
        skipped=len(given.prompts.rejections),
        remaining=len(given.entries) - len(samples),
        rejected=given.prompts.summary.rejected,
        truncated=given.prompts.n_truncated,
        tokens=sum(s.n_tokens for s in samples.values() if s.ok),
        bytes=sum(entry.bytes for record in records for entry in record.files.values()),
        shards=len(records),
        seconds=round(seconds, 3),
        tokens_per_second=round(tokens / seconds, 1) if seconds else 0.0,
        failures_file=listed,
    )
    balance = outcome.written + outcome.failed + outcome.skipped + outcome.remaining
    if balance != outcome.input:
        raise HsstoreError(f"{outcome.balance} does not come out: {balance}", hint="run `hsstore verify manifest`")
    return outcome
