"""`hsstore manifest build|show`: the derived files of a store, rebuilt or printed."""

from __future__ import annotations

from pathlib import Path

import click

from hsstore import console, paths
from hsstore import manifest as manifests
from hsstore.commands.inspect import STORE
from hsstore.records import canonical
from hsstore.writer import StoreWriter


@click.group()
def manifest() -> None:
    """Build or show the manifest of a store."""


@manifest.command()
@click.argument("store", type=STORE)
@click.option("--json", is_flag=True, help="Print JSON.")
def build(store: str, json: bool) -> None:
    """Finish every committed shard's publication, then rebuild manifest.json, manifest.sha256 and index/ of STORE."""
    writer = StoreWriter.open(store)
    manifest_id = writer.finish()
    if json:
        console.echo_json({"manifest_id": manifest_id})
    else:
        click.echo(manifest_id)
    console.note(f"check with the stock tool: (cd {store} && sha256sum --quiet -c {paths.MANIFEST_SUMS})")


@manifest.command()
@click.argument("store", type=STORE)
@click.option("--json", is_flag=True, help="Print the whole canonical manifest.")
def show(store: str, json: bool) -> None:
    """Compile the manifest of STORE from its records: id and totals, or all of it."""
    compiled = manifests.load(Path(store))
    if json:
        click.echo(canonical(compiled).decode(), nl=False)
        return
    console.table(
        [
            ("manifest", manifests.manifest_id(compiled)),
            ("shards", str(len(compiled.shards))),
            ("samples", f"{compiled.n_samples:,} ({compiled.n_failed} failed)"),
            ("tokens", f"{compiled.n_tokens:,}"),
            ("size", console.human_bytes(compiled.n_bytes)),
        ]
    )
