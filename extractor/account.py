"""What a run comes to: every line of the input is written, failed, skipped or left."""

from __future__ import annotations

from collections.abc import Mapping

from extractor.fleet.part import Part
from extractor.input import Input
from extractor.opening import Target
from extractor.report import Outcome, PartOutcome, skipped, warn_failures, write_failures
from extractor.settings import Settings
from extractor.watch.failures import committed_failures
from hsstore import manifest, paths
from hsstore.errors import HsstoreError
from hsstore.records import SampleEntry, ShardRecord

_LOOKS = 5


def account(
    target: Target, given: Input, settings: Settings, seconds: float, tokens: int, part: Part | None = None
) -> Outcome:
    """Rebuild what is derived, and account for every line of the input.

    `seconds` it took, `tokens` that this process captured, `part` of the shards that were its own. While shards are
    left to other parts the manifest is theirs to build: n processes would leave n manifests behind. Raises
    `HsstoreError` when the sum does not come out.
    """
    writer = target.writer
    by_index = {s.source_index + target.offset: s for s in given.prompts.samples}
    for _ in range(_LOOKS):
        before = paths.numbers_in(writer.root / paths.RECORDS)
        complete = not target.todo()
        manifest_id = writer.finish() if complete or part is None else ""
        records = [r for r in manifest.load_records(writer.root, writer.header) if r.shard in target.placed]
        samples = _last_word(records)
        failed = committed_failures(records, by_index, target.offset, settings.report)
        listed = write_failures(settings.report, [*skipped(given.prompts), *failed])
        # Others may commit meanwhile: of several that end at once the last leaves the whole list, and the manifest.
        # One that is not the last need not wait for it.
        if paths.numbers_in(writer.root / paths.RECORDS) == before:
            break
    warn_failures(failed, listed)
    outcome = Outcome(
        store=str(settings.out),
        manifest_id=manifest_id,
        complete=complete,
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
        part=_part_outcome(target, samples, part) if part else None,
    )
    balance = outcome.written + outcome.failed + outcome.skipped + outcome.remaining
    if balance != outcome.input:
        raise HsstoreError(f"{outcome.balance} does not come out: {balance}", hint="run `hsstore verify manifest`")
    return outcome


def account_for_nothing(given: Input, settings: Settings, part: Part | None) -> Outcome:
    """Of a part without shards, when the other parts have not made the store yet."""
    return Outcome(
        store=str(settings.out),
        manifest_id="",
        complete=False,
        input=given.prompts.summary.lines,
        written=0,
        failed=0,
        skipped=len(given.prompts.rejections),
        remaining=len(given.entries),
        rejected=given.prompts.summary.rejected,
        truncated=given.prompts.n_truncated,
        tokens=0,
        bytes=0,
        shards=0,
        seconds=0.0,
        tokens_per_second=0.0,
        failures_file=write_failures(settings.report, skipped(given.prompts)),
        part=PartOutcome(part=str(part), failed=0, remaining=0, shards_elsewhere=len(given.shape.shards)),
    )


def _part_outcome(target: Target, samples: Mapping[int, SampleEntry], part: Part) -> PartOutcome:
    """A sample is of the part that its last place is in."""
    last = {e.source_index: shard for shard in sorted(target.placed) for e in target.placed[shard]}
    ours = [i for i, shard in last.items() if part.holds(shard)]
    return PartOutcome(
        part=str(part),
        failed=sum(i in samples and not samples[i].ok for i in ours),
        remaining=sum(i not in samples for i in ours),
        shards_elsewhere=sum(not part.holds(shard) for shard in target.todo()),
    )


def _last_word(records: list[ShardRecord]) -> dict[int, SampleEntry]:
    """The samples by source_index; of one that was tried again the copy with states."""
    samples: dict[int, SampleEntry] = {}
    for record in sorted(records, key=lambda r: r.shard):
        for s in record.samples:
            if s.ok or not (s.source_index in samples and samples[s.source_index].ok):
                samples[s.source_index] = s
    return samples
