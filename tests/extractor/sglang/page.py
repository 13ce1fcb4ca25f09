"""Runs every family on the real engine, and writes the table of docs/models.md.

    python -m tests.extractor.sglang.page

Takes some minutes. Nothing is written when a figure is above the bound. The text around the table is written by hand;
`test_families` runs the same comparison in every test run.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from extractor.engines.sglang import SglangEngine
from tests.extractor.sglang import table
from tests.extractor.sglang.families import FAMILIES, GPT_OSS, Family, build
from tests.extractor.sglang.table import BOUND, Cell, Reference
from tests.extractor.sglang.zygote import Zygote
from tests.models import ROOT

PAGE = ROOT / "docs" / "models.md"
PART = re.compile(r"(?<=<!-- measured -->\n).*?(?=<!-- measured end -->)", re.DOTALL)
HEAD = ("family", "class in config.json", "attention backend", "compared with", "prompts", "rows", "relative error")


def start(model: Path, layers: tuple[int, ...] = table.LAYERS, **options: Any) -> SglangEngine:
    names = table.names(layers)
    return SglangEngine(model, layers=names, dtype="float32", options={**table.OPTIONS, **options})


def measure(directory: Path) -> Iterator[tuple[Family, Cell]]:
    """Every line of the table."""
    for family in FAMILIES:
        model = directory / family.name
        reference = Reference(build(family, model))
        for cell in table.cells(family, start, model, reference):
            yield family, cell
        for layers in table.TRAP_LAYERS if family.trap else ():
            yield family, table.trap_cell(family, start, model, reference, layers)
    build(GPT_OSS, directory / GPT_OSS.name)
    yield GPT_OSS, table.gpt_oss_cell(start, directory / GPT_OSS.name)
    yield FAMILIES[0], table.dp_attention_cell(start, directory / FAMILIES[0].name)


def row(family: Family, cell: Cell) -> str:
    by = f"transformers {family.reference}" + (" (renamed)" if family.note else "")
    errors = ", ".join(f"`{name}` {error:.5f}" for name, error in cell.errors.items())
    if cell.reason:
        by, errors = "not run", cell.reason
    name = "-" if cell.architecture == "-" else f"`{cell.architecture}`"
    fields = (cell.family, name, cell.backend or "-", by, cell.way, str(cell.rows or "-"), errors)
    return f"| {' | '.join(fields)} |"


def table_lines(text: str) -> list[list[str]]:
    """The cells of each line of the page's table."""
    part = PART.search(text)
    assert part is not None
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in part[0].strip().splitlines()[2:]]


def main() -> int:
    os.environ["OMP_NUM_THREADS"] = "1"
    rows = []
    with tempfile.TemporaryDirectory() as directory, Zygote() as zygote, zygote.used(pytest.MonkeyPatch):
        for family, cell in measure(Path(directory)):
            rows.append(row(family, cell))
            print(rows[-1], flush=True)
            if max(cell.worst, 0.0, *cell.errors.values()) > BOUND:
                return 1
    lines = [f"| {' | '.join(HEAD)} |", "|---" * len(HEAD) + "|", *rows]
    PAGE.write_text(PART.sub(lambda _: "\n".join(lines) + "\n", PAGE.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
