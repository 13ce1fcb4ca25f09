"""Which module reads and which writes a format, and which of two a directory is in."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from extractor.foreign import modelopt, specforge, speculators, speculators_pt, torchspec
from extractor.foreign.conventions import CONVENTIONS, Convention
from extractor.foreign.facts import Facts
from extractor.foreign.outgoing import Writer
from extractor.foreign.sample import Norm, Reader
from extractor.foreign.settings import ExportSettings, ImportSettings
from hsstore.errors import UsageError
from hsstore.store import Store

_OLD_NAME = re.compile(r"data_\d+\.pt")
_EXPECTED = {
    "specforge": "expected rows_*/data_*.ckpt or .ckpt.gz",
    "speculators": "expected a dataset directory with hidden_states/hs_*.safetensors",
    "speculators-0.4": "expected data_*.pt",
    "torchspec": "expected dataset.json, manifest.jsonl and samples/*.pt",
    "modelopt": "expected *.pt",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A foreign directory, opened."""

    convention: Convention
    reader: Reader
    facts: Facts
    expected: str
    """What its files are called, for people."""


def open_source(settings: ImportSettings) -> Source:
    """The reader of a directory. Raises `UsageError` where there is nothing of that format."""
    if settings.hidden_states is not None and settings.format != "speculators":
        raise UsageError(f"--hidden-states is for speculators; {settings.format} files lie in the directory itself")
    name = _variant(settings)
    root, facts = settings.source, Facts()
    reader: Reader
    match name:
        case "specforge":
            reader = specforge.SpecForgeReader(root=root, cast=settings.cast)
        case "speculators":
            states = settings.hidden_states or root / speculators.STATES
            if not states.is_dir():
                raise UsageError(f"{states} is no directory", hint="name it with --hidden-states")
            reader = speculators.SpeculatorsReader(root=root, states=states, cast=settings.cast)
        case "speculators-0.4":
            reader = speculators_pt.SpeculatorsPtReader(root=root, cast=settings.cast)
            facts = speculators_pt.recorded(root)
        case "torchspec":
            reader, facts = torchspec.TorchSpecReader(root=root, cast=settings.cast), torchspec.recorded(root)
        case "modelopt":
            reader = modelopt.ModelOptReader(root=root, cast=settings.cast)
        case _:
            raise AssertionError(name)
    return Source(convention=CONVENTIONS[name], reader=reader, facts=facts, expected=_EXPECTED[name])


def _variant(settings: ImportSettings) -> str:
    """`speculators` → the older format, when its files are there and none of the newer one."""
    if settings.format != "speculators" or settings.hidden_states is not None:
        return settings.format
    names = {entry.name for entry in os.scandir(settings.source)}
    is_old = any(map(_OLD_NAME.fullmatch, names)) and speculators.STATES not in names
    return "speculators-0.4" if is_old else settings.format


def open_target(settings: ExportSettings, store: Store, norm: Norm) -> Writer:
    """The writer of a directory."""
    root = settings.out
    match settings.format:
        case "specforge":
            return specforge.SpecForgeWriter(root=root, gzip=settings.gzip)
        case "speculators":
            return speculators.SpeculatorsWriter(root=root, store=store)
        case "speculators-0.4":
            return speculators_pt.SpeculatorsPtWriter(root=root)
        case "torchspec":
            return torchspec.TorchSpecWriter(root=root, norm=norm)
        case "modelopt":
            return modelopt.ModelOptWriter(root=root)
    raise AssertionError(settings.format)
