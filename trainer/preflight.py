"""What can be refused before torch is loaded and ranks are started.

Responsible for: proving that store and verifier are the same model, and asking early for what a run will need. Leaves
everything that needs a tensor to `prepare`, which repeats the cheap checks on every rank.
"""

from __future__ import annotations

from pathlib import Path

from hsstore import modeldigest
from hsstore.console import human_bytes, warn
from hsstore.errors import ConflictError, UsageError
from hsstore.plan import PlanParameters
from hsstore.records import Capture, sha256_hex
from hsstore.source import BatchSource, open_source
from trainer.draft_layer import read_draft_config
from trainer.options import TrainOptions
from trainer.state import alone, to_resume
from trainer.verifier import VerifierFacts, read_config

MOST_BYTES_TO_DIGEST = 20_000_000_000  # a quarter of a minute; more is a verifier that nobody reads twice unasked


def open_run_source(options: TrainOptions) -> BatchSource:
    """The source that the options name, in the state that a checkpoint to go on from was trained on.

    A store that grew since has kept that state, so the run goes on to the bit. Raises `ConflictError` when it has not.
    """
    found = to_resume(options) if options.resume else None
    return open_source(
        options.source,
        store=options.store,
        token=options.token,
        verify=options.verify_reads,
        backend=options.backend,
        manifest_id=found[1].identity.manifest_id if found else None,
    )


def preflight(options: TrainOptions) -> None:
    """Raise what `hsstore.errors` has for a run that could not start."""
    PlanParameters(max_seq_len=options.max_seq_len, seed=options.seed, overflow=options.overflow).check()
    facts = read_config(options.verifier)
    if options.draft_config is not None:
        if Path(options.draft_config).is_dir():
            raise UsageError(f"--draft-config {options.draft_config} is a directory, expected a JSON file")
        read_draft_config(options.draft_config, facts)
    with alone(options):
        to_resume(options)
    source = open_run_source(options)
    check_verifier(source.header.capture, facts)
    source.close()


def check_verifier(capture: Capture, facts: VerifierFacts) -> None:
    """Raise `ConflictError` unless the store's states are this verifier's."""
    hint = _hint(capture)
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
    tokenizer = modeldigest.tokenizer_sha256(Path(facts.where).parent)
    if tokenizer and capture.tokenizer_sha256 and tokenizer != capture.tokenizer_sha256:
        raise ConflictError(
            f"the store was captured from {capture.model} with a tokenizer of SHA-256 {capture.tokenizer_sha256[:16]};"
            f" the one in {Path(facts.where).parent} has {tokenizer[:16]}",
            hint=hint,
        )
    if len(capture.layers) < 2 or capture.layers[-1] != "final":
        raise ConflictError(
            f"the store holds the states {', '.join(capture.layers)}; a drafter needs auxiliary ones and final",
            hint="extract with --layers eagle3",
        )


def check_weights(capture: Capture, facts: VerifierFacts) -> None:
    """Raise `ConflictError` unless the verifier's weight files are those that made the store; warn when unread."""
    directory = Path(facts.where).parent
    name, value = modeldigest.SAMPLED_FLAG
    sampled = capture.flags.get(name) == value
    files = modeldigest.weight_files(directory)
    missing = [file.name for file in files if not file.is_file()]
    n_bytes = sum(file.stat().st_size for file in files if file.is_file())
    if not files or missing:
        why = f"{missing[0]} is not there" if missing else "there are none"
    elif not sampled and n_bytes > MOST_BYTES_TO_DIGEST:
        why = f"{human_bytes(n_bytes)} are not read for that"
    else:
        found = modeldigest.weights_sha256(files, sampled=sampled)
        if found == capture.weights_sha256:
            return
        raise ConflictError(
            f"the store was captured from {capture.model} with weights of SHA-256 {capture.weights_sha256[:16]};"
            f" those in {directory} have {found[:16]}",
            hint=_hint(capture),
        )
    warn(f"the weight files of {directory} were not compared with the store's: {why}")


def _hint(capture: Capture) -> str:
    return f"give --verifier the model the store was extracted from: {capture.model}"
