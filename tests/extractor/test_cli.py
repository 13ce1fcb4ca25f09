"""The command line itself: light to ask for help, complete in what it says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from click.testing import CliRunner

from extractor.cli import extract
from extractor.reasons import REASONS


def test_help_loads_nothing_heavy() -> None:
    """`hsstore extract --help` answers at once, also where no extra is installed."""
    code = (
        "import sys; from hsstore.cli import run; assert run(['extract', '--help']) == 0;"
        "heavy = {'torch', 'numpy', 'transformers', 'sglang', 'zarr', 'jinja2'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2], stdout=subprocess.DEVNULL)


def test_every_option_has_its_help() -> None:
    missing = [p.name for p in extract.params if not getattr(p, "help", "")]
    assert missing == []
    text = CliRunner().invoke(extract, ["--help"]).output
    assert "written + failed + skipped = input" in " ".join(text.split())


def test_reasons_are_sentences() -> None:
    assert all(len(text) > 20 and not text.endswith(".") for text in REASONS.values())
