"""A verification as it is printed: what was checked, a table of the states, the verdict; or JSON lines."""

from __future__ import annotations

import dataclasses
from typing import Any

import click

from extractor.states.agreement import Agreement
from extractor.states.layers import Forward
from extractor.states.verification import Verification
from extractor.words import counted
from hsstore import console
from hsstore.findings import printable


def name(store: str) -> str:
    return printable(store)


def kinds(found: Verification) -> str:
    """`layer, shift`: what is wrong, in one word each."""
    return ", ".join(dict.fromkeys(f.kind for f in found.findings if f.severity == "damage"))


def as_text(found: Verification, *, quiet: bool) -> None:
    if not quiet:
        console.table(_lines(found))
        if found.report and found.report.forward:
            _table(found.report.forward)
    for one in found.findings:
        if one.severity == "damage" or not quiet:
            click.echo(str(one))
    if not quiet:
        click.echo(_verdict(found))


def as_json(found: Verification) -> None:
    for one in found.findings:
        console.echo_json_line({"type": "finding", **dataclasses.asdict(one)})
    report = found.report
    forward = report.forward if report else None
    for layer in forward.layers if forward else ():
        console.echo_json_line({"type": "state", **dataclasses.asdict(layer)})
    console.echo_json_line({"type": "summary", **_summary(found)})


def _lines(found: Verification) -> list[tuple[str, str]]:
    tokens = sum(s.n_tokens for s in found.checked)
    shards = len({s.shard for s in found.checked})
    gone = f", {found.n_quarantined} quarantined" if found.n_quarantined else ""
    failed = f" ({found.n_failed} failed ones left out)" if found.n_failed else ""
    capture, equal = found.capture, ", ".join(found.identity.equal)
    lines = [
        ("store", f"{name(found.store)}, manifest {found.manifest_id[:12]}"),
        (
            "checked",
            f"{counted(len(found.checked), 'sample')} of {found.n_samples:,}{failed}, {counted(tokens, 'token')},"
            f" in {shards} of {counted(found.n_shards, 'shard')}{gone}, seed {found.seed}",
        ),
        ("model", f"{found.verifier.name}; as captured: {equal or 'nothing that could be compared'}"),
        (
            "captured",
            f"by {capture.engine} {capture.engine_version} in {capture.compute_dtype}, final {capture.norm}-norm",
        ),
    ]
    report = found.report
    if report and report.lengths:
        share = report.lengths.normalised
        lines.append(("norm", f"{share:.1%} of the rows of final have the length that the norm gives"))
    if report and report.agreement:
        lines.append(("head", _head(report.agreement)))
    recorded = found.recorded
    parts = [counted(recorded.shards_whole, "shard") + " read whole"] if recorded.shards_whole else []
    parts += [f"the checked rows of {counted(recorded.shards_by_rows, 'shard')}"] if recorded.shards_by_rows else []
    if parts:
        lines.append(("statistics", f"{' and '.join(parts)} against the records"))
    if report and report.forward:
        f = report.forward
        bound = "0.003 for float32" if f.yardstick == "float32" else "twice its own bfloat16 error"
        lines.append(("forward", f"transformers {f.version} in float32 on {f.device}, at most {bound}"))
    return lines


def _head(found: Agreement) -> str:
    rates = ", ".join(f"{how} {rate:.1%}" for how, rate in found.rates.items())
    left = f"; {counted(len(found.left_out), 'sample')} without any" if found.left_out else ""
    return f"{found.n:,} {found.over}, predicted with final {rates}; chance {found.chance:.1%}{left}"


def _table(forward: Forward) -> None:
    head = ("state", "relative", "bound", "row median", "bound", "row 90 %", "bound", "scale", "")
    rows = [
        (
            layer.state,
            *(f"{value:.5f}" for value in (layer.relative, layer.relative_bound)),
            *(f"{value:.5f}" for value in (layer.row_median, layer.row_median_bound)),
            *(f"{value:.5f}" for value in (layer.row_decile, layer.row_decile_bound)),
            f"{layer.scale:.5f}",
            "ok" if layer.ok else "undecided" if layer.alike else "WRONG",
        )
        for layer in forward.layers
    ]
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    for row in (head, *rows):
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        click.echo("  ".join(cells).rstrip())


def _verdict(found: Verification) -> str:
    by = [word for word, made in _made(found).items() if made]
    damage = sum(f.severity == "damage" for f in found.findings)
    took = f"{found.seconds:.1f} s" if found.seconds < 60 else console.human_seconds(found.seconds)
    if not found.sound:
        return f"WRONG: {counted(damage, 'finding')} ({kinds(found)}); {took}"
    if not found.is_decided:
        return f"undecided: {', '.join(by)} found nothing wrong, and neither head nor forward could decide; {took}"
    return f"sound: {', '.join(by)}; {took}"


def _made(found: Verification) -> dict[str, bool]:
    report = found.report
    return {
        "head": bool(report and report.agreement),
        "forward": bool(report and report.forward),
        "statistics": bool(found.recorded.shards_whole or found.recorded.shards_by_rows),
    }


def _summary(found: Verification) -> dict[str, Any]:
    report = found.report
    asked, forward = (report.agreement, report.forward) if report else (None, None)
    return {
        "store": name(found.store),
        "manifest_id": found.manifest_id,
        "model": found.verifier.name,
        "sound": found.sound,
        "decided": found.is_decided,
        "seed": found.seed,
        "samples": [s.source_index for s in found.checked],
        "tokens": sum(s.n_tokens for s in found.checked),
        "store_samples": found.n_samples,
        "failed_samples": found.n_failed,
        "shards": found.n_shards,
        "quarantined_shards": found.n_quarantined,
        "equal_digests": found.identity.equal,
        "norm": {"declared": found.capture.norm, "normalised_rows": report.lengths.normalised}
        if report and report.lengths
        else None,
        "head": {"positions": asked.n, "over": asked.over, "rates": asked.rates, "chance": asked.chance}
        if asked
        else None,
        "forward": {"transformers": forward.version, "device": forward.device, "yardstick": forward.yardstick}
        if forward
        else None,
        "statistics": {"shards_whole": found.recorded.shards_whole, "shards_by_rows": found.recorded.shards_by_rows},
        "damage": sum(f.severity == "damage" for f in found.findings),
        "notes": sum(f.severity == "note" for f in found.findings),
        "seconds": round(found.seconds, 3),
    }
