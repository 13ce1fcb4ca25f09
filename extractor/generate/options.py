"""The options of `hsstore generate`, in the order in which `--help` shows them."""

from __future__ import annotations

from pathlib import Path

import click

from extractor.generate.settings import MOST_TEMPERATURE, MOST_TOP_K
from extractor.options import shared
from extractor.options.apply import Decorator, together
from hsstore.numbers import FiniteRange

_FILE = click.Path(path_type=Path)

what_options: Decorator = together(
    shared.MODEL,
    click.option(
        "--prompts",
        required=True,
        type=_FILE,
        metavar="FILE",
        help="JSON lines (.gz too), each with messages or conversations (ShareGPT). Answers in them are made anew.",
    ),
    click.option("--out", required=True, type=_FILE, metavar="FILE", help="JSON lines to make, for `hsstore extract`."),
    click.option(
        "--turns",
        type=click.Choice(["all", "last"]),
        default="all",
        show_default=True,
        help="Which answers are made anew: every one, in order, on top of those before it; or only the last.",
    ),
    click.option(
        "--template-arg",
        multiple=True,
        metavar="NAME=VALUE",
        help="A variable of the chat template, repeatable, e.g. enable_thinking=false. Give extract the same.",
    ),
    click.option(
        "--failed-out",
        type=_FILE,
        metavar="FILE",
        help="Where lines without an answer are listed, as JSON lines.  [default: OUT.failed.jsonl, without OUT's"
        " .jsonl]",
    ),
)

sampling_options: Decorator = together(
    click.option(
        "--temperature",
        type=FiniteRange(0, MOST_TEMPERATURE),
        help="0 = always the likeliest token.  [default: of the model's generation_config.json, else 1]",
    ),
    click.option(
        "--top-p",
        type=FiniteRange(0, 1, min_open=True),
        help="Draw among the likeliest tokens that have this share together.  [default: likewise]",
    ),
    click.option(
        "--top-k",
        type=click.IntRange(0, MOST_TOP_K),
        help="Draw among that many likeliest tokens; 0 = all.  [default: likewise, else 0]",
    ),
    click.option(
        "--max-new-tokens",
        type=click.IntRange(min=1),
        default=2048,
        show_default=True,
        help="Longest answer, thoughts included. Answers that it cuts are counted and marked.",
    ),
    click.option(
        "--drop-truncated", is_flag=True, help="Leave out lines with an answer that was cut, instead of marking them."
    ),
    click.option(
        "--seed",
        type=int,
        default=0,
        show_default=True,
        help="Each answer is drawn by a seed of its own, made of this one, its line and its turn.",
    ),
    click.option(
        "--stop", multiple=True, metavar="TEXT", help="Text that ends an answer and does not belong to it; repeatable."
    ),
    click.option(
        "--reasoning",
        type=click.Choice(["separate", "inline", "drop"]),
        default="separate",
        show_default=True,
        help="Thoughts (<think>…</think>): into the message's reasoning_content, left in its content, or left out.",
    ),
)

source_options: Decorator = together(
    shared.ENGINE,
    shared.dtype(),
    shared.ENGINE_OPTION,
    shared.TRUST_REMOTE_CODE,
    shared.weights_digest("full; with --url not at all"),
    click.option(
        "--batch",
        type=click.IntRange(min=1),
        default=16,
        show_default=True,
        help="transformers: conversations answered together, always the same ones.",
    ),
    click.option(
        "--url",
        multiple=True,
        metavar="URL",
        help="Ask a running server instead of an engine of our own; repeatable, the answers are spread over them.",
    ),
    click.option(
        "--api",
        type=click.Choice(["auto", "sglang", "openai"]),
        default="auto",
        show_default=True,
        help="How servers are asked: /generate of SGLang, or /v1/chat/completions, as of vLLM.",
    ),
    click.option(
        "--served-model", default="", metavar="NAME", help="Name of the model at an OpenAI-compatible server."
    ),
    shared.TOKEN_FILE,
    click.option(
        "--server-wait",
        type=FiniteRange(min=0),
        default=600.0,
        show_default=True,
        metavar="SECONDS",
        help="How long the run waits while no server answers.",
    ),
    click.option(
        "--answer-seconds",
        type=FiniteRange(1, 86400),
        default=900.0,
        show_default=True,
        metavar="SECONDS",
        help="How long a server may take for one answer, before another one is asked.",
    ),
    click.option(
        "--in-flight",
        type=click.IntRange(min=1),
        default=256,
        show_default=True,
        help="SGLang and servers: answers asked for at a time, for each of them.",
    ),
    shared.MAX_CONSECUTIVE_ERRORS,
)

run_options: Decorator = together(
    click.option(
        "--resume",
        is_flag=True,
        help="Continue OUT if it was begun: what is answered is kept, failed lines are tried again.",
    ),
    click.option(
        "--dry-run", is_flag=True, help="Only say what it would take: lines, answers, tokens. Loads no model."
    ),
    shared.JSON,
    shared.QUIET,
)
