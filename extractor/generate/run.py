"""One run of `hsstore generate` from start to end: go on where an earlier run was, answer, put the answers in order,
account for every line.

`OUT` appears when all is done, in the order of the input; until then the answers lie in `OUT.part`. Leaves the engine
to `sources`, scheduling to `loop`, bytes to `journal`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
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
from extractor.generate.state import Counts, State, listed
from extractor.reasons import Rejected
from extractor.report import Failure, warn_failures
from extractor.supervise import Breaker
from extractor.words import counted
from hsstore.console import Progress, note
from hsstore.errors import IncompleteError

_SHOWN = 10


@dataclass(slots=True, kw_only=True)
class _Work:
    """What this process knows of every line, whatever becomes of the files meanwhile, and what it did itself."""

    written: set[int]
    without: dict[int, Failure] = field(default_factory=dict)
    """By line: why it has no answer."""
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
            with AppendFile(settings.failures, "--failed-out") as failures:
                try:
                    return _run(opening, identity, part, failures)
                finally:
                    failures.remove_if_empty()
        except BaseException:
            if not settings.meta.exists():  # nobody was asked yet
                part.remove_if_empty()
            raise


def _run(opening: Opening, identity: dict[str, Any], part: AppendFile, failures: AppendFile) -> Outcome:
    settings = opening.settings
    state = State.read(settings, identity, opening.found)
    journal.remove_leftovers(settings.out)
    work = _Work(written={*state.finished.lines, *state.part.lines})
    work.without = {f.line: f for f in (*opening.found.skipped, *state.decided.values())}
    failures.replace(listed(f) for f in work.without.values())
    sidecar = record.Record(settings.meta, identity, state.runs)
    if len(state.done) < opening.found.usable:
        _answer(opening, state, work, part, failures, sidecar)
    return _finish(opening, state, sidecar, work, failures)


def dry_run(settings: Settings) -> Estimate:
    """Read everything, ask nobody, change nothing."""
    opening = open_input(settings)
    rejected = Counter(f.reason for f in opening.found.skipped)
    prompt_tokens = longest = refused = 0
    for line in lines_of(settings.prompts, settings.turns, opening.found):
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


def _answer(
    opening: Opening, state: State, work: _Work, part: AppendFile, failures: AppendFile, sidecar: record.Record
) -> None:
    """Ask for everything that is not there yet."""
    settings = opening.settings
    source = start_source(opening.source, settings, opening.verifier, opening.chat, opening.sampling)
    try:
        sidecar.begin(source.info, {"engine_options": settings.engine_options, "urls": list(settings.urls)})
        done = state.done
        with Progress(opening.found.usable - len(done), "answers", unit="lines") as progress:
            meter = Meter(progress)
            loop = Loop(source, _rules(opening, source), Breaker(settings.max_consecutive_errors), meter.tokens)
            lines = lines_of(settings.prompts, settings.turns, opening.found)
            for outcome in loop.run(lines, done.__contains__):
                if isinstance(outcome, Written):
                    part.append(outcome.data)
                    work.written.add(outcome.line)
                else:
                    work.without[outcome.line] = outcome
                    failures.append(listed(outcome))
                    meter.failed += 1
                    _say(outcome, meter.failed, settings)
                part.sync()
                failures.sync()
                meter.line(loop.tokens)
        work.seconds, work.tokens = meter.seconds, loop.tokens
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


def _finish(opening: Opening, state: State, sidecar: record.Record, work: _Work, failures: AppendFile) -> Outcome:
    """Put the answers in order, list what has none, and see that the file holds what this process knows."""
    settings = opening.settings
    part = journal.recover(settings.part)
    if gone := len(work.written.difference(state.finished.lines, part.lines)):
        raise _changed(settings.part, f"{counted(gone, 'answer')} of this run are no longer in it")
    if part.lines or not settings.out.exists():
        journal.ordered(settings.out, [state.finished, part])
    settings.part.unlink(missing_ok=True)
    counts = Counts.of(settings.out)
    rest = sorted(work.without.values(), key=lambda f: f.line)
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
        failures_file=str(settings.failures) if rest else "",
        meta_file=str(settings.meta),
    )
    failures.replace(listed(f) for f in rest)
    if counts.lines != work.written or outcome.written + outcome.failed + outcome.skipped != outcome.input:
        raise _changed(settings.out, f"{outcome.balance}, of which {len(work.written)} should be written")
    sidecar.end(outcome.counts())
    return outcome


def _changed(path: Path, what: str) -> IncompleteError:
    return IncompleteError(
        f"{path} was changed by somebody else while this ran: {what}",
        hint="run the same with --resume: what is missing is answered again",
    )
