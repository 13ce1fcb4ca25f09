"""`hsstore extract`: options, signals, exit codes. Nothing heavy is imported before a run begins.

Leaves everything that happens to `extractor.run`.
"""

from __future__ import annotations

import json
import shlex
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import click

from extractor.settings import DEFAULT_MAX_LENGTH, Settings
from hsstore.errors import EXIT_INTERRUPTED, IncompleteError, UsageError

EXIT_TERMINATED = 143


@click.command(short_help="Run a verifier over prompts and store its hidden states.")
@click.option(
    "--model", required=True, metavar="DIR", help="Verifier: a model directory, or a hub id the local cache holds."
)
@click.option(
    "--prompts",
    required=True,
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="JSON lines (.gz too), each with messages, conversations (ShareGPT), text, or input_ids + loss_mask.",
)
@click.option(
    "--out", required=True, type=click.Path(path_type=Path), metavar="STORE", help="Directory of the store to make."
)
@click.option(
    "--engine",
    type=click.Choice(["auto", "sglang", "transformers"]),
    default="auto",
    show_default=True,
    help="What runs the verifier; auto = sglang when it is installed, else transformers.",
)
@click.option(
    "--layers",
    default="eagle3",
    show_default=True,
    metavar="SPEC",
    help="States to keep: eagle3 = after layers 2, n/2 and n-3 of n, or numbers like 2,15,27 (state after that many"
    " layers). The final state is always kept.",
)
@click.option(
    "--max-length",
    type=click.IntRange(min=2),
    metavar="TOKENS",
    help=f"Longest sample.  [default: {DEFAULT_MAX_LENGTH}, or the model's context when shorter]",
)
@click.option(
    "--overlong",
    type=click.Choice(["truncate", "drop"]),
    default="truncate",
    show_default=True,
    help="What becomes of longer samples: cut to their first tokens, or left out. Both are counted.",
)
@click.option(
    "--dtype",
    type=click.Choice(["auto", "bfloat16", "float16", "float32"]),
    default="auto",
    show_default=True,
    help="dtype the verifier runs in; auto = the checkpoint's. States are stored in bfloat16.",
)
@click.option(
    "--shard-rows",
    type=click.IntRange(min=1),
    metavar="S",
    help="Tokens a shard, a power of two of 256 or more.  [default: from the amount of data]",
)
@click.option(
    "--validation-fraction",
    type=click.FloatRange(0, 1, max_open=True),
    default=0.05,
    show_default=True,
    metavar="FRACTION",
    help="Share of the samples kept for validation, chosen by a hash of each sample.",
)
@click.option(
    "--split-salt", default="hsstore", show_default=True, help="Salt of that hash: another salt, another choice."
)
@click.option(
    "--engine-option",
    multiple=True,
    metavar="NAME=VALUE",
    help="A setting of the engine, repeatable: for sglang tp=8, chunked_prefill_size=8192 or any"
    " argument of its Engine (mem_fraction_static=0.8), for transformers device, attn_implementation, threads.",
)
@click.option(
    "--template-arg",
    multiple=True,
    metavar="NAME=VALUE",
    help="A variable of the chat template, repeatable, e.g. enable_thinking=false.",
)
@click.option("--trust-remote-code", is_flag=True, help="Run the Python code that comes with the model directory.")
@click.option(
    "--weights-digest",
    type=click.Choice(["full", "sampled"]),
    help="How the weights are identified: SHA-256 of every byte, or of 17 MiB of each file (recorded in the store)."
    "  [default: full]",
)
@click.option(
    "--failed-out",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Where lines without states are listed, as JSON lines.  [default: STORE.failed.jsonl]",
)
@click.option(
    "--resume", is_flag=True, help="Continue the store if it exists: committed shards are kept, the rest is done."
)
@click.option(
    "--append",
    is_flag=True,
    help="Grow the store by these prompts: further shards, numbered behind those that are there.",
)
@click.option(
    "--lease-seconds",
    type=click.FloatRange(min=1),
    default=120.0,
    show_default=True,
    help="Several runs may work on one store; a shard whose run was silent for that long is taken over.",
)
@click.option(
    "--dry-run", is_flag=True, help="Only say what it would take: samples, tokens, bytes, shards, free space."
)
@click.option("--json", is_flag=True, help="Print the result (or the dry run) as JSON on stdout.")
@click.option("--quiet", is_flag=True, help="No progress and no notes; warnings, errors and the result stay.")
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

    Exit codes: 0 all written; 2 wrong call, or the store was made from something else; 4 incomplete (samples failed,
    disk full, engine lost); 10 model or prompts not found; 130 Ctrl-C; 143 SIGTERM.
    """
    from hsstore.console import set_quiet

    set_quiet(quiet)
    settings = Settings(
        **options,
        engine_options=dict(_pair("--engine-option", text) for text in engine_option),
        template_arguments={k: _json(v) for k, v in (_pair("--template-arg", text) for text in template_arg)},
    )
    if dry_run:
        from extractor.report import print_estimate
        from extractor.run import dry_run as estimate

        print_estimate(estimate(settings), as_json=json)
        return 0
    return _run(settings, as_json=json)


def _run(settings: Settings, *, as_json: bool) -> int:
    from extractor.report import print_outcome
    from extractor.run import extract as run

    previous = signal.signal(signal.SIGTERM, _terminate)
    try:
        outcome = run(settings)
    except (KeyboardInterrupt, _TerminatedError) as stop:
        _say_how_to_resume(settings)
        return EXIT_TERMINATED if isinstance(stop, _TerminatedError) else EXIT_INTERRUPTED
    finally:
        signal.signal(signal.SIGTERM, previous)
    print_outcome(outcome, as_json=as_json)
    return IncompleteError.exit_code if outcome.failed or outcome.remaining else 0


class _TerminatedError(BaseException):
    """SIGTERM came."""


def _terminate(_signal: int, _frame: FrameType | None) -> None:
    raise _TerminatedError


def _say_how_to_resume(settings: Settings) -> None:
    kept = "every committed shard is kept" if settings.out_is_store else "nothing was committed yet"
    arguments = [a for a in sys.argv[1:] if a not in ("--resume", "--append")]
    command = shlex.join(["hsstore", *arguments, "--append" if settings.append else "--resume"])
    click.echo(f"interrupted; {kept}. Continue with:\n  {command}", err=True)


def _pair(option: str, text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise UsageError(f"{option} takes NAME=VALUE, found {text!r}")
    return name, value


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
