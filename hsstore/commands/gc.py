"""`hsstore gc`: say what a store no longer needs; remove it when told to."""

from __future__ import annotations

from pathlib import Path

import click

from hsstore import console, garbage
from hsstore.commands.inspect import STORE
from hsstore.numbers import FiniteRange
from hsstore.writer import StoreWriter


@click.command()
@click.argument("store", type=STORE)
@click.option("--yes", is_flag=True, help="Remove it. Without this it is only listed.")
@click.option("--quarantined", is_flag=True, help="Also the data files of quarantined shards.")
@click.option(
    "--abandoned-hours",
    type=FiniteRange(min=0),
    help="Also attempts of writers nothing is known of (another machine), untouched for that long.",
)
@click.option("--json", is_flag=True, help="One JSON object per file or directory and a last one with the sums.")
@click.option("--quiet", is_flag=True, help="No notes.")
def gc(store: str, yes: bool, quarantined: bool, abandoned_hours: float | None, json: bool, quiet: bool) -> None:
    """List, and with --yes remove, what STORE no longer needs.

    That is: attempts whose writer is dead, or whose shard another attempt has committed; files that never got their
    name; leases that ended. Never anything that is committed, nor the work of a writer that lives.
    """
    console.set_quiet(quiet)
    root = Path(store)
    if yes:
        StoreWriter.open(root)  # what is committed gets its final names first
    age = abandoned_hours * 3600 if abandoned_hours is not None else None
    found = garbage.find(root, abandoned_seconds=age, quarantined=quarantined)
    for item in found:
        relative = str(item.path.relative_to(root)) if item.path.is_relative_to(root) else str(item.path)
        if json:
            document = {"path": relative, "kind": item.kind, "reason": item.reason, "bytes": item.bytes}
            console.echo_json_line({"type": "garbage", **document})
        else:
            click.echo(f"{relative}: {item.reason} ({console.human_bytes(item.bytes)})")
    for place in garbage.strange(root):
        console.note(f"{place} is a directory where a lease belongs; it stays: look into it, then remove it yourself")
    freed = garbage.remove(found) if yes else 0
    n_bytes = sum(item.bytes for item in found)
    if json:
        console.echo_json_line({"type": "summary", "found": len(found), "bytes": n_bytes, "freed_bytes": freed})
        return
    if not found:
        click.echo("nothing to remove")
    elif yes:
        click.echo(f"removed {len(found)}, {console.human_bytes(freed)} freed")
    else:
        click.echo(f"{len(found)} could go, {console.human_bytes(n_bytes)}")
        console.note("remove with --yes")
