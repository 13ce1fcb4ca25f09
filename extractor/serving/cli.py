"""`hsstore verifier`: options, token, signals, exit codes. Nothing heavy is imported before a server is wanted."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from extractor.options import shared
from extractor.serving.settings import DEFAULT_PORT, ServingSettings
from hsstore.errors import EXIT_INTERRUPTED
from hsstore.numbers import FiniteRange


@click.command()
@shared.MODEL
@click.option(
    "--layers",
    default="eagle3",
    show_default=True,
    metavar="SPEC",
    help="States to serve, as `hsstore extract` takes them.",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; others need a token.")
@click.option(
    "--port",
    default=DEFAULT_PORT,
    show_default=True,
    type=click.IntRange(0, 65535),
    help="0 takes any free port.",
)
@click.option(
    "--token-file",
    type=click.Path(path_type=Path),
    help="Ask for the bearer token in this file (SGLang's API key). HSSTORE_TOKEN works as well.",
)
@click.option(
    "--dtype",
    type=click.Choice(["auto", "bfloat16", "float16", "float32"]),
    default="auto",
    show_default=True,
    help="dtype the verifier runs in; auto = the checkpoint's.",
)
@click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    show_default=True,
    help="auto = CUDA where there is some.",
)
@shared.TRUST_REMOTE_CODE
@click.option(
    "--radix-cache",
    is_flag=True,
    help="Keep SGLang's prefix cache on, for other clients; no captured sample ever takes rows from it.",
)
@click.option("--tokenizer", is_flag=True, help="Load the tokenizer too: text and chats are answered beside ids.")
@click.option(
    "--spool",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    metavar="DIR",
    help="Where rows wait for clients that fetch them.  [default: shared memory, else where temporary files lie]",
)
@click.option(
    "--spool-gb",
    type=FiniteRange(min=0.001, max=1_000_000),
    metavar="GB",
    help="Most of that.  [default: 4.3, and 80 % of free]",
)
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="warning",
    show_default=True,
    help="SGLang's; info and debug go to the terminal, else the log is shown when the server fails.",
)
@click.option(
    "--start-seconds",
    type=FiniteRange(min=1),
    default=3600.0,
    show_default=True,
    help="How long loading may take.",
)
@click.option("--quiet", is_flag=True, help="No notes; warnings and errors stay.")
@click.argument("flags", nargs=-1, metavar="[-- SGLANG FLAGS...]", type=click.UNPROCESSED)
def verifier(token_file: Path | None, spool_gb: float | None, quiet: bool, **options: Any) -> int:
    """Serve a verifier whose states `hsstore extract --url` takes, until SIGTERM or Ctrl-C.

    \b
    hsstore verifier --model Qwen3-8B
    hsstore verifier --model Kimi-K2 --host 0.0.0.0 --token-file key -- --tp-size 8 --mem-fraction-static 0.85

    Runs SGLang's own launch_server with the flags that the capture rests on; every other flag of SGLang may stand
    behind `--`. It is ready when it says so: then a token has gone through it and its states have come back. States
    go straight into the store's files where the server sees them under the same path, and over HTTP where it does
    not.

    Exit codes: the server's own when it ends by itself; 0 SIGTERM; 2 wrong call; 4 it did not come up; 10 model not
    found; 11 port in use; 130 Ctrl-C.
    """
    from extractor.serving.run import serve
    from extractor.signals import TerminatedError, sigterm_raises
    from extractor.tokens import token_of
    from hsstore.console import set_quiet

    set_quiet(quiet)
    settings = ServingSettings(
        **options,
        token=token_of(token_file, os.environ),
        spool_bytes=int(spool_gb * 1e9) if spool_gb else None,
    )
    with sigterm_raises():
        try:
            return serve(settings)
        except TerminatedError:
            return 0
        except KeyboardInterrupt:
            return EXIT_INTERRUPTED
