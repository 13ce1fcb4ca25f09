"""One run of `hsstore generate` from start to end: go on where an earlier run was, answer, put the answers in order,
account for every line.

`OUT` appears when all is done, in the order of the input; until then the answers lie in `OUT.part`. Leaves the engine
to `sources`, scheduling to `loop`, bytes to `journal`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from extractor.generate import journal, record
from extractor.generate.dialogue import Rules, Written, token_ids
from extractor.generate.journal import AppendFile
from extractor.generate.loop import Loop
from extractor.generate.opening import Opening, open_input, refuse_unwritable
from extractor.generate.report import Estimate, Meter, Outcome
from extractor.generate.scan import lines_of
from extractor.generate.settings import Settings
from extractor.generate.sources import start_source
from extractor.generate.sources.base import Source
from extractor.generate.state import Counts, State, failures_in, listed
from extractor.reasons import Rejected
from extractor.report import Failure, warn_failures, write_failures
from extractor.supervise import Breaker
from hsstore.console import Progress, note

_SHOWN = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """What this run itself did."""

    seconds: float = 0.0
    tokens: int = 0


def generate(settings: Settings) -> Outcome:
    """Answer what is not answered yet. Raises `IncompleteError` or `NoSpaceError` when it stops part-way."""
    refuse_unwritable(settings)
    opening = open_input(settings)
    warn_failures(opening.found.skipped, str(settings.failures))
    identity = opening.identity()
    with AppendFile(settings.part) as part:
        try:
            return _run(opening, identity, part)
        except BaseException:
            if not settings.meta.exists():  # nobody was asked yet
                part.remove_if_empty()
            raise


def _run(opening: Opening, identity: dict[str, Any], part: AppendFile) -> Outcome:
    settings = opening.settings
    state = State.read(settings, identity)
    journal.remove_leftovers(settings.out)
    write_failures(settings.failures, [*opening.found.skipped, *state.decided.values()])
    sidecar = record.Record(settings.meta, identity, state.runs)
    work = _Work()
    if len(state.done) < opening.found.usable:
        with AppendFile(settings.failures) as failures:
            try:
                work = _answer(opening, state, part, failures, sidecar)
            finally:
                failures.remove_if_empty()
    return _finish(opening, state, sidecar, work)


def dry_run(settings: Settings) -> Estimate:
    """Read everything, ask nobody, change nothing."""
    opening = open_input(settings)
    rejected = Counter(f.reason for f in opening.found.skipped)
    prompt_tokens = longest = refused = 0
    for line in lines_of(settings.prompts, settings.turns):
        question = [m for m in line.script[: line.script.index(None)] if m is not None]
        try:
            n = len(token_ids(opening.chat, question, prompt=True))
        except Rejected as r:
            rejected[r.reason] += 1
            refused += 1
            continue
        prompt_tokens, longest = prompt_tokens + n, max(longest, n)
    done = {*journal.lines_in(settings.part), *journal.lines_in(settings.out)}
    return Estimate(
        lines=opening.found.lines,
        usable=opening.found.usable - refused,
        rejected=dict(sorted(rejected.items())),
        answers=opening.found.turns,
        done=len(done),
        prompt_tokens=prompt_tokens,
        longest_prompt_tokens=longest,
        most_new_tokens=opening.found.turns * settings.max_new_tokens,
        source=", ".join(settings.urls) or opening.source,
        sampling=opening.sampling,
    )


def _answer(opening: Opening, state: State, part: AppendFile, failures: AppendFile, sidecar: record.Record) -> _Work:
    """Ask for everything that is not there yet."""
    settings = opening.settings
    source = start_source(opening.source, settings, opening.verifier, opening.chat, opening.sampling)
    try:
        sidecar.begin(source.info, {"engine_options": settings.engine_options, "urls": list(settings.urls)})
        done = state.done
        with Progress(opening.found.usable - len(done), "answers", unit="lines") as progress:
            meter = Meter(progress)
            loop = Loop(source, _rules(opening, source), Breaker(settings.max_consecutive_errors), meter.tokens)
            for outcome in loop.run(lines_of(settings.prompts, settings.turns), done.__contains__):
                if isinstance(outcome, Written):
                    part.append(outcome.data)
                else:
                    failures.append(listed(outcome))
                    meter.failed += 1
                    _say(outcome, meter.failed, settings)
                part.sync()
                failures.sync()
                meter.line(loop.tokens)
        return _Work(seconds=meter.seconds, tokens=loop.tokens)
    finally:
        source.close()


def _rules(opening: Opening, source: Source) -> Rules:
    return Rules(
        chat=opening.chat,
        sampling=opening.sampling,
        context_tokens=source.info.context_tokens,
        reasoning=opening.settings.reasoning,
        drop_truncated=opening.settings.drop_truncated,
    )


def _say(failure: Failure, number: int, settings: Settings) -> None:
    """Name the first few lines without an answer."""
    if number <= _SHOWN:
        warn_failures([failure], "")
    elif number == _SHOWN + 1:
        note(f"further lines without an answer are only listed in {settings.failures}")


def _finish(opening: Opening, state: State, sidecar: record.Record, work: _Work) -> Outcome:
    """Put the answers in order, list what has none, and count both from the files themselves."""
    settings = opening.settings
    part = journal.recover(settings.part)
    if part.lines or not settings.out.exists():
        journal.ordered(settings.out, [state.finished, part])
    settings.part.unlink()
    counts = Counts.of(settings.out)
    rest = [f for f in failures_in(settings.failures) if f.line not in counts.lines]
    failed = sum(f.status == "failed" for f in rest)
    outcome = Outcome(
        out=str(settings.out),
        input=opening.found.lines,
        written=len(counts.lines),
        failed=failed,
        skipped=len(rest) - failed,
        reasons=dict(sorted(Counter(f.reason for f in rest).items())),
        truncated=counts.truncated,
        inexact=counts.inexact,
        answers=counts.answers,
        prompt_tokens=counts.prompt_tokens,
        tokens=counts.completion_tokens,
        seconds=work.seconds,
        tokens_per_second=work.tokens / work.seconds if work.seconds else 0.0,
        failures_file=write_failures(settings.failures, rest),
        meta_file=str(settings.meta),
    )
    assert outcome.written + outcome.failed + outcome.skipped == outcome.input, outcome.balance
    sidecar.end(outcome.counts())
    return outcome
