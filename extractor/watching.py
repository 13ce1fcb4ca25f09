"""Everyone who hears an extraction: the watchers that the settings ask for, opened and closed with the run.

Leaves what each does with an event to `extractor.watch`, the line on the terminal to `extractor.progress`.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager

from extractor import estimate
from extractor.input import Input
from extractor.opening import Target
from extractor.prompts import Sample
from extractor.report import skipped, write_failures
from extractor.settings import Settings
from extractor.signals import TerminatedError
from extractor.watch.disk import DiskGuard
from extractor.watch.events import Many, RunFacts, Watcher
from extractor.watch.failures import FailureList, committed_failures
from extractor.watch.jsonlog import JsonLog
from extractor.watch.metrics import Metrics, MetricsServer
from extractor.watch.pace import Pacer
from hsstore import manifest
from hsstore.console import note, say
from hsstore.errors import HsstoreError


@contextmanager
def watching(settings: Settings, listeners: Iterable[Watcher]) -> Iterator[Many]:
    """Log, metrics and the estimate, while a run lasts; an end by an error is told to all of them.

    Raises `UsageError` for a port or a file that cannot be had, `MissingExtraError` without the library.
    """
    watchers = Many(listeners)
    with ExitStack() as stack:
        if settings.log_json:
            log = JsonLog(settings.log_json)
            stack.callback(log.close)
            watchers.add(log)
        if settings.metrics_port is not None:
            metrics = Metrics(settings.out)
            server = MetricsServer(metrics, settings.metrics_host, settings.metrics_port)
            stack.callback(server.close)
            watchers.add(metrics)
            # A port that was chosen for us must be said, even under --quiet.
            (note if settings.metrics_port else say)(f"metrics at {server.url}")
        watchers.add(Pacer(watchers))
        try:
            yield watchers
        except BaseException as error:
            watchers.run_failed(*_words(error))
            raise


def _words(error: BaseException) -> tuple[str, str]:
    """(kind, reason) of an end."""
    if isinstance(error, HsstoreError):
        return error.kind, error.message
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", "Ctrl-C"
    if isinstance(error, TerminatedError):
        return "terminated", "SIGTERM"
    return "error", f"{type(error).__name__}: {error}"


def facts_of(settings: Settings, given: Input, engine: str, shards: estimate.Shape, todo: list[int]) -> RunFacts:
    """`shards`: all that the input has; `todo`: those of this run."""
    samples = [entry for number in todo for entry in shards.shards[number]]
    return RunFacts(
        store=str(settings.out),
        model=given.verifier.name,
        engine=engine,
        samples=len(samples),
        tokens=sum(entry.n_tokens for entry in samples),
        shards=len(todo),
        samples_done=len(given.entries) - len(samples),
        bytes_per_token=given.bytes_per_token,
        resume=resume_command(settings),
    )


def failure_list(
    settings: Settings, given: Input, target: Target, samples: Mapping[int, Sample]
) -> tuple[FailureList, set[int]]:
    """The list of lines without states: bad ones and what is committed as failed at once, the rest as it fails; and the
    source_index of what is committed as failed. `samples` by source_index."""
    records = [r for r in manifest.load_records(settings.out, target.writer.header) if r.shard in target.placed]
    known = committed_failures(records, samples, target.offset, settings.report)
    write_failures(settings.report, [*skipped(given.prompts), *known])
    failed = {f.source_index for f in known if f.source_index is not None}
    return FailureList(settings.report, samples, target.offset), failed


def disk_guard(settings: Settings, given: Input, target: Target, todo: list[int], watchers: Watcher) -> DiskGuard:
    """Who says whether there is room for another shard."""
    header = target.writer.header
    shape = estimate.Shape(shard_rows=header.shard_rows, chunk_rows=header.chunk_rows, shards=target.placed)
    bytes_of: Mapping[int, int] = {n: estimate.shard_bytes(shape, [n], given.bytes_per_token) for n in todo}
    return DiskGuard(settings.out, watchers, bytes_of, keep=settings.min_free, resume=resume_command(settings))


def resume_command(settings: Settings) -> str:
    """The command that continues a run of these settings, "" when it was not begun by one."""
    if not settings.command:
        return ""
    arguments = [a for a in settings.command if a not in ("--resume", "--append")]
    return shlex.join([*arguments, "--append" if settings.append else "--resume"])
