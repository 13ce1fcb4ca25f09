"""One extraction on many machines: parts for batch systems, workers for Ray."""

from __future__ import annotations

import click

from extractor.options.apply import Decorator, together
from hsstore.numbers import FiniteRange

fleet_options: Decorator = together(
    click.option(
        "--shard",
        metavar="I/N",
        help="Take only the shards whose number is I modulo N, I from 0 to N-1, and end when these are committed."
        " slurm and torchrun take I and N from the variables of those, auto from whichever is there.",
    ),
    click.option(
        "--ray",
        is_flag=False,
        flag_value="",
        metavar="[ADDRESS]",
        help="Run workers as Ray actors, on every node of a cluster: auto, HOST:PORT or ray://HOST:PORT. Without an"
        " address Ray is started on this machine.",
    ),
    click.option(
        "--ray-actors",
        type=click.IntRange(min=1),
        metavar="N",
        help="How many workers, wherever Ray finds room.  [default: on each node as many as its GPUs are enough for,"
        " or one]",
    ),
    click.option(
        "--ray-gpus-per-actor",
        type=FiniteRange(min=0),
        metavar="GPUS",
        help="GPUs of a worker.  [default: tp x dp of the engine, none in a cluster without GPUs]",
    ),
    click.option(
        "--ray-cpus-per-actor",
        type=FiniteRange(min=0),
        default=1.0,
        show_default=True,
        metavar="CPUS",
        help="CPUs that Ray sets aside for a worker.",
    ),
    click.option(
        "--ray-patience",
        type=FiniteRange(min=0),
        default=600.0,
        show_default=True,
        metavar="SECONDS",
        help="How long to wait for a node to join when none is left.",
    ),
)
