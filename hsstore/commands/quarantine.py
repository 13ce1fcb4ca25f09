"""`hsstore quarantine`: take shards out of use, with a reason; list them; take them back."""

from __future__ import annotations

from pathlib import Path

import click

from hsstore import console, manifest, quarantine
from hsstore.commands.inspect import STORE
from hsstore.errors import DamagedError, UsageError
from hsstore.records import Tombstone


@click.command("quarantine")
@click.argument("store", type=STORE)
@click.option("--shard", "shards", type=click.IntRange(0), multiple=True, help="A shard to take out, repeatable.")
@click.option("--sample", "samples", type=click.IntRange(0), multiple=True, help="Source index: the shard that has it.")
@click.option("--reason", default="", help="Why, for those who come later. Required with --shard or --sample.")
@click.option("--release", is_flag=True, help="Take the shards back into use instead.")
@click.option("--json", is_flag=True, help="Print JSON.")
def command(
    store: str, shards: tuple[int, ...], samples: tuple[int, ...], reason: str, release: bool, json: bool
) -> None:
    """Take shards of STORE out of use; without --shard or --sample list those that are.

    Nothing is removed. Readers that open the store later do not see the shard; `hsstore extract … --resume` extracts
    what it held under a new shard number; `hsstore gc --quarantined` removes its files.
    """
    root = Path(store)
    chosen = sorted({*shards, *(quarantine.shard_of(root, s) for s in samples)})
    if not chosen:
        if release or reason:
            raise UsageError("which shard? expected --shard or --sample")
        header = manifest.load_header(root)
        _print(list(manifest.quarantined(manifest.load_tombstones(root, header)).values()), json)
        return
    if release:
        done = [quarantine.release(root, shard, reason) for shard in chosen]
    else:
        done = [quarantine.quarantine(root, shard, reason) for shard in chosen]
    _print(done, json)
    try:
        manifest.write(root)
    except DamagedError as error:
        console.warn(f"the manifest is not rebuilt: {error}")
    if not release:
        console.note("extract what they held with the original `hsstore extract …` command and --resume")


def _print(stones: list[Tombstone], json: bool) -> None:
    if json:
        console.echo_json(stones)
        return
    for stone in stones:
        state = "quarantined" if stone.action == "quarantine" else "released"
        click.echo(f"shard {stone.shard}: {state} {stone.created}: {stone.reason or 'no reason given'}")
    if not stones:
        click.echo("no shard is quarantined")
