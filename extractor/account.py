"""What a run comes to: every line of the input is written, failed, skipped or left."""

from __future__ import annotations

from extractor.input import Input
from extractor.opening import Target
from extractor.report import Failure, Outcome, skipped, warn_failures, write_failures
from extractor.settings import Settings
from hsstore import manifest
from hsstore.errors import HsstoreError
from hsstore.records import SampleEntry, ShardRecord


def account(target: Target, given: Input, settings: Settings, seconds: float, tokens: int) -> Outcome:
    """Rebuild what is derived, and account for every line of the input.

    `seconds` it took, `tokens` that this process captured. Raises `HsstoreError` when the sum does not come out.
    """
    writer = target.writer
    records = [r for r in manifest.load_records(writer.root, writer.header) if r.shard in target.placed]
    manifest_id = writer.finish()
    samples = _last_word(records)
    failed = [
        Failure(line=i + 1 - target.offset, status="failed", reason="engine", detail=_reason(records, i))
        for i, s in sorted(samples.items())
        if not s.ok
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


def _last_word(records: list[ShardRecord]) -> dict[int, SampleEntry]:
    """The samples by source_index; of one that was tried again the copy with states."""
    samples: dict[int, SampleEntry] = {}
    for record in sorted(records, key=lambda r: r.shard):
        for s in record.samples:
            if s.ok or not (s.source_index in samples and samples[s.source_index].ok):
                samples[s.source_index] = s
    return samples


def _reason(records: list[ShardRecord], source_index: int) -> str:
    """Why a sample has no states, by its last try."""
    last = max((r for r in records if str(source_index) in r.failures), key=lambda r: r.shard, default=None)
    return last.failures[str(source_index)] if last else "no reason was recorded"
