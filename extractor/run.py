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
from extractor.input import Input, digest_weights, read_input
from extractor.report import Failure, Outcome, skipped, warn_failures, write_failures
from extractor.settings import Settings
from extractor.sweep import sweep
from hsstore import manifest, paths
from hsstore.console import Progress, human_bytes, human_count, note, warn
from hsstore.errors import ConflictError, HsstoreError, UsageError
from hsstore.records import ShardRecord, Split
from hsstore.writer import StoreWriter

_DTYPES = ("bfloat16", "float16", "float32")


def extract(settings: Settings) -> Outcome:
    """Run the extraction. Raises the errors of `hsstore.errors`; whatever is raised, committed shards are kept."""
    exists = _existing(settings)
    given = read_input(settings)
    writer = StoreWriter.open(settings.out) if exists else None
    engine_name = choose_engine(settings.engine, writer.header.capture.engine if writer else "")
    weights = digest_weights(given.verifier, settings)
    if writer is not None:
        _check_same(writer, given, settings, weights, engine_name)
        if freed := sweep(writer):
            note(f"removed {human_bytes(freed)} that a killed run had left in {settings.out / paths.STAGING}")
    todo = writer.todo() if writer else range(len(given.shape.shards))
    estimate.refuse_if_full(settings.out, estimate.needed_bytes(given.shape, todo, given.bytes_per_token))
    seconds = 0.0
    if todo:
        with _running(engine_name, given, settings) as engine:
            writer = _matching_writer(writer, engine.info, given, settings, weights)
            seconds = _capture(writer, todo, engine, given)
    assert writer is not None
    return _finish(writer, given, settings, seconds, tokens=_tokens_of(given, todo))


def dry_run(settings: Settings) -> estimate.Estimate:
    """What the extraction would take. Loads the tokenizer, not the model; changes nothing."""
    given = read_input(settings)
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


def _check_same(writer: StoreWriter, given: Input, settings: Settings, weights: str, engine: str) -> None:
    """Refuse to mix: compares all that is known before the engine is up, and names every difference at once."""
    old = writer.header.capture
    known = EngineInfo(
        engine=engine,
        version=old.engine_version,
        norm=old.norm,
        compute_dtype=old.compute_dtype,
        longest_tokens=0,
        flags={},
    )
    new = fingerprint.capture_of(given.verifier, given.layers, weights, settings.weights_digest, known)
    differences = fingerprint.capture_differences(old, new, engine=False)
    if engine != old.engine:
        differences.append(f"engine: {old.engine} → {engine}")
    differences += fingerprint.input_differences(writer.layout.input, given.prompts.summary)
    differences += fingerprint.header_differences(writer.header, _split(settings), settings.shard_rows)
    fingerprint.refuse(settings.out, differences)
    writer.check_layout(given.shape.shards)


def _matching_writer(
    writer: StoreWriter | None, info: EngineInfo, given: Input, settings: Settings, weights: str
) -> StoreWriter:
    """The open store, or a new one, once the engine has said what it is."""
    if given.prompts.longest > info.longest_tokens:
        raise UsageError(
            f"the {info.engine} engine takes at most {info.longest_tokens} tokens, the longest sample has"
            f" {given.prompts.longest}",
            hint=f"give --max-length {info.longest_tokens}, or a larger pool with --engine-option",
        )
    capture = fingerprint.capture_of(given.verifier, given.layers, weights, settings.weights_digest, info)
    if writer is not None:
        fingerprint.refuse(settings.out, fingerprint.capture_differences(writer.header.capture, capture, engine=True))
        return writer
    return StoreWriter.create(
        settings.out,
        capture=capture,
        split=_split(settings),
        samples=given.entries,
        input_summary=given.prompts.summary,
        shard_rows=settings.shard_rows,
    )


def _split(settings: Settings) -> Split:
    return Split(salt=settings.split_salt, validation_fraction=settings.validation_fraction)


@contextmanager
def _running(name: str, given: Input, settings: Settings) -> Iterator[Engine]:
    dtype = settings.dtype
    if dtype == "auto":
        dtype = given.verifier.dtype if given.verifier.dtype in _DTYPES else "bfloat16"
    note(f"starting {name} with {given.verifier.name} in {dtype}")
    engine = start_engine(
        name,
        given.verifier.path,
        layers=given.layers,
        dtype=dtype,
        trust_remote_code=settings.trust_remote_code,
        options=settings.engine_options,
    )
    try:
        yield engine
    finally:
        engine.close()


def _tokens_of(given: Input, todo: range | list[int]) -> int:
    return sum(e.n_tokens for n in todo for e in given.shape.shards[n])


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


def _capture(writer: StoreWriter, todo: range | list[int], engine: Engine, given: Input) -> float:
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
    sweep(writer)
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
