"""`hsstore generate`: signals, exit codes. Nothing heavy is imported before a run begins.

Leaves options to `extractor.generate.options`, everything that happens to `extractor.generate.run`.
"""

from __future__ import annotations

import shlex
import sys
from typing import Any

import click

from extractor.generate.options import run_options, sampling_options, source_options, what_options
from extractor.generate.settings import Settings
from extractor.options.values import json_or_text, pair
from extractor.signals import until_stopped
from hsstore.errors import IncompleteError


@click.command(short_help="Let the verifier answer prompts itself: training data in its own words.")
@what_options
@sampling_options
@source_options
@run_options
def generate(
    engine_option: tuple[str, ...],
    template_arg: tuple[str, ...],
    url: tuple[str, ...],
    server_wait: float,
    dry_run: bool,
    json: bool,
    quiet: bool,
    **options: Any,
) -> int:
    """Let the verifier answer prompts itself: training data in its own words, for `hsstore extract`.

    \b
    hsstore generate --model Qwen3-8B --prompts chats.jsonl --out answers.jsonl --dry-run
    hsstore generate --model Qwen3-8B --prompts chats.jsonl --out answers.jsonl --resume
    hsstore generate --model Qwen3-8B --prompts chats.jsonl --out answers.jsonl --url http://gpu1:30000

    Each line of OUT is a line of the prompts with `messages` that hold the new answers, its other fields kept, and
    finish_reason; OUT appears in the order of the input when all is done, until then answers lie in OUT.part. What made
    them stands in OUT.meta.json. No answer is lost when the run is killed: the same command with --resume continues
    it, and refuses when model, prompts or a parameter has changed.

    The last line of output accounts for every input line: written + failed + skipped = input.

    Exit codes: 0 all answered or skipped; 2 wrong call, or OUT was begun by another run; 4 incomplete (lines failed,
    disk full, engine or servers lost); 10 model or prompts not found; 11 another process writes OUT; 130 Ctrl-C; 143
    SIGTERM.
    """
    from hsstore.console import set_quiet

    set_quiet(quiet)
    settings = Settings(
        **options,
        urls=url,
        server_wait_seconds=server_wait,
        engine_options=dict(pair("--engine-option", text) for text in engine_option),
        template_arguments={k: json_or_text(v) for k, v in (pair("--template-arg", text) for text in template_arg)},
    )
    if dry_run:
        from extractor.generate.report import print_estimate
        from extractor.generate.run import dry_run as estimate

        print_estimate(estimate(settings), as_json=json)
        return 0
    return _run(settings, as_json=json)


def _run(settings: Settings, *, as_json: bool) -> int:
    from extractor.generate.report import print_outcome
    from extractor.generate.run import generate as run

    def work() -> int:
        outcome = run(settings)
        print_outcome(outcome, as_json=as_json)
        return IncompleteError.exit_code if outcome.failed else 0

    return until_stopped(work, lambda: _say_how_to_resume(settings))


def _say_how_to_resume(settings: Settings) -> None:
    began = settings.part.exists() or settings.out.exists()
    kept = "every answer so far is kept" if began else "nothing was answered yet"
    command = shlex.join(["hsstore", *(a for a in sys.argv[1:] if a != "--resume"), "--resume"])
    click.echo(f"interrupted; {kept}. Continue with:\n  {command}", err=True)
