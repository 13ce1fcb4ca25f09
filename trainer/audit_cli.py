"""`hsstore audit`: the freeze audit of a drafter that does not exist yet.

Responsible for: the command. Builds the drafter on the meta device, so a terabyte verifier costs no memory; with
`--verifier` the checkpoint's headers are read too, with `--config` nothing but that file.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hsstore.console import echo_json, note
from hsstore.errors import MissingExtraError, UsageError, extra_hint
from trainer.draft_layer import default_layer, read_draft_config
from trainer.verifier import locate, read_config

if TYPE_CHECKING:
    from trainer.audit import AuditReport


@click.command()
@click.option("--verifier", type=click.Path(path_type=Path), help="Directory of the verifier, config and safetensors.")
@click.option("--config", type=click.Path(path_type=Path), help="Only its config.json, flat or with a text_config.")
@click.option("--draft-vocab", type=int, default=32_000, show_default=True, help="Draft vocabulary; 0 for the whole.")
@click.option("--draft-config", type=click.Path(path_type=Path), help="JSON with the drafter's decoder layer.")
@click.option("--train-head/--no-train-head", default=True, show_default=True, help="Train the drafter's own head.")
@click.option("--norm-before-fc", is_flag=True, help="With a norm over the concatenated auxiliary states.")
@click.option("--json", is_flag=True, help="Print JSON.")
def audit(
    verifier: Path | None,
    config: Path | None,
    draft_vocab: int,
    draft_config: Path | None,
    train_head: bool,
    norm_before_fc: bool,
    json: bool,
) -> None:
    """Print which parts of a drafter are trained, which are frozen, and how large each is."""
    if (verifier is None) == (config is None):
        raise UsageError("give either --verifier DIR or --config FILE")
    if draft_vocab < 0 or draft_vocab == 1:
        raise UsageError(f"--draft-vocab is {draft_vocab}, expected at least 2, or 0 for the whole vocabulary")
    # Before torch, which takes seconds to import: a mistake in a config should not.
    facts = read_config(verifier or config or "")
    layer = read_draft_config(draft_config, facts) if draft_config else default_layer(facts)
    try:
        import torch

        from trainer import audit as table
        from trainer import drafter
    except ImportError as error:
        raise MissingExtraError(f"the audit needs the trainer's libraries: {error}", hint=extra_hint("train")) from None
    drafter.require_speculators()
    if draft_vocab > facts.vocab_size:
        note(f"--draft-vocab {draft_vocab:,} is more than the verifier has: taking all its {facts.vocab_size:,} tokens")
        draft_vocab = 0
    options = drafter.DrafterOptions(
        layers=drafter.default_layers(facts.n_layers),
        norm="pre",  # the norm is a part of the drafter either way; pre and post count alike
        draft_vocab_size=draft_vocab or None,
        train_lm_head=train_head,
        norm_before_fc=norm_before_fc,
        layer=layer,
    )
    places = locate(verifier, facts) if verifier else None
    with torch.device("meta"):
        model = drafter.empty_drafter(facts, options, "cpu")
    report = table.audit(model, table.expectations(options), table.sources(places, Path(facts.where).name))
    _print(report, json)


def _print(report: AuditReport, json: bool) -> None:
    if json:
        echo_json(report.as_json())
    elif sys.stdout.isatty():
        from rich.console import Console

        Console().print(report.table())
    else:
        for line in report.lines():
            click.echo(line)
