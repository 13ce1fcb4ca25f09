"""What is captured and how the store is cut: model, prompts, layers, lengths, split."""

from __future__ import annotations

from pathlib import Path

import click

from extractor.options import shared
from extractor.options.apply import Decorator, together
from extractor.options.values import directory_value
from extractor.settings import DEFAULT_MAX_LENGTH

input_options: Decorator = together(
    shared.MODEL,
    click.option(
        "--prompts",
        required=True,
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="JSON lines (.gz too), each with messages, conversations (ShareGPT), text, or input_ids + loss_mask.",
    ),
    click.option(
        "--out",
        required=True,
        type=click.Path(path_type=Path),
        callback=directory_value,
        metavar="STORE",
        help="Directory of the store to make.",
    ),
    click.option(
        "--layers",
        default="eagle3",
        show_default=True,
        metavar="SPEC",
        help="States to keep: eagle3 = after layers 2, n/2 and n-3 of n, or numbers like 2,15,27 (state after that many"
        " layers). The final state is always kept.",
    ),
    click.option(
        "--max-length",
        type=click.IntRange(min=2),
        metavar="TOKENS",
        help=f"Longest sample.  [default: {DEFAULT_MAX_LENGTH}, or the model's context when shorter]",
    ),
    click.option(
        "--overlong",
        type=click.Choice(["truncate", "drop"]),
        default="truncate",
        show_default=True,
        help="What becomes of longer samples: cut to their first tokens, or left out. Both are counted.",
    ),
    shared.SHARD_ROWS,
    shared.VALIDATION_FRACTION,
    shared.SPLIT_SALT,
    click.option(
        "--template-arg",
        multiple=True,
        metavar="NAME=VALUE",
        help="A variable of the chat template, repeatable, e.g. enable_thinking=false.",
    ),
    click.option(
        "--failed-out",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="Where lines without states are listed, as JSON lines.  [default: STORE.failed.jsonl]",
    ),
)
