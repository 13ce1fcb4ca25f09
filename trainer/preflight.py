"""What can be refused before torch is loaded and ranks are started.

Responsible for: proving that store and verifier are the same model, and asking early for what a run will need. Leaves
everything that needs a tensor to `prepare`, which repeats the cheap checks on every rank.
"""

from __future__ import annotations

from pathlib import Path

from hsstore.errors import ConflictError
from hsstore.records import Capture, sha256_hex
from hsstore.source import BatchSource, open_source
from trainer.draft_layer import read_draft_config
from trainer.options import TrainOptions
from trainer.state import to_resume
from trainer.verifier import VerifierFacts, read_config


def open_run_source(options: TrainOptions) -> BatchSource:
    """The source that the options name."""
    return open_source(options.source, store=options.store, token=options.token, verify=options.verify)


def preflight(options: TrainOptions) -> None:
    """Raise what `hsstore.errors` has for a run that could not start."""
    facts = read_config(options.verifier)
    if options.draft_config is not None:
        read_draft_config(options.draft_config, facts)
    to_resume(options)
    Path(options.out).mkdir(parents=True, exist_ok=True)
    source = open_run_source(options)
    check_verifier(source.header.capture, facts)
    source.close()


def check_verifier(capture: Capture, facts: VerifierFacts) -> None:
    """Raise `ConflictError` unless the store's states are this verifier's."""
    hint = f"give --verifier the model the store was extracted from: {capture.model}"
    found_sha256 = sha256_hex(Path(facts.where).read_bytes())
    for what, stored, found in (
        ("hidden_size", capture.hidden_size, facts.hidden_size),
        ("vocab_size", capture.vocab_size, facts.vocab_size),
        ("num_hidden_layers", capture.n_layers, facts.n_layers),
        ("a config.json of SHA-256", capture.config_sha256[:16], found_sha256[:16]),
    ):
        if stored != found:
            raise ConflictError(
                f"the store was captured from {capture.model} with {what} {stored}; {facts.where} has {found}",
                hint=hint,
            )
    if len(capture.layers) < 2 or capture.layers[-1] != "final":
        raise ConflictError(
            f"the store holds the states {', '.join(capture.layers)}; a drafter needs auxiliary ones and final",
            hint="extract with --layers eagle3",
        )
