"""`hsstore verify states`: options and exit codes. Nothing heavy is imported before it runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from extractor.options import shared
from hsstore.errors import DamagedError, IncompleteError

if TYPE_CHECKING:
    from extractor.states.verification import Verification


@click.command()
@click.argument("store", type=click.Path(path_type=Path))
@shared.MODEL
@click.option(
    "--samples", type=click.IntRange(1), default=16, show_default=True, help="How many, spread over the shards."
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Another seed, other samples.")
@click.option(
    "--max-tokens", type=click.IntRange(1), metavar="T", help="Only the first T tokens of each sample; all without it."
)
@click.option("--head-only", is_flag=True, help="No forward: final norm and head alone are read, on any machine.")
@click.option("--device", default="cpu", show_default=True, help="Where the forward runs: cpu, cuda, cuda:1 …")
@click.option("--threads", type=click.IntRange(1), help="Threads of the arithmetic; as many as cores without it.")
@shared.TRUST_REMOTE_CODE
@click.option(
    "--weights-digest",
    type=click.Choice(["auto", "always", "never"]),
    default="auto",
    show_default=True,
    help="Compare the SHA-256 of the weights; auto = up to 20 GB.",
)
@click.option("--json", is_flag=True, help="One JSON object per finding, per state, and a last one with the summary.")
@click.option("--quiet", is_flag=True, help="No notes, no table: damage and exit code only.")
def states(
    store: Path,
    model: str,
    samples: int,
    seed: int,
    max_tokens: int | None,
    head_only: bool,
    device: str,
    threads: int | None,
    trust_remote_code: bool,
    weights_digest: Literal["auto", "always", "never"],
    json: bool,
    quiet: bool,
) -> None:
    """Check that STORE holds the states of its model.

    Reads only. Three checks of a few samples: the model's head on the stored final states must predict the next token,
    every state must agree with transformers' own forward of the same ids, and the rows with their shard's statistics.
    The forward needs the model in memory in float32; where it does not fit, that is said, and the head decides.

    Exit code 0: sound. 2: wrong call. 3: damaged, or states of something else. 4: nothing could be decided. 10: no
    store or model there. 12: another format. 130: stopped by Ctrl-C.
    """
    from extractor.states import show
    from extractor.states.check import Options
    from extractor.states.device import check_device
    from extractor.states.verification import Settings, verify
    from hsstore import console

    console.set_quiet(quiet)
    options = Options(
        no_forward="left out by --head-only" if head_only else "",
        device=check_device("cpu" if head_only else device),
        trust_remote_code=trust_remote_code,
        threads=threads,
    )
    settings = Settings(
        store=store,
        model=model,
        samples=samples,
        max_tokens=max_tokens,
        seed=seed,
        digest=weights_digest,
        options=options,
    )
    found = verify(settings, console.note)
    if json:
        show.as_json(found)
    else:
        show.as_text(found, quiet=quiet)
    _raise_unless_sound(found)


def _raise_unless_sound(found: Verification) -> None:
    from extractor.states import show

    name = show.name(found.store)
    if show.kinds(found) == "read":
        raise DamagedError(
            f"some samples of {name} cannot be read; the others show nothing wrong",
            hint=f"`hsstore verify manifest {name} --full` says what is damaged",
        )
    if not found.sound:
        raise DamagedError(
            f"{name} does not hold the states of this model: {show.kinds(found)}",
            hint="do not train on it; find out which samples, model or layers are meant, and extract again",
        )
    if not found.is_decided:
        raise IncompleteError(
            f"nothing could be decided about the states of {name}",
            hint="give more --samples, or a machine on which the model fits into memory",
        )
