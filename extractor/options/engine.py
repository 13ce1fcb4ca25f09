"""What runs the verifier, and how."""

from __future__ import annotations

from pathlib import Path

import click

from extractor.options.apply import Decorator, together

engine_options: Decorator = together(
    click.option(
        "--engine",
        type=click.Choice(["auto", "sglang", "transformers"]),
        default="auto",
        show_default=True,
        help="What runs the verifier; auto = sglang when it is installed, else transformers.",
    ),
    click.option(
        "--url",
        "urls",
        multiple=True,
        metavar="URL",
        help="A running server that has the verifier (`hsstore verifier`), repeatable; then none is started here.",
    ),
    click.option(
        "--transfer",
        type=click.Choice(["auto", "shared", "fetch"]),
        default="auto",
        show_default=True,
        help="How states come from servers: written by them into the store's files, which they must see under the same"
        " path, or fetched over HTTP; auto = the first where it works.",
    ),
    click.option(
        "--token-file",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="Bearer token of the servers (SGLang's API key). HSSTORE_TOKEN works as well.",
    ),
    click.option(
        "--dtype",
        type=click.Choice(["auto", "bfloat16", "float16", "float32"]),
        default="auto",
        show_default=True,
        help="dtype the verifier runs in; auto = the checkpoint's. States are stored in bfloat16.",
    ),
    click.option(
        "--engine-option",
        multiple=True,
        metavar="NAME=VALUE",
        help="A setting of the engine, repeatable: for sglang tp=8, chunked_prefill_size=8192 or any"
        " argument of its Engine (mem_fraction_static=0.8), for transformers device, attn_implementation, threads.",
    ),
    click.option("--trust-remote-code", is_flag=True, help="Run the Python code that comes with the model directory."),
    click.option(
        "--weights-digest",
        type=click.Choice(["full", "sampled"]),
        help="How the weights are identified: SHA-256 of every byte, or of 17 MiB of each file (recorded in the store)."
        "  [default: full]",
    ),
)
