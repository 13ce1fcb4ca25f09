"""All that a run knows before anybody is asked: model, template, sampling, the first reading of the prompts file.

Reads files, changes nothing, refuses what cannot be answered. Leaves what earlier runs left to `state`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from extractor.chat import ChatTokenizer
from extractor.generate import record
from extractor.generate.scan import Scan, scan
from extractor.generate.settings import Sampling, Settings
from extractor.generate.sources import name_of
from extractor.input import digest_weights
from extractor.target import refuse_list
from extractor.verifier import Verifier, read_verifier
from extractor.weights import check_complete, weight_files
from hsstore.console import Progress, warn
from hsstore.errors import NotFoundError, UsageError

_CHANNELS = "<|channel|>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    settings: Settings
    verifier: Verifier
    sampling: Sampling
    chat: ChatTokenizer
    found: Scan
    source: str
    """Who answers: `servers`, `sglang` or `transformers`."""

    def identity(self) -> dict[str, Any]:
        """What made these answers; reads the weights."""
        mode = self.settings.weights_digest or ("none" if self.settings.urls else "full")
        parameters = self.settings.parameters(self.sampling) | {"engine": self.source}
        if self.source != "servers":
            parameters["dtype"] = self.settings.dtype
        if self.source == "transformers":  # who is answered together decides the last bits of the numbers
            parameters["batch"] = self.settings.batch
        return {
            "model": record.model_of(
                self.verifier, "" if mode == "none" else digest_weights(self.verifier, mode), mode
            ),
            "input": record.input_of(self.found),
            "parameters": parameters,
        }


def open_input(settings: Settings) -> Opening:
    """Raises `UsageError` or `NotFoundError` naming what is wrong with model, template or prompts file."""
    source = name_of(settings)
    verifier = read_verifier(settings.model)
    if not settings.urls:
        check_complete(weight_files(verifier.path))
    sampling = settings.sampling(verifier.path)
    chat = _chat(settings, verifier)
    size = settings.prompts.stat().st_size if settings.prompts.is_file() else 0
    with Progress(size, f"reading {settings.prompts.name}", unit="bytes") as progress:
        found = scan(settings.prompts, settings.turns, progress.update)
    return Opening(settings=settings, verifier=verifier, sampling=sampling, chat=chat, found=found, source=source)


def _chat(settings: Settings, verifier: Verifier) -> ChatTokenizer:
    if not verifier.tokenizer_sha256:
        raise UsageError(
            f"{verifier.path} has no tokenizer", hint="copy tokenizer.json and tokenizer_config.json into it"
        )
    chat = ChatTokenizer.load(
        verifier.path, trust_remote_code=settings.trust_remote_code, template_arguments=settings.template_arguments
    )
    if not chat.template:
        raise UsageError(
            f"the tokenizer of {verifier.name} has no chat template: nothing says how it is to be asked",
            hint="put chat_template.jinja into its directory",
        )
    chat.check_template()
    if _CHANNELS in chat.template and not (settings.urls and settings.api == "openai"):
        raise UsageError(
            f"{verifier.name} answers in channels, which a server has to take apart",
            hint="give --api openai and --url of a server with a reasoning parser",
        )
    if chat.writes_the_date:
        warn("the chat template writes today's date: give --template-arg date_string=…, here and to extract")
    return chat


def refuse_unwritable(settings: Settings) -> None:
    """Raise `UsageError` or `NotFoundError` for an output that cannot be, before anything takes long."""
    out = settings.out
    if not out.name:
        raise UsageError(f"--out {str(out)!r} names no file", hint="give a file of JSON lines")
    for option, path in (("--out", out), ("--failed-out", settings.failures)):
        if path.is_dir():
            raise UsageError(f"{option} {path} is a directory, expected a file", hint="give a file of JSON lines")
        if not path.absolute().parent.is_dir():
            raise NotFoundError(f"{option} {path}: its directory does not exist", hint="make it first")
    refuse_list("--failed-out", settings.failures, settings.prompts)
    ours = (out, settings.failures, settings.part, settings.meta)
    if any(_same(path, settings.prompts) for path in ours):
        raise UsageError(f"{settings.prompts} would be overwritten: it is the prompts file", hint="give another --out")
    if len({path.absolute() for path in ours}) < len(ours):
        raise UsageError(f"--failed-out {settings.failures} is a file of --out", hint="give another name")
    there = [path for path in (out, settings.part, settings.meta) if path.exists()]
    if there and not settings.resume:
        raise UsageError(
            f"{there[0]} is there already", hint="give --resume to continue it, another --out, or remove it"
        )


def _same(one: Path, other: Path) -> bool:
    return one.exists() and other.exists() and one.samefile(other)
