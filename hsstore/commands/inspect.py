"""`hsstore info`, `ls`, `show`: what a store holds, for people and with --json for programs."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np

from hsstore import console, follow, index, ledger, manifest
from hsstore.errors import UsageError
from hsstore.records import Capture, StoreHeader
from hsstore.statistics import to_float32
from hsstore.store import Store

STORE = click.Path(exists=False, file_okay=False)
_SHOWN_INPUTS = 4


@click.command()
@click.argument("store", type=STORE)
@click.option("--tokens", is_flag=True, help="Count the trained tokens too: reads every loss mask.")
@click.option("--json", is_flag=True, help="Print JSON.")
def info(store: str, tokens: bool, json: bool) -> None:
    """What STORE holds: capture, samples, tokens, bytes, split, progress, manifest id."""
    with Store.open(store) as opened:
        document = _info(opened)
        if tokens:
            document["n_trained_tokens"] = int(opened.token_counts("all").sum())
    if json:
        console.echo_json(document)
        return
    console.table(_lines(document))
    if document["open_shards"]:
        n_open = document["open_shards"]
        are = "1 shard is" if n_open == 1 else f"{n_open:,} shards are"
        console.note(f"{are} open; continue with `hsstore extract … --out {store} --resume`")


def _lines(document: dict[str, Any]) -> list[tuple[str, str]]:
    capture, split, inputs = document["capture"], document["split"], document["inputs"]
    trained, dead = document["n_trained_tokens"], document["quarantined_shards"]
    n_layouts = document["layouts"]
    shards = f"{document['committed_shards']} of {document['planned_shards']} × {document['shard_rows']:,} rows"
    states = f"{', '.join(capture.layers)} × {capture.hidden_size} {capture.dtype}, final is {capture.norm}-norm"
    return [
        ("store", f"{document['path']} (format {document['format']}, {document['uuid']})"),
        ("verifier", f"{capture.model} ({capture.architecture}), weights {capture.weights_sha256[:12]}"),
        ("engine", f"{capture.engine} {capture.engine_version}, {capture.compute_dtype}"),
        ("states", states),
        ("samples", f"{document['n_samples']:,} of {document['planned_samples']:,} ({document['n_failed']} failed)"),
        ("tokens", f"{document['n_tokens']:,}" + (f" ({trained:,} trained)" if trained is not None else "")),
        ("split", f"{split['train']:,} train, {split['validation']:,} validation"),
        (
            "shards",
            f"{shards}, blocks of {document['chunk_rows']}"
            + (f", {n_layouts} layouts" if n_layouts > 1 else "")
            + (f", {dead} quarantined" if dead else ""),
        ),
        ("size", console.human_bytes(document["n_bytes"])),
        *[("input", f"{given.name} ({given.lines:,} lines)") for given in inputs[:_SHOWN_INPUTS]],
        *([("", f"and {len(inputs) - _SHOWN_INPUTS:,} more")] if len(inputs) > _SHOWN_INPUTS else []),
        ("verified", ledger.describe(document["verified"], time.time())),
        ("manifest", document["manifest_id"]),
    ]


def _info(store: Store) -> dict[str, Any]:
    header, totals = store.header, store.totals
    layouts = manifest.load_layouts(store.root, header)
    dead = manifest.quarantined(manifest.load_tombstones(store.root, header))
    planned = {shard for layout in layouts for shard in layout.numbers} - set(dead)
    given = [layout for layout in layouts if not layout.is_redo]
    sizes = {
        "train": len(index.members(store.index, header.split, "train")),
        "validation": len(index.members(store.index, header.split, "validation")),
    }
    return {
        "path": str(store.root),
        "format": header.format,
        "uuid": header.uuid,
        "created": header.created,
        "capture": header.capture,
        "n_samples": totals.n_samples,
        "n_failed": totals.n_failed,
        "n_tokens": totals.n_tokens,
        "n_trained_tokens": None,
        "n_bytes": totals.n_bytes,
        "split": {"salt": header.split.salt, "validation_fraction": header.split.validation_fraction, **sizes},
        "shard_rows": header.shard_rows,
        "chunk_rows": header.chunk_rows,
        "committed_shards": totals.n_shards,
        "planned_shards": len(planned),
        "open_shards": len(planned - set(store.state.shards)),
        "quarantined_shards": len(dead),
        "planned_samples": sum(layout.n_samples for layout in given),
        "layouts": len(layouts),
        "input": given[-1].input,
        "inputs": [layout.input for layout in given],
        "manifest_id": store.manifest_id,
        "opened_from": store.state.taken_from,
        "verified": ledger.summary(store.root, header, store.state.listing),
    }


@click.command()
@click.argument("store", type=STORE)
@click.option("--offset", type=click.IntRange(0), default=0, show_default=True, help="First sample.")
@click.option("--limit", type=click.IntRange(1), default=None, help="How many samples; all without it.")
@click.option("--follow", is_flag=True, help="Print samples as they are committed, until all are or Ctrl-C.")
@click.option("--json", is_flag=True, help="One JSON object per line.")
def ls(store: str, offset: int, limit: int | None, follow: bool, json: bool) -> None:
    """List the samples of STORE: source index, uid, tokens, place, split.

    In the order of the input; with --follow shard by shard, in the order in which they are committed.
    """
    if follow and offset:
        raise UsageError("--offset counts in the order of the input, --follow lists in that of the commits")
    if not json:
        click.echo(f"{'sample':>9}  {'uid':<32}  {'tokens':>7}  {'shard':>6}  {'row':>7}  split")
    for row in itertools.islice(_followed(Path(store)) if follow else _listed(store), offset, _stop(offset, limit)):
        if json:
            console.echo_json_line(row)
            continue
        side = "failed" if row["flags"] else row["split"]
        place = f"{row['n_tokens']:>7}  {row['shard']:>6}  {row['row']:>7}"
        click.echo(f"{row['source_index']:>9}  {row['uid']}  {place}  {side}")


def _stop(offset: int, limit: int | None) -> int | None:
    return None if limit is None else offset + limit


def _listed(store: str) -> Iterator[dict[str, Any]]:
    with Store.open(store) as opened:
        yield from _rows(opened.index, opened.header)


def _followed(root: Path) -> Iterator[dict[str, Any]]:
    header = manifest.load_header(root)
    for record in follow.records(root, header):
        yield from _rows(index.of_shards([record]), header)


def _rows(columns: index.Index, header: StoreHeader) -> Iterator[dict[str, Any]]:
    validation = index.in_validation(columns, header.split)
    for i in range(len(columns)):
        yield _row(columns, i, bool(validation[i]))


def _row(at: index.Index, i: int, validation: bool) -> dict[str, Any]:
    return {
        "source_index": int(at.source_index[i]),
        "uid": at.uid_hex(i),
        "n_tokens": int(at.n_tokens[i]),
        "shard": int(at.shard[i]),
        "row": int(at.row[i]),
        "flags": int(at.flags[i]),
        "split": "validation" if validation else "train",
    }


@click.command()
@click.argument("store", type=STORE)
@click.argument("sample")
@click.option("--json", is_flag=True, help="Print JSON, with every id and mask.")
def show(store: str, sample: str, json: bool) -> None:
    """Show one SAMPLE (its source index, or its uid) of STORE: ids, loss mask, rms of each state."""
    with Store.open(store) as opened:
        i = opened.index.find(sample)
        validation = bool(index.in_validation(opened.index, opened.header.split)[i])
        ids, mask = opened.input_ids(i), opened.loss_mask(i)
        states = {k: _state(opened, i, k) for k in opened.layers}
        document = _row(opened.index, i, validation) | {"states": states}
        document |= {"input_ids": ids.tolist(), "loss_mask": mask.tolist()}
        capture: Capture = opened.capture
        reason = opened.record(document["shard"]).failures.get(str(document["source_index"]))
    if json:
        console.echo_json(document)
        return
    shown = " ".join(f"[{t}]" if m else str(t) for t, m in zip(ids[:64].tolist(), mask[:64].tolist(), strict=True))
    console.table(
        [
            ("sample", f"{document['source_index']} (line {document['source_index'] + 1}), {document['split']}"),
            ("uid", document["uid"]),
            ("place", f"shard {document['shard']}, rows {document['row']} to {document['row'] + len(ids) - 1}"),
            ("tokens", f"{len(ids):,}, {int(mask.sum()):,} trained (in brackets)"),
            ("ids", shown + (" …" if len(ids) > 64 else "")),
            *(
                (k, f"rms {s['rms']:.4g}, largest {s['absmax']:.4g}, {s['not_finite']} not finite")
                for k, s in states.items()
            ),
            ("norm", f"final is {capture.norm}-norm"),
            *([("failed", reason)] if reason else []),
        ]
    )


def _state(store: Store, i: int, state: str) -> dict[str, float | int]:
    values = to_float32(store.hidden(i, state))
    finite = values[np.isfinite(values)]
    rms = math.sqrt(float(np.square(finite, dtype=np.float64).mean())) if finite.size else 0.0
    absmax = float(np.abs(finite).max()) if finite.size else 0.0
    return {"rms": rms, "absmax": absmax, "not_finite": int(values.size - finite.size)}
