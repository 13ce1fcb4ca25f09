"""Rewrite the generated parts of the documentation in place: help texts, and tables that the code already holds.

    python docs/embed_help.py

A generated part lies between `<!-- generated: NAME -->` and `<!-- end -->`. NAME is `help VERB …`, `errors`,
`reasons`, `import reasons`, `generate skipped` or `generate failed`. `tests/test_docs.py` fails when a page holds
something else than this would write.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click

DOCS = Path(__file__).resolve().parent
PART = re.compile(r"<!-- generated: (?P<name>[^>]+?) -->\n.*?<!-- end -->", re.DOTALL)
WIDTH = 100  # of the terminal; click itself wraps at 80
sys.path.insert(0, str(DOCS.parent))  # run from a checkout as it is


def pages() -> list[Path]:
    """Pages with generated parts: everything beside this file, not docs/design."""
    return sorted(DOCS.glob("*.md"))


def commands() -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Every verb and every command below one, with the words that call it."""
    from hsstore.cli import cli

    def walk(words: tuple[str, ...], command: click.Command) -> Iterator[tuple[tuple[str, ...], click.Command]]:
        if words:
            yield words, command
        if isinstance(command, click.Group):
            context = click.Context(command)
            for name in command.list_commands(context):
                below = command.get_command(context, name)
                assert below is not None
                yield from walk((*words, name), below)

    return walk((), cli)


def help_text(words: tuple[str, ...]) -> str:
    """What `hsstore WORDS --help` prints in a terminal of WIDTH columns."""
    # A process of its own: click remembers on a command what another caller in this one made of its options.
    command = [sys.executable, "-m", "hsstore.cli", *words, "--help"]
    printed = subprocess.run(
        command, cwd=DOCS.parent, env=os.environ | {"COLUMNS": str(WIDTH)}, capture_output=True, text=True, check=True
    ).stdout
    return f"```console\n$ hsstore {' '.join(words)} --help\n{printed.rstrip()}\n```"


def error_table() -> str:
    """Kind, exit code and HTTP status of every class of the error tree."""
    from hsstore.errors import HsstoreError

    def tree(class_: type[HsstoreError]) -> Iterator[type[HsstoreError]]:
        yield class_
        for below in class_.__subclasses__():
            if below.__module__ == HsstoreError.__module__:  # not the ones that a road keeps to itself
                yield from tree(below)

    rows = [f"| `{c.kind}` | `{c.__name__}` | {c.exit_code} | {c.http_status} |" for c in tree(HsstoreError)]
    return "\n".join(["| kind | class | exit code | HTTP status |", "|---|---|---|---|", *rows])


def reason_table() -> str:
    """Why a line of a prompts file gives no sample."""
    from extractor.reasons import REASONS

    rows = [f"| `{name}` | {text.replace('|', chr(92) + '|')} |" for name, text in REASONS.items()]
    return "\n".join(["| reason | the line is left out because |", "|---|---|", *rows])


def import_reason_table() -> str:
    """Why an input of another project's format is not in the store."""
    from extractor.foreign.reasons import REASONS

    return "\n".join(
        ["| reason | what is wrong |", "|---|---|", *(f"| `{n}` | {text} |" for n, text in REASONS.items())]
    )


def generate_reason_table(status: str) -> str:
    """Why a line has no answer."""
    from extractor.generate import reasons

    rows = [f"| `{n}` | {text} |" for n, text in getattr(reasons, status.upper()).items()]
    return "\n".join(["| reason | the line has no answer because |", "|---|---|", *rows])


def generate(name: str) -> str:
    """The contents of one generated part."""
    if name.startswith("help "):
        return help_text(tuple(name.split()[1:]))
    tables = {
        "errors": error_table,
        "reasons": reason_table,
        "import reasons": import_reason_table,
        "generate skipped": lambda: generate_reason_table("skipped"),
        "generate failed": lambda: generate_reason_table("failed"),
    }
    if name not in tables:
        raise SystemExit(f"error: nothing is generated as {name!r}; there are help VERB, {', '.join(tables)}")
    return tables[name]()


def render(text: str) -> str:
    """A page with all its generated parts current."""

    def part(found: re.Match[str]) -> str:
        return f"<!-- generated: {found['name']} -->\n{generate(found['name'])}\n<!-- end -->"

    return PART.sub(part, text)


def main() -> None:
    for page in pages():
        old = page.read_text(encoding="utf-8")
        new = render(old)
        if new != old:
            page.write_text(new, encoding="utf-8")
            print(f"{page.relative_to(DOCS.parent)}: rewritten")


if __name__ == "__main__":
    main()
