"""How a run goes on, how it shows itself, when it gives up."""

from __future__ import annotations

import click

from extractor.options import shared
from extractor.options.apply import Decorator, together
from extractor.options.values import bytes_value
from hsstore.numbers import FiniteRange

run_options: Decorator = together(
    click.option(
        "--resume", is_flag=True, help="Continue the store if it exists: committed shards are kept, the rest is done."
    ),
    click.option(
        "--append",
        is_flag=True,
        help="Grow the store by these prompts: further shards, numbered behind those that are there.",
    ),
    click.option(
        "--retry-failed",
        is_flag=True,
        help="With --resume: also try those samples again that failed, in shards of their own.",
    ),
    shared.MAX_CONSECUTIVE_ERRORS,
    click.option(
        "--check-first",
        type=click.IntRange(min=0),
        default=4,
        show_default=True,
        metavar="N",
        help="Compare the first N samples with the model's own weights, as `hsstore verify states` does, before"
        " anything is committed; 0 trusts the engine.",
    ),
    click.option(
        "--lease-seconds",
        type=FiniteRange(1, 7 * 86400),
        default=120.0,
        show_default=True,
        help="Several runs may work on one store; a shard whose run was silent for that long is taken over.",
    ),
    click.option(
        "--min-free",
        metavar="SIZE",
        callback=bytes_value,
        help="Begin no further shard when less than this would be left on the disk, such as 50GiB; what is open is"
        " committed, then the run ends and can be resumed.  [default: what the open shards need]",
    ),
    click.option(
        "--metrics-port",
        type=click.IntRange(0, 65535),
        metavar="PORT",
        help="Serve Prometheus metrics on this port while it runs, 0 for any free one.",
    ),
    click.option("--metrics-host", default="127.0.0.1", show_default=True, help="Address to serve them on."),
    click.option("--log-json", metavar="FILE", help="Append one JSON object per event to FILE, or - for stderr."),
    click.option(
        "--dry-run", is_flag=True, help="Only say what it would take: samples, tokens, bytes, shards, free space."
    ),
    shared.JSON,
    shared.QUIET,
)
