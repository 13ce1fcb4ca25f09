"""`hsstore extract`: options, signals, exit codes. Nothing heavy is imported before a run begins.

Leaves everything that happens to `extractor.run`.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from extractor.options.engine import engine_options
from extractor.options.fleet import fleet_options
from extractor.options.input import input_options
from extractor.options.run import run_options
from extractor.options.values import json_or_text, pair
from extractor.settings import Settings
from extractor.signals import until_stopped
from hsstore.errors import IncompleteError

if TYPE_CHECKING:
    from extractor.report import Outcome


@click.command(short_help="Run a verifier over prompts and store its hidden states.")
@input_options
@engine_options
@run_options
@fleet_options
def extract(
    engine_option: tuple[str, ...],
    template_arg: tuple[str, ...],
    dry_run: bool,
    json: bool,
    quiet: bool,
    **options: Any,
) -> int:
    """Run a verifier over prompts and store its hidden states.

    \b
    hsstore extract --model Qwen3-8B --prompts chats.jsonl --out states --dry-run
    hsstore extract --model Qwen3-8B --prompts chats.jsonl --out states --resume

    The loss mask covers the assistant's tokens, the one that ends each turn included; it is found from the tokenizer's
    chat template. A line that gives no sample is reported with its number and reason and never ends the run. Nothing
    committed is lost when the run is killed: the same command with --resume continues it, and refuses when the model,
    the prompts or an option that decides the data has changed. The same command in several processes, or on several
    machines with one file system, shares the work. What was quarantined meanwhile is extracted anew.

    The last line of output accounts for every input line: written + failed + skipped = input.

    Exit codes: 0 all written; 2 wrong call, or the store was made from something else; 3 the first states are wrong; 4
    incomplete (samples failed, disk full, engine lost); 10 model or prompts not found; 130 Ctrl-C; 143 SIGTERM.
    """
    from hsstore.console import set_quiet

    set_quiet(quiet)
    settings = Settings(
        **options,
        command=("hsstore", *sys.argv[1:]),
        engine_options=dict(pair("--engine-option", text) for text in engine_option),
        template_arguments={k: json_or_text(v) for k, v in (pair("--template-arg", text) for text in template_arg)},
    )
    if dry_run:
        from extractor.report import print_estimate
        from extractor.run import dry_run as estimate

        print_estimate(estimate(settings), as_json=json)
        return 0
    return _run(settings, as_json=json)


def _run(settings: Settings, *, as_json: bool) -> int:
    from extractor.report import print_outcome

    def work() -> int:
        outcome = _outcome(settings)
        print_outcome(outcome, as_json=as_json)
        return IncompleteError.exit_code if outcome.unfinished else 0

    return until_stopped(work, lambda: _say_how_to_resume(settings))


def _outcome(settings: Settings) -> Outcome:
    if settings.ray is not None:
        from extractor.fleet.command import extract_on_ray

        return extract_on_ray(settings)
    from extractor.run import extract as run

    return run(settings)


def _say_how_to_resume(settings: Settings) -> None:
    from extractor.watching import resume_command

    kept = "every committed shard is kept" if settings.out_is_store else "nothing was committed yet"
    click.echo(f"interrupted; {kept}. Continue with:\n  {resume_command(settings)}", err=True)
