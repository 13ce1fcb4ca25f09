"""One extraction from start to end: read, lay out, refuse what cannot be, capture, finish, account.

The order is the point: everything that can be wrong with the call (model, layers, prompts, another capture in the
store, a disk too small) is found before the verifier is loaded. Leaves the loop over shards to `extractor.capture`,
words and exit codes to `extractor.report` and `extractor.cli`.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from extractor import estimate, fingerprint
from extractor.account import account, account_for_nothing
from extractor.capture import ShardRun
from extractor.engines import start_engine
from extractor.engines.base import Engine
from extractor.firstlook import FirstLook
from extractor.fleet.part import parse_part
from extractor.input import Input, differences_from_store, read_input
from extractor.opening import Opening, Target
from extractor.progress import ProgressWatcher
from extractor.report import Outcome
from extractor.settings import Settings
from extractor.supervise import Breaker, SupervisedEngine
from extractor.target import refuse_lists, refuse_unwritable
from extractor.watch.events import Many, Watcher
from extractor.watching import disk_guard, facts_of, failure_list, watching
from extractor.words import counted
from hsstore import garbage, manifest, paths
from hsstore.console import Progress, human_bytes, human_count, note
from hsstore.errors import ConflictError, NotFoundError
from hsstore.growth import layout_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """All that is known, and found right, before an engine is loaded."""

    given: Input
    opening: Opening
    target: Target | None
    """The store, when there is one already."""
    shape: estimate.Shape
    """With every shard that the input has."""
    todo: list[int]
    """Shards of the input that are not committed, whoever will do them."""


def prepare(settings: Settings) -> Prepared:
    """Read, lay out, compare with the store, and refuse what cannot be."""
    exists = _existing(settings)
    refuse_unwritable(settings)
    given = read_input(settings)
    opening = Opening(settings, given, manifest.load_header(settings.out) if exists else None)
    target = opening.open() if exists else None
    if target and (freed := tidy(settings.out)):
        note(f"removed {human_bytes(freed)} that a killed run had left in {settings.out / paths.STAGING}")
    shape = replace(given.shape, shards=target.placed) if target else given.shape
    todo = target.todo() if target else sorted(shape.shards)
    # Of all shards, also those of other parts: they will lie on the same disk.
    estimate.refuse_without_room(settings.out, shape, todo, given.bytes_per_token, settings.min_free or 0)
    return Prepared(given=given, opening=opening, target=target, shape=shape, todo=todo)


def extract(settings: Settings, listeners: Iterable[Watcher] = ()) -> Outcome:
    """Run the extraction. Raises the errors of `hsstore.errors`; whatever is raised, committed shards are kept."""
    refuse_lists(settings)
    with watching(settings, listeners) as watchers:
        outcome = _extract(settings, watchers)
        watchers.run_finished(outcome.written, outcome.failed, outcome.skipped, outcome.remaining)
    return outcome


def _extract(settings: Settings, watchers: Many) -> Outcome:
    part = parse_part(settings.shard, os.environ) if settings.shard is not None else None
    prepared = prepare(settings)
    given, opening, target = prepared.given, prepared.opening, prepared.target
    todo = part.of(prepared.todo) if part else prepared.todo
    watchers.run_started(facts_of(settings, given, opening.engine_name, prepared.shape, todo))
    seconds, n_tokens = 0.0, 0
    if part:
        note(f"part {part}: {len(todo)} of the {counted(len(prepared.todo), 'shard')} that are left")
    if todo:
        breaker = Breaker(settings.max_consecutive_errors)
        note(f"{_who(settings, opening)} {given.verifier.name} in {opening.dtype}")
        engine = SupervisedEngine(opening.engine_name, lambda: _start(opening, given, settings), breaker, watchers)
        with closing(engine):
            target = opening.matching(target, engine.info)
            seconds, n_tokens = _capture(target, todo, engine, given, settings, breaker, watchers)
    elif not prepared.todo:
        note(f"{settings.out} is complete already")
    if target is None:  # other parts have not made it yet, and this one has nothing to put into it
        return account_for_nothing(given, settings, part)
    tidy(settings.out)
    return account(target, given, settings, seconds, n_tokens, part)


def _who(settings: Settings, opening: Opening) -> str:
    if settings.urls:
        return f"asking {counted(len(settings.urls), 'server')} for"
    return f"starting {opening.engine_name} with"


def _start(opening: Opening, given: Input, settings: Settings) -> Engine:
    return start_engine(
        opening.engine_name,
        given.verifier.path,
        layers=given.layers,
        dtype=opening.dtype,
        trust_remote_code=settings.trust_remote_code,
        options=settings.engine_options,
        urls=settings.urls,
        transfer=settings.transfer,
        token_file=settings.token_file,
    )


def tidy(out: Path) -> int:
    """Remove what dead runs left in the store. Returns the bytes that this freed."""
    try:
        return garbage.remove(garbage.find(out))
    except OSError as error:
        if error.errno != errno.EROFS:  # a complete store on a read-only disk keeps its garbage
            raise
        return 0


def dry_run(settings: Settings) -> estimate.Estimate:
    """What the extraction would take. Loads the tokenizer, not the model; changes nothing."""
    if settings.shard is not None:
        parse_part(settings.shard, os.environ)  # the estimate is of the whole; a wrong part is refused all the same
    refuse_lists(settings)
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
        needed_bytes=estimate.needed_bytes(shape, todo, per_token) + (settings.min_free or 0 if todo else 0),
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


def _capture(
    target: Target,
    todo: list[int],
    engine: Engine,
    given: Input,
    settings: Settings,
    breaker: Breaker,
    watchers: Many,
) -> tuple[float, int]:
    """Returns the seconds it took and the tokens that this process captured."""
    samples = {s.source_index + target.offset: s for s in given.prompts.samples}
    n_todo = sum(len(target.placed[n]) for n in todo)
    if n_done := len(samples) - sum(len(target.placed[n]) for n in target.todo()):
        note(f"{human_count(n_done)} of {human_count(len(samples))} samples are committed already")
    started = time.monotonic()
    guard = disk_guard(settings, given, target, todo, watchers)
    failures, known_failures = failure_list(settings, given, target, samples)
    watchers.add(guard)
    watchers.add(failures)
    with Progress(n_todo, "extracting", unit="samples") as progress:
        shown = ProgressWatcher(progress, given.bytes_per_token)
        watchers.add(shown)
        work = ShardRun(
            target.writer,
            target.placed,
            samples,
            engine,
            watchers,
            breaker=breaker,
            guard=guard,
            first=FirstLook(settings, str(given.verifier.path), target.writer.header.capture)
            if settings.check_first
            else None,
            known_failures=known_failures,
            lease_seconds=settings.lease_seconds,
        )
        work.run(todo)
    return time.monotonic() - started, shown.n_tokens
