"""`hsstore serve`: options to settings. Everything that needs the `server` extra loads when the command runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

import click

from hsstore.errors import MissingExtraError, extra_hint


@click.command()
@click.argument("stores", metavar="STORE...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; others need a token.")
@click.option("--port", default=8420, show_default=True, type=click.IntRange(0, 65535), help="0 takes any free port.")
@click.option(
    "--token-file",
    type=click.Path(path_type=Path),
    help="Ask for the bearer token in this file, read again when it changes. HSSTORE_TOKEN works as well.",
)
@click.option(
    "--verify-reads",
    default="off",
    show_default=True,
    type=click.Choice(["off", "sampled", "always"]),
    help="Batches checked against the CRCs in their records, beside those that a client asks to check.",
)
@click.option("--access-log", is_flag=True, help="Log every request.")
@click.option("--json-log", is_flag=True, help="Log lines as JSON.")
def serve(
    stores: tuple[Path, ...],
    host: str,
    port: int,
    token_file: Path | None,
    verify_reads: Literal["off", "sampled", "always"],
    access_log: bool,
    json_log: bool,
) -> int:
    """Serve packed batches of every STORE over HTTP until SIGTERM or Ctrl-C.

    A store is named by its directory: /v1/stores/NAME. Trainers take the URL as their --source.
    """
    try:
        from server.runner import run
        from server.settings import Settings
    except ModuleNotFoundError as error:
        raise MissingExtraError(f"`hsstore serve` needs {error.name}", hint=extra_hint("server")) from None
    settings = Settings(
        stores=stores,
        host=host,
        port=port,
        token_file=token_file,
        token=os.environ.get("HSSTORE_TOKEN") or None,
        verify_reads=verify_reads,
    )
    return run(settings, access_log=access_log, json_log=json_log)
