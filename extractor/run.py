"""One extraction from start to end: read, lay out, refuse what cannot be, capture, finish, account.

The order is the point: everything that can be wrong with the call (model, layers, prompts, another capture in the
store, a disk too small) is found before the verifier is loaded. Leaves the loop over shards to `extractor.capture`,
words and exit codes to `extractor.report` and `extractor.cli`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from extractor import estimate, fingerprint
from extractor.capture import ShardRun
from extractor.engines import choose_engine, start_engine
from extractor.engines.base import Engine, EngineInfo
from extractor.input import Input, differences_from_store, digest_weights, read_input
from extractor.report import Failure, Outcome, skipped, warn_failures, write_failures
from extractor.settings import Settings
from extractor.sweep import sweep
from extractor.target import refuse_unwritable
from hsstore import manifest, paths
from hsstore.console import Progress, human_bytes, human_count, note, warn
from hsstore.errors import ConflictError, HsstoreError, UsageError
from hsstore.records import Capture, ShardRecord, Split
from hsstore.writer import StoreWriter

_DTYPES = ("bfloat16", "float16", "float32")


def extract(settings: Settings) -> Outcome:
    """Run the extraction. Raises the errors of `hsstore.errors`; whatever is raised, committed shards are kept."""
    started = time.time()
    exists = _existing(settings)
    refuse_unwritable(settings)
    given = read_input(settings)
    writer = StoreWriter.open(settings.out) if exists else None
    run = _Run(settings, given, writer)
    if writer is not None:
        run.refuse_another_capture(writer)
        if freed := sweep(writer, started):
            note(f"removed {human_bytes(freed)} that a killed run had left in {settings.out / paths.STAGING}")
    todo = writer.todo() if writer else list(range(len(given.shape.shards)))
    estimate.refuse_if_full(settings.out, estimate.needed_bytes(given.shape, todo, given.bytes_per_token))
    seconds = 0.0
    if todo:
        with run.engine() as engine:
            writer = run.matching_writer(writer, engine.info)
            seconds = _capture(writer, todo, engine, given)
    else:
        note(f"{settings.out} is complete already")
    assert writer is not None
    sweep(writer, started)
    return _finish(
        writer, given, settings, seconds, tokens=sum(e.n_tokens for n in todo for e in given.shape.shards[n])
    )


def dry_run(settings: Settings) -> estimate.Estimate:
    """What the extraction would take. Loads the tokenizer, not the model; changes nothing."""
    refuse_unwritable(settings)
    given = read_input(settings)
    if settings.resume and settings.out_is_store:
        fingerprint.refuse(settings.out, differences_from_store(settings, given.prompts))
    shape, prompts, per_token = given.shape, given.prompts, given.bytes_per_token
    done = paths.numbers_in(settings.out / paths.RECORDS) if settings.out_is_store else []
    todo = sorted(set(range(len(shape.shards))) - set(done))
    return estimate.Estimate(
        samples=len(prompts.samples),
        tokens=prompts.n_tokens,
        assistant_tokens=sum(int(s.loss_mask.sum()) for s in prompts.samples),
        truncated=prompts.n_truncated,
        longest_tokens=prompts.longest,
        bytes_per_token=per_token,
        bytes_per_sample_mean=prompts.n_tokens * per_token // len(prompts.samples),
        bytes_per_sample_max=prompts.longest * per_token,
        total_bytes=estimate.shard_bytes(shape, range(len(shape.shards)), per_token),
        needed_bytes=estimate.needed_bytes(shape, todo, per_token),
        free_bytes=estimate.free_bytes(settings.out),
        shards=len(shape.shards),
        shards_done=len(done),
        shard_rows=shape.shard_rows,
        chunk_rows=shape.chunk_rows,
        lines=prompts.summary.lines,
        rejected=prompts.summary.rejected,
        layers=given.layers,
        hidden_size=given.verifier.hidden_size,
    )


def _existing(settings: Settings) -> bool:
    """Whether there is a store to resume. Raises `ConflictError` when one is there and --resume was not given."""
    out = settings.out
    if settings.out_is_store:
        if not settings.resume:
            raise ConflictError(f"{out} is a store already", hint="add --resume to continue it, or give another --out")
        return True
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConflictError(f"{out} exists and is no store", hint="give another --out")
    return False


class _Run:
    """What this run would capture, next to what the store was begun with."""

    def __init__(self, settings: Settings, given: Input, writer: StoreWriter | None) -> None:
        self._settings, self._given = settings, given
        stored = writer.header.capture if writer else None
        self._name = choose_engine(settings.engine, stored.engine if stored else "")
        self._mode = settings.weights_digest or (fingerprint.digest_mode(stored) if stored else "full")
        self._weights = digest_weights(given.verifier, self._mode)
        self._dtype = settings.dtype
        if self._dtype == "auto":
            self._dtype = given.verifier.dtype if given.verifier.dtype in _DTYPES else "bfloat16"
        self._split = Split(salt=settings.split_salt, validation_fraction=settings.validation_fraction)

    def refuse_another_capture(self, writer: StoreWriter) -> None:
        """Compare all that is known before the engine is up. Raises `ConflictError` naming every difference."""
        old = writer.header.capture
        new = self._capture(fingerprint.info_before_start(old, self._name, self._dtype))
        differences = fingerprint.capture_differences(old, new)
        differences += fingerprint.input_differences(writer.layout.input, self._given.prompts.summary)
        differences += fingerprint.header_differences(writer.header, self._split, self._settings.shard_rows)
        fingerprint.refuse(writer.root, differences)
        writer.check_layout(self._given.shape.shards)

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

    def matching_writer(self, writer: StoreWriter | None, info: EngineInfo) -> StoreWriter:
        """The open store, or a new one, once the engine has said what it is."""
        longest = self._given.prompts.longest
        if longest > info.longest_tokens:
            raise UsageError(
                f"the {info.engine} engine takes at most {info.longest_tokens} tokens, the longest sample {longest}",
                hint=f"give --max-length {info.longest_tokens}, or a larger pool with --engine-option",
            )
        capture = self._capture(info)
        if writer is not None:
            fingerprint.refuse(writer.root, fingerprint.capture_differences(writer.header.capture, capture))
            return writer
        return StoreWriter.create(
            self._settings.out,
            capture=capture,
            split=self._split,
            samples=self._given.entries,
            input_summary=self._given.prompts.summary,
            shard_rows=self._settings.shard_rows,
        )

    def _capture(self, info: EngineInfo) -> Capture:
        return fingerprint.capture_of(self._given.verifier, self._given.layers, self._weights, self._mode, info)


class _Listener:
    """Progress of a run, in samples of the whole store."""

    def __init__(self, progress: Progress, done: int, per_token: int) -> None:
        self._progress, self._done, self._per_token = progress, done, per_token
        self._n_tokens = 0
        self._started = time.monotonic()

    def sample_done(self, n_tokens: int, ok: bool) -> None:
        self._done += 1
        self._n_tokens += n_tokens
        rate = self._n_tokens / max(1e-9, time.monotonic() - self._started)
        self._progress.update(
            self._done, f"{human_count(round(rate))} tok/s · {human_bytes(self._n_tokens * self._per_token)}"
        )

    def shard_done(self, record: ShardRecord | None) -> None:
        if record is None:
            return
        bad = {name: s for name, s in record.statistics.items() if s.nan or s.inf}
        for name, s in bad.items():
            warn(
                f"shard {record.shard} has {s.nan} NaN and {s.inf} Inf in {name}: the verifier overflowed; try --dtype"
            )


def _capture(writer: StoreWriter, todo: list[int], engine: Engine, given: Input) -> float:
    samples = {s.source_index: s for s in given.prompts.samples}
    n_todo = sum(len(given.shape.shards[n]) for n in todo)
    if n_todo < len(samples):
        note(f"{human_count(len(samples) - n_todo)} of {human_count(len(samples))} samples are committed already")
    started = time.monotonic()
    with Progress(n_todo, "extracting", unit="samples") as progress:
        listener = _Listener(progress, 0, given.bytes_per_token)
        ShardRun(writer, given.shape.shards, samples, engine, listener).run(todo)
    return time.monotonic() - started


def _finish(writer: StoreWriter, given: Input, settings: Settings, seconds: float, tokens: int) -> Outcome:
    """Rebuild what is derived, and account for every line of the input."""
    records = manifest.load_records(writer.root, writer.header)
    manifest_id = writer.finish()
    samples = [s for record in records for s in record.samples]
    reasons = {int(i): reason for record in records for i, reason in record.failures.items()}
    failed = [Failure(line=i + 1, status="failed", reason="engine", detail=r) for i, r in sorted(reasons.items())]
    listed = write_failures(settings.report, [*skipped(given.prompts), *failed])
    warn_failures(failed, listed)
    outcome = Outcome(
        store=str(settings.out),
        manifest_id=manifest_id,
        complete=not writer.todo(),
        input=given.prompts.summary.lines,
        written=len(samples) - len(failed),
        failed=len(failed),
        skipped=len(given.prompts.rejections),
        remaining=len(given.entries) - len(samples),
        rejected=given.prompts.summary.rejected,
        truncated=given.prompts.n_truncated,
        tokens=sum(s.n_tokens for s in samples if s.ok),
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
