"""All that an extraction knows before its verifier runs: model, samples, layout, digest of the weights.

Reads files and shows how far it is; refuses what cannot be extracted. Leaves to `extractor.run` what is done with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from extractor import estimate, fingerprint
from extractor.chat import ChatTokenizer
from extractor.prompts import PromptOptions, Prompts, read_prompts
from extractor.report import skipped, warn_failures
from extractor.settings import DEFAULT_MAX_LENGTH, Settings
from extractor.verifier import Verifier, parse_layers, read_verifier
from extractor.weights import Mode, check_complete, weight_files, weights_bytes
from extractor.words import counted
from hsstore import manifest
from hsstore.console import Progress, human_bytes, human_count, note, warn
from hsstore.errors import UsageError
from hsstore.growth import layout_of
from hsstore.modeldigest import weights_sha256
from hsstore.records import SampleEntry, Split

_LARGE_BYTES = 4 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """All that is known before the verifier runs."""

    verifier: Verifier
    layers: tuple[str, ...]
    prompts: Prompts
    shape: estimate.Shape
    entries: list[SampleEntry]

    @property
    def bytes_per_token(self) -> int:
        return estimate.bytes_per_token(self.layers, self.verifier.hidden_size)


def read_input(settings: Settings) -> Input:
    """Model directory and prompts file, read and laid out."""
    verifier = read_verifier(settings.model)
    layers = parse_layers(settings.layers, verifier)
    check_complete(weight_files(verifier.path))
    options = PromptOptions(
        vocab_size=verifier.vocab_size,
        max_length=_max_length(settings.max_length, verifier),
        overlong=settings.overlong,
        template_arguments=settings.template_arguments,
    )
    prompts = _read_prompts(settings, verifier, options)
    entries = [SampleEntry(s.uid, s.source_index, 0, len(s.input_ids)) for s in prompts.samples]
    shape = _lay_out(settings, entries, verifier.hidden_size, prompts)
    return Input(verifier=verifier, layers=layers, prompts=prompts, shape=shape, entries=entries)


def _lay_out(settings: Settings, entries: list[SampleEntry], hidden_size: int, prompts: Prompts) -> estimate.Shape:
    """With the rows of the store that is resumed: what else was asked is named as a difference, not laid out."""
    stored = manifest.load_header(settings.out).shard_rows if settings.out_is_store else None
    rows = stored if stored and settings.continues else settings.shard_rows or stored
    try:
        return estimate.shape_of(entries, hidden_size, rows)
    except UsageError:
        if settings.resume and stored:  # other prompts need not fit at all; then that is what is to be said
            fingerprint.refuse(settings.out, differences_from_store(settings, prompts))
        raise


def differences_from_store(settings: Settings, prompts: Prompts) -> list[str]:
    """What the prompts file and the options would change in the store that is there."""
    header = manifest.load_header(settings.out)
    split = Split(salt=settings.split_salt, validation_fraction=settings.validation_fraction)
    out = []
    layouts = manifest.load_layouts(settings.out, header)
    if not settings.append and layout_of(layouts, prompts.summary) is None:
        out += fingerprint.input_differences(layouts[0].input, prompts.summary)
    return out + fingerprint.header_differences(header, split, settings.shard_rows)


def _max_length(asked: int | None, verifier: Verifier) -> int:
    context = verifier.context_tokens
    if asked is not None and context and asked > context:
        raise UsageError(
            f"--max-length {asked} is beyond the {context} tokens of context that {verifier.name} has",
            hint=f"give --max-length {context}",
        )
    return asked or min(DEFAULT_MAX_LENGTH, context or DEFAULT_MAX_LENGTH)


def _read_prompts(settings: Settings, verifier: Verifier, options: PromptOptions) -> Prompts:
    @cache
    def tokenizer() -> ChatTokenizer:
        if not verifier.tokenizer_sha256:
            raise UsageError(
                f"{verifier.path} has no tokenizer, and {settings.prompts} holds text",
                hint="copy tokenizer.json and tokenizer_config.json into it, or use lines with input_ids and loss_mask",
            )
        loaded = ChatTokenizer.load(
            verifier.path,
            trust_remote_code=settings.trust_remote_code,
            template_arguments=settings.template_arguments,
        )
        if loaded.writes_the_date:
            warn("the chat template writes today's date: a resume tomorrow needs --template-arg date_string=… today")
        return loaded

    size = settings.prompts.stat().st_size if settings.prompts.is_file() else 0
    with Progress(size, f"reading {settings.prompts.name}", unit="bytes") as progress:
        prompts = read_prompts(settings.prompts, options, tokenizer, progress.update)
    if prompts.n_truncated:
        note(
            f"{human_count(prompts.n_truncated)} of {counted(len(prompts.samples), 'sample')} cut to"
            f" {options.max_length} tokens (--max-length, --overlong)"
        )
    warn_failures(skipped(prompts), str(settings.report))
    return prompts


def digest_weights(verifier: Verifier, mode: Mode) -> str:
    """SHA-256 of the weights, with progress where it takes long."""
    files = weight_files(verifier.path)
    size = weights_bytes(files)
    if mode == "full" and size > _LARGE_BYTES:
        note(f"hashing {human_bytes(size)} of weights (--weights-digest sampled reads 17 MiB of each file)")
    with Progress(size, "hashing weights", unit="bytes") as progress:
        return weights_sha256(
            files, sampled=mode == "sampled", on_bytes=lambda n: progress.update(min(size, progress.done + n))
        )
