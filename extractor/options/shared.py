"""Options that several verbs have, so that they are spelled and explained the same everywhere."""

from __future__ import annotations

from pathlib import Path

import click

from extractor.options.apply import Decorator
from hsstore.numbers import FiniteRange

MODEL: Decorator = click.option(
    "--model", required=True, metavar="DIR", help="Verifier: a model directory, or a hub id the local cache holds."
)
ENGINE: Decorator = click.option(
    "--engine",
    type=click.Choice(["auto", "sglang", "transformers"]),
    default="auto",
    show_default=True,
    help="What runs the verifier; auto = sglang when it is installed, else transformers.",
)
ENGINE_OPTION: Decorator = click.option(
    "--engine-option",
    multiple=True,
    metavar="NAME=VALUE",
    help="A setting of the engine, repeatable: for sglang tp=8, chunked_prefill_size=8192 or any"
    " argument of its Engine (mem_fraction_static=0.8), for transformers device, attn_implementation, threads.",
)
TRUST_REMOTE_CODE: Decorator = click.option(
    "--trust-remote-code", is_flag=True, help="Run the Python code that comes with the model directory."
)
TOKEN_FILE: Decorator = click.option(
    "--token-file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Bearer token of the servers (their API key). HSSTORE_TOKEN works as well.",
)
SHARD_ROWS: Decorator = click.option(
    "--shard-rows",
    type=click.IntRange(min=1),
    metavar="S",
    help="Tokens a shard, a power of two of 256 or more.  [default: from the amount of data]",
)
VALIDATION_FRACTION: Decorator = click.option(
    "--validation-fraction",
    type=FiniteRange(0, 1, max_open=True),
    default=0.05,
    show_default=True,
    metavar="FRACTION",
    help="Share of the samples kept for validation, chosen by a hash of each sample.",
)
SPLIT_SALT: Decorator = click.option(
    "--split-salt", default="hsstore", show_default=True, help="Salt of that hash: another salt, another choice."
)
MAX_CONSECUTIVE_ERRORS: Decorator = click.option(
    "--max-consecutive-errors",
    type=click.IntRange(min=1),
    metavar="N",
    help="Give up after N errors in a row: samples that failed, or deaths of the engine (which is started again"
    " meanwhile, after 1, 2, 4 … 60 s). What was done stays.  [default: 8, but 4 before anything was good]",
)
JSON: Decorator = click.option("--json", is_flag=True, help="Print the result (or the dry run) as JSON on stdout.")
QUIET: Decorator = click.option(
    "--quiet", is_flag=True, help="No progress and no notes; warnings, errors and the result stay."
)


def dtype(more: str = "") -> Decorator:
    return click.option(
        "--dtype",
        type=click.Choice(["auto", "bfloat16", "float16", "float32"]),
        default="auto",
        show_default=True,
        help=f"dtype the verifier runs in; auto = the checkpoint's.{more}",
    )


def weights_digest(default: str = "full") -> Decorator:
    return click.option(
        "--weights-digest",
        type=click.Choice(["full", "sampled"]),
        help="How the weights are identified: SHA-256 of every byte, or of 17 MiB of each file; it is recorded."
        f"  [default: {default}]",
    )
