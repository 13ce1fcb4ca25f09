"""`hsstore import` and `hsstore export`: options, signals, exit codes.

Leaves everything that happens to `importing` and `exporting`; nothing heavy is imported before.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from extractor.foreign.settings import FORMATS, ExportSettings, ImportSettings
from extractor.options import shared
from extractor.options.values import directory_value
from extractor.signals import until_stopped
from hsstore.errors import DamagedError, IncompleteError


@click.command("import", short_help="Make a store of hidden states that another project wrote.")
@click.argument("format", type=click.Choice(FORMATS))
@click.argument("directory", type=click.Path(path_type=Path), metavar="DIR")
@click.option(
    "--out",
    required=True,
    type=click.Path(path_type=Path),
    callback=directory_value,
    metavar="STORE",
    help="Directory of the store to make.",
)
@click.option(
    "--model",
    metavar="DIR",
    help="The verifier that the states are of: a model directory, or a hub id the local cache holds. Gives the number"
    " of layers, width, vocabulary and digests; training from the store needs them.",
)
@click.option(
    "--layers",
    metavar="K,K,…",
    help="Auxiliary states of the files in hsstore's numbering: the state after k layers.  [default: what the files"
    " record, or the project's own default]",
)
@click.option(
    "--layer-ids", metavar="ID,ID,…", help="The same as the ids that were given to that project; they are translated."
)
@click.option(
    "--norm",
    type=click.Choice(["post", "pre"]),
    help="Whether the final state of the files is after or before the model's final norm.  [default: what the files"
    " record, or what the project always does]",
)
@click.option("--n-layers", type=click.IntRange(1, 10_000), metavar="N", help="Decoder layers, without --model.")
@click.option("--vocab-size", type=click.IntRange(1, 1 << 24), metavar="V", help="Vocabulary, without --model.")
@click.option("--model-name", metavar="NAME", help="What the capture record calls the model.")
@click.option(
    "--hidden-states",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="speculators: where hs_*.safetensors lie.  [default: hidden_states in the dataset]",
)
@click.option(
    "--mask-missing",
    type=click.Choice(["reject", "ones"]),
    default="reject",
    show_default=True,
    help="What becomes of a sample without a loss mask: left out, or every token counts as trained.",
)
@click.option("--cast", is_flag=True, help="Round float16 and float32 states to bfloat16 instead of leaving them out.")
@shared.SHARD_ROWS
@shared.VALIDATION_FRACTION
@shared.SPLIT_SALT
@shared.weights_digest("full; of --model")
@click.option(
    "--failed-out",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Where inputs that are not in the store are listed, as JSON lines.  [default: STORE.failed.jsonl]",
)
@click.option("--resume", is_flag=True, help="Continue the store if it exists: committed shards are kept.")
@shared.JSON
@shared.QUIET
def import_(directory: Path, json: bool, quiet: bool, **options: Any) -> int:
    """Make a store of the hidden states in DIR, which another project wrote in FORMAT.

    \b
    hsstore import specforge cache/hidden_states --out states --model Qwen3-8B
    hsstore import torchspec saved --out states --n-layers 36 --vocab-size 151936

    Values are taken over bit by bit. What the files do not say is taken from the project's own default only where it
    has one way to make them; otherwise it must be given. What was taken for granted is recorded in the store.

    Files are loaded without running anything in them. One that cannot be used is named with its reason and never ends
    the import; the last line accounts for all: written + failed + skipped = read.

    Exit codes: 0 all written; 2 wrong call, nothing usable, or the store was made from something else; 4 something is
    missing; 10 not found; 130 Ctrl-C; 143 SIGTERM.
    """
    from hsstore.console import set_quiet

    set_quiet(quiet)
    settings = ImportSettings(source=directory, **options)
    return _guarded(lambda: _import(settings, as_json=json), "every committed shard is kept")


def _import(settings: ImportSettings, *, as_json: bool) -> int:
    from extractor.foreign.importing import run
    from extractor.foreign.report import print_import

    outcome = run(settings)
    print_import(outcome, as_json=as_json)
    return 0 if outcome.written == outcome.read else IncompleteError.exit_code


@click.command(short_help="Write a store's samples in the format of another project.")
@click.argument("format", type=click.Choice(FORMATS))
@click.argument("store", type=click.Path(path_type=Path), metavar="STORE")
@click.option(
    "--out",
    required=True,
    type=click.Path(path_type=Path),
    callback=directory_value,
    metavar="DIR",
    help="Directory to make, or to continue.",
)
@click.option(
    "--split",
    type=click.Choice(["all", "train", "validation"]),
    default="all",
    show_default=True,
    help="Which samples.",
)
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="At most the first N of them.")
@click.option(
    "--apply-norm",
    is_flag=True,
    help="Compute the final state after the model's norm from the stored one before it; needs --model. Close to what an"
    " engine gives, not equal to it.",
)
@click.option("--model", metavar="DIR", help="The store's verifier, for --apply-norm.")
@click.option("--gzip", is_flag=True, help="specforge: write .ckpt.gz.")
@click.option(
    "--failed-out",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Where damaged samples are listed, as JSON lines.  [default: DIR.failed.jsonl]",
)
@shared.JSON
@shared.QUIET
def export(json: bool, quiet: bool, **options: Any) -> int:
    """Write the samples of STORE in FORMAT, as that project itself would have.

    \b
    hsstore export specforge states --out hidden_states
    hsstore export torchspec states --out saved --split train --limit 100

    Values are written bit by bit, one sample at a time, each file whole or not at all. The same command again continues
    an export that was stopped. Samples without states are left out and counted: written + kept + failed + damaged =
    asked.

    Exit codes: 0 all samples that have states are there; 2 wrong call, another norm than the format has, or DIR holds
    something else; 3 the store is damaged (those samples are left out); 10 not found; 130 Ctrl-C; 143 SIGTERM.
    """
    from hsstore.console import set_quiet

    set_quiet(quiet)
    settings = ExportSettings(**options)
    return _guarded(lambda: _export(settings, as_json=json), "every file that was written is whole")


def _export(settings: ExportSettings, *, as_json: bool) -> int:
    from extractor.foreign.exporting import run
    from extractor.foreign.report import print_export

    outcome = run(settings)
    print_export(outcome, as_json=as_json)
    return DamagedError.exit_code if outcome.damaged else 0


def _guarded(work: Callable[[], int], kept: str) -> int:
    """Run it; a signal ends it cleanly and says how to go on."""

    def say_how_to_go_on() -> None:
        again = [a for a in sys.argv[1:] if a != "--resume"]
        if click.get_current_context().info_name == "import":
            again.append("--resume")
        click.echo(f"interrupted; {kept}. Continue with:\n  {shlex.join(['hsstore', *again])}", err=True)

    return until_stopped(work, say_how_to_go_on)
