"""`hsstore subset`: a smaller store from a larger one; exit 0 whole, 3 when samples of the source are damaged."""

from __future__ import annotations

import click

from hsstore import console
from hsstore.commands.inspect import STORE
from hsstore.errors import DamagedError
from hsstore.index import SplitName
from hsstore.subset import Result, Selection, Subset

_SIDES: dict[str | None, SplitName] = {None: "all", "train": "train", "validation": "validation"}


@click.command()
@click.argument("source", type=STORE, metavar="SRC")
@click.argument("target", type=STORE, metavar="DST")
@click.option("--layers", metavar="NAMES", help="States to keep, such as after_2,final; all without it.")
@click.option("--samples", metavar="IDS|FILE", help="Source indexes, ranges (0-99) and uids, or a file with them.")
@click.option("--split", type=click.Choice(["train", "validation"]), help="Only this side of the split.")
@click.option("--limit", type=click.IntRange(1), help="At most that many samples, in the order of the input.")
@click.option("--json", is_flag=True, help="Print JSON.")
@click.option("--quiet", is_flag=True, help="No notes, no progress.")
def subset(
    source: str,
    target: str,
    layers: str | None,
    samples: str | None,
    split: str | None,
    limit: int | None,
    json: bool,
    quiet: bool,
) -> None:
    """Make a smaller store DST from some samples and states of SRC.

    Every block is checked on the way. Killed in the middle, the same command continues. Exit code 0: whole. 3: some
    samples are damaged in SRC; they are named, and flagged as failed in DST.
    """
    console.set_quiet(quiet)
    selection = Selection(layers=layers, samples=samples, split=_SIDES[split], limit=limit)
    with Subset(source, target, selection) as making:
        if "final" not in making.layers or len(making.layers) < 2:
            console.warn("`hsstore train` takes no store without `final` and at least one other state")
        if making.n_left_out:
            console.note(f"{making.n_left_out:,} of the selected samples have no states and are left out")
        with console.Progress(making.n_samples, "subset", unit="samples") as progress:
            total = 0

            def on_samples(n_samples: int, n_bytes: int) -> None:
                nonlocal total
                total += n_bytes
                progress.update(progress.done + n_samples, console.human_bytes(total))

            progress.update(making.n_done)
            result = making.copy(on_samples)
    _print(result, json)


def _print(result: Result, json: bool) -> None:
    if json:
        console.echo_json(result)
    else:
        console.table(
            [
                ("store", result.store),
                ("states", ", ".join(result.layers)),
                ("samples", f"{result.n_samples:,} ({result.n_failed} failed)"),
                ("tokens", f"{result.n_tokens:,}"),
                ("size", console.human_bytes(result.n_bytes)),
                ("manifest", result.manifest_id),
            ]
        )
    if result.failures:
        for source_index, why in sorted(result.failures.items(), key=lambda item: int(item[0])):
            console.warn(f"sample {source_index}: {why}")
        n = len(result.failures)
        raise DamagedError(
            f"{n} sample{'s' * (n != 1)} of {result.source} could not be read; they are flagged as failed in"
            f" {result.store}",
            hint=f"mend it with `hsstore repair {result.source} --from REPLICA`, then make the subset anew",
        )
