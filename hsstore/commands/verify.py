"""`hsstore verify`: findings as they are met, one line each; exit 0 sound, 3 damaged."""

from __future__ import annotations

import dataclasses

import click

from hsstore import console
from hsstore.commands.inspect import STORE
from hsstore.errors import DamagedError
from hsstore.verify import Depth, Verifier


@click.group()
def verify() -> None:
    """Check that a store is whole."""


@verify.command()
@click.argument("store", type=STORE)
@click.option(
    "--full/--quick",
    default=False,
    help="Quick: records, names, sizes, footers, three blocks of each large file (default). Full: every byte.",
)
@click.option("--json", is_flag=True, help="One JSON object per finding and a last one with the summary.")
@click.option("--quiet", is_flag=True, help="No notes, no progress: findings and exit code only.")
def manifest(store: str, full: bool, json: bool, quiet: bool) -> None:
    """Check STORE against its own records. Reads only; never changes a byte.

    Exit code 0: sound. 3: damaged. 10: no store there. 12: another format.
    """
    console.set_quiet(quiet)
    depth: Depth = "full" if full else "quick"
    verifier = Verifier(store, depth)
    with console.Progress(verifier.files_to_read(), f"verify {depth}", unit="files") as progress:
        verifier.on_file = lambda: progress.update(
            verifier.summary.files, f"{console.human_bytes(verifier.summary.bytes_read)} read"
        )
        for finding in verifier.findings():
            if json:
                console.echo_json_line({"type": "finding", **dataclasses.asdict(finding)})
            elif finding.severity == "damage" or not quiet:
                click.echo(str(finding))
        seconds = progress.seconds
    summary = verifier.summary
    if json:
        console.echo_json_line({"type": "summary", "seconds": round(seconds, 3), **dataclasses.asdict(summary)})
    else:
        state = "sound" if not summary.damage else "DAMAGED"
        click.echo(
            f"{state} ({depth}): {summary.shards} shards, {summary.samples:,} samples, {summary.files} files,"
            f" {console.human_bytes(summary.bytes_read)} read in {seconds:.1f} s; {summary.damage} damaged,"
            f" {summary.open_shards} shards open"
        )
        if not summary.damage and depth == "quick":
            console.note("every byte is checked by `hsstore verify manifest --full`")
    if summary.damage:
        places = f"{summary.damage} place{'s' * (summary.damage != 1)}"
        raise DamagedError(f"{store} is damaged in {places}", hint="restore the named files from a copy")
