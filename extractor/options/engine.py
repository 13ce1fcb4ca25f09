"""What runs the verifier, and how."""

from __future__ import annotations

import click

from extractor.options import shared
from extractor.options.apply import Decorator, together

engine_options: Decorator = together(
    shared.ENGINE,
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
    shared.TOKEN_FILE,
    shared.dtype(" States are stored in bfloat16."),
    shared.ENGINE_OPTION,
    shared.TRUST_REMOTE_CODE,
    shared.weights_digest(),
)
