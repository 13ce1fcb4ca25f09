"""`hsstore train`: the options of a training run, spelled for the command line.

Responsible for: reading options, choosing between one rank here, W ranks started here and a rank of torchrun's, and
the exit code. Imports no torch before it has to, so `--help` is quick.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from hsstore.console import echo_json
from hsstore.credentials import checked_token, read_token_file
from hsstore.errors import EXIT_INTERRUPTED, MissingExtraError, extra_hint
from trainer.audit_cli import audit
from trainer.interrupt import Stop
from trainer.options import TrainOptions
from trainer.outcome import Outcome, describe

__all__ = ["audit", "train"]

_DEFAULTS = {name: field.default for name, field in TrainOptions.__dataclass_fields__.items()}


def _option(name: str, help_: str, **settings: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """An option that sets the field of `TrainOptions` of the same name; its default is the field's."""
    default = _DEFAULTS[name]
    return click.option(
        "--" + name.replace("_", "-"), name, help=help_, default=default, show_default=default is not None, **settings
    )


@click.command()
@click.option("--source", required=True, help="Path of a store, or URL of a service.")
@click.option("--verifier", required=True, type=click.Path(), help="Directory of the verifier's checkpoint.")
@click.option("--out", required=True, type=click.Path(), help="Directory of the run: metrics and checkpoints.")
@_option("store", "Name of the store, when the service has several.")
@_option("nproc", "Ranks to start on this machine.", type=int)
@_option("resume", "Go on from the last checkpoint in --out.", is_flag=True)
@_option("max_seq_len", "Tokens of a packed batch.", type=int)
@_option("overflow", "What happens to longer samples.", type=click.Choice(["truncate", "drop"]))
@_option("epochs", "Passes over the training split.", type=int)
@_option("max_steps", "End after that many steps, if that is before --epochs.  [default: none]", type=int)
@_option("stop_at", "Save and end this part of the run at that step; --resume goes on.", type=int)
@_option("seed", "Of order, noise and initial weights.", type=int)
@_option("lr", "Peak learning rate of AdamW.", type=float)
@_option("warmup_steps", "Steps of linear warm-up.  [default: 1 % of all]", type=int)
@_option("schedule", "Learning rate after the warm-up.", type=click.Choice(["cosine", "constant"]))
@_option("weight_decay", "Of AdamW.", type=float)
@_option("grad_clip", "Largest norm of the gradient; 0 for none.", type=float)
@_option("ttt_steps", "Steps the drafter is unrolled in training.", type=int)
@_option("ttt_decay", "Step k of them weighs decay^k.", type=float)
@_option("noise_std", "Uniform noise of ± that on the auxiliary states, in training only.", type=float)
@_option("draft_vocab", "Size of the draft vocabulary; at most the verifier's, 0 for all of it.", type=int)
@_option("draft_config", "JSON with the drafter's decoder layer.", type=click.Path())
@click.option("--train-head/--no-train-head", default=True, show_default=True, help="Train the drafter's own head.")
@_option("compute_dtype", "Of activations and frozen weights.", type=click.Choice(["bfloat16", "float32"]))
@_option("num_workers", "Threads per rank that read and prepare batches; 0 = none of its own.", type=int)
@_option("threads", "CPU threads per rank.  [default: cores / ranks]", type=int)
@_option("device", "Where to train.", type=click.Choice(["auto", "cpu", "cuda"]))
@_option("save_every", "Steps between checkpoints inside an epoch.", type=int)
@_option("keep", "Checkpoints to keep.", type=int)
@_option("validate_every", "Steps between validations inside an epoch.  [default: none]", type=int)
@_option("log_every", "Steps between console lines; metrics.jsonl has every step.", type=int)
@_option(
    "verify_reads",
    "Batches checked against the CRCs in their records.",
    type=click.Choice(["off", "sampled", "always"]),
)
@_option("backend", "How a store's files are read: pread for network disks.", type=click.Choice(["mmap", "pread"]))
@_option("token", "Token of the service; better in --token-file.", envvar="HSSTORE_TOKEN", show_envvar=True)
@click.option("--token-file", type=click.Path(path_type=Path), help="File that holds the token.")
@click.option("--json", is_flag=True, help="Print the outcome as JSON on stdout.")
def train(token_file: Path | None, json: bool, **values: Any) -> None:
    """Train an EAGLE-3 drafter from a store or a service.

    SIGTERM and Ctrl-C end all ranks after the step in progress, with a checkpoint (exit code 130). With
    `torchrun -m trainer` instead of `hsstore train` the ranks are torchrun's.
    """
    if token_file is not None:
        values["token"] = read_token_file(token_file)
    elif values["token"] is not None:
        values["token"] = checked_token(values["token"], "--token (or HSSTORE_TOKEN)")
    options = TrainOptions(**values)
    _require("torch", "speculators")
    outcome, first = _run(options)
    if first:
        describe(outcome)
        if json:
            echo_json(outcome)
    if outcome.status == "interrupted":
        sys.exit(EXIT_INTERRUPTED)


def _run(options: TrainOptions) -> tuple[Outcome, bool]:
    """The outcome, and whether this process is the one to speak of it."""
    from trainer.launch import launch
    from trainer.preflight import preflight
    from trainer.rank import run_rank

    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:  # torchrun started us
        with Stop() as stop:
            return run_rank(options, stop), os.environ["RANK"] == "0"
    preflight(options)  # the signals end it as they end any program: there is nothing to save yet
    with Stop() as stop:
        return (launch if options.nproc > 1 else run_rank)(options, stop), True


def _require(*packages: str) -> None:
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise MissingExtraError(f"training needs {' and '.join(missing)}", hint=extra_hint("train"))
