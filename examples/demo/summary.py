"""The closing table of the demo, out of what its steps left behind; refuses to call a run good that learned nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LEAST_FALL = 1.0
"""Of the held-out loss_0, in nats."""
LEAST_RISE = 0.05
"""Of the held-out full_acc_0."""


def summary(out: Path, seconds: Mapping[str, float], now: float) -> str:
    """The table. Ends the program when the drafter did not learn.

    `seconds` are those of each step when it was run, `now` those of this run of the demo.
    """
    extracted, fetched, trained = (_read(out / name) for name in ("extract.json", "fetch.json", "train-2.json"))
    header = _read(out / "store" / "store.json")
    first, last = trained["first"], trained["last"]
    engine = f"{header['capture']['engine']} {header['capture']['engine_version']}"
    rate = extracted["tokens_per_second"]
    rows = [
        ("samples", f"{extracted['written']:,} of {extracted['input']:,} conversations"),
        ("tokens", f"{extracted['tokens']:,}"),
        ("store", f"{extracted['bytes'] / 1e9:.4f} GB in {extracted['shards']} shards"),
        ("extracted", f"{rate:,.0f} tok/s" * (rate > 0) + f" by {engine}"),
        ("served", f"{fetched['gigabytes_per_second']:.2f} GB/s over HTTP to one client"),
        ("trained", f"{trained['step']} steps of {trained['world']} ranks, {trained['tokens']:,} tokens"),
        ("loss_0, held out", _change(first, last, "loss_0")),
        ("full_acc_0, held out", _change(first, last, "full_acc_0")),
        ("acceptance length", f"{_change(first, last, 'acceptance_length')} (estimate)"),
        ("", ""),
        ("model", f"{out}/SmolLM2-135M-Instruct"),
        ("answers", f"{out}/answers.jsonl"),
        ("hidden states", f"{out}/store"),
        ("drafter", trained["checkpoint"]),
        ("metrics", trained["metrics"]),
        ("", ""),
        ("seconds a step took", " · ".join(f"{name} {value:.0f}" for name, value in seconds.items())),
        ("seconds in all", f"{sum(seconds.values()):.0f}, this time {now:.0f}"),
    ]
    table = "\n".join(f"{name:<22}{value}".rstrip() for name, value in rows)
    if first["loss_0"] - last["loss_0"] < LEAST_FALL or last["full_acc_0"] - first["full_acc_0"] < LEAST_RISE:
        raise SystemExit(f"{table}\n\nerror: the drafter hardly learned: see loss_0 and full_acc_0 above")
    return table


def _change(first: Mapping[str, float], last: Mapping[str, float], name: str) -> str:
    return f"{first[name]:.3f} → {last[name]:.3f}"


def _read(file: Path) -> dict[str, Any]:
    document = json.loads(file.read_text())
    assert isinstance(document, dict), file
    return document
