"""`hsstore info`, `ls`, `show`: what a store holds, for people and with --json for programs."""

from __future__ import annotations

import math
import time
from typing import Any

import click
import numpy as np

from hsstore import console, index, ledger
from hsstore.records import Capture
from hsstore.statistics import to_float32
from hsstore.store import Store

STORE = click.Path(exists=False, file_okay=False)


@click.command()
@click.argument("store", type=STORE)
@click.option("--json", is_flag=True, help="Print JSON.")
def info(store: str, json: bool) -> None:
    """What STORE holds: capture, samples, tokens, bytes, split, progress, manifest id."""
    with Store.open(store) as opened:
        document = _info(opened)
    if json:
        console.echo_json(document)
        return
    capture, split = document["capture"], document["split"]
    done, planned = document["committed_shards"], document["planned_shards"]
    console.table(
        [
            ("store", f"{document['path']} (format {document['format']}, {document['uuid']})"),
            ("verifier", f"{capture.model} ({capture.architecture}), weights {capture.weights_sha256[:12]}"),
            ("engine", f"{capture.engine} {capture.engine_version}, {capture.compute_dtype}"),
            (
                "states",
                f"{', '.join(capture.layers)} × {capture.hidden_size} {capture.dtype}, final is {capture.norm}-norm",
            ),
            (
                "samples",
                f"{document['n_samples']:,} of {document['planned_samples']:,} ({document['n_failed']} failed)",
            ),
            ("tokens", f"{document['n_tokens']:,} ({document['n_trained_tokens']:,} trained)"),
            ("split", f"{split['train']:,} train, {split['validation']:,} validation"),
            ("shards", f"{done} of {planned} × {document['shard_rows']:,} rows, blocks of {document['chunk_rows']}"),
            ("size", console.human_bytes(document["n_bytes"])),
            ("input", f"{document['input'].name} ({document['input'].lines:,} lines)"),
            ("verified", ledger.describe(document["verified"], time.time())),
            ("manifest", document["manifest_id"]),
        ]
    )
    if done < planned:
        console.note(f"{planned - done} shards are open; continue with `hsstore extract … --out {store} --resume`")


def _info(store: Store) -> dict[str, Any]:
    from hsstore import manifest

    header, m = store.header, store.manifest
    layouts = manifest.load_layouts(store.root, header)
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
        "n_samples": m.n_samples,
        "n_failed": m.n_failed,
        "n_tokens": m.n_tokens,
        "n_trained_tokens": int(store.token_counts("all").sum()),
        "n_bytes": m.n_bytes,
        "split": {"salt": header.split.salt, "validation_fraction": header.split.validation_fraction, **sizes},
        "shard_rows": header.shard_rows,
        "chunk_rows": header.chunk_rows,
        "committed_shards": len(m.shards),
        "planned_shards": sum(len(x.shards) for x in layouts),
        "planned_samples": sum(x.n_samples for x in layouts),
        "input": layouts[-1].input,
        "manifest_id": store.manifest_id,
        "verified": ledger.summary(store.root, header, m),
    }


@click.command()
@click.argument("store", type=STORE)
@click.option("--offset", type=click.IntRange(0), default=0, show_default=True, help="First sample.")
@click.option("--limit", type=click.IntRange(1), default=None, help="How many samples; all without it.")
@click.option("--json", is_flag=True, help="One JSON object per line.")
def ls(store: str, offset: int, limit: int | None, json: bool) -> None:
    """List the samples of STORE: source index, uid, tokens, place, split."""
    with Store.open(store) as opened:
        columns = opened.index
        validation = index.in_validation(columns, opened.header.split)
        stop = len(columns) if limit is None else min(len(columns), offset + limit)
        if not json:
            click.echo(f"{'sample':>9}  {'uid':<32}  {'tokens':>7}  {'shard':>6}  {'row':>7}  split")
        for i in range(offset, stop):
            row = _row(opened, i, bool(validation[i]))
            if json:
                console.echo_json_line(row)
                continue
            side = "failed" if row["flags"] else row["split"]
            place = f"{row['n_tokens']:>7}  {row['shard']:>6}  {row['row']:>7}"
            click.echo(f"{row['source_index']:>9}  {row['uid']}  {place}  {side}")


def _row(store: Store, i: int, validation: bool) -> dict[str, Any]:
    at = store.index
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
        document = _row(opened, i, validation) | {"states": states}
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
