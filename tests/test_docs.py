"""The documentation against the code: nothing left out, nothing that does not exist, examples that run."""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import click
import pytest

import hsstore
from hsstore import errors
from hsstore.cli import cli
from tests.models import ROOT
from tests.stores import make_samples, make_store

DOCS = ROOT / "docs"
README = ROOT / "README.md"
PAGES = sorted([README, ROOT / "CHANGELOG.md", *DOCS.rglob("*.md")])
OF_CLICK = {"--help", "--version"}


def embed_help() -> ModuleType:
    spec = importlib.util.spec_from_file_location("embed_help", DOCS / "embed_help.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


EMBED = embed_help()
COMMANDS: dict[tuple[str, ...], click.Command] = dict(EMBED.commands())


def blocks(page: Path, *languages: str) -> Iterator[str]:
    """Fenced blocks of these languages; "" for those without one."""
    for language, text in re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
        if language in languages:
            yield text


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", EMBED.pages(), ids=name)
def test_generated_parts_are_current(page: Path) -> None:
    """Help texts, errors and reasons in the pages are those of the code; `python docs/embed_help.py` renews them."""
    text = page.read_text()
    assert EMBED.render(text) == text, "run `python docs/embed_help.py`"
    assert text.count("<!-- generated:") == text.count("<!-- end -->")


def test_every_command_is_on_exactly_one_page() -> None:
    found = [m for page in EMBED.pages() for m in re.findall(r"<!-- generated: help (.+?) -->", page.read_text())]
    assert sorted(found) == sorted(" ".join(words) for words in COMMANDS)
    assert len(found) > 9  # the verbs are there at all


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_option_says_what_it_does(words: tuple[str, ...]) -> None:
    """An option without a help text would stand in the page as a bare name."""
    command = COMMANDS[words]
    assert command.help
    text = "\n".join(page.read_text() for page in EMBED.pages())
    for option in command.params:
        if isinstance(option, click.Option):
            assert option.help, option.opts
            assert not option.hidden
            assert all(spelling in text for spelling in option.opts), option.opts


def test_variables_with_another_name_are_listed() -> None:
    """`HSSTORE_<COMMAND>_<OPTION>` holds for every option but those in the table of docs/errors.md."""
    other = set()
    for words, command in COMMANDS.items():
        for option in command.params:
            spellings = [o.lstrip("-").replace("-", "_") for o in [*option.opts, *option.secondary_opts]]
            if isinstance(option, click.Option) and option.name not in spellings:
                other.add("HSSTORE_" + "_".join([*words, option.name or ""]).upper())
    listed = set(re.findall(r"^\| `hsstore .* \| `(HSSTORE_\w+)", (DOCS / "errors.md").read_text(), re.MULTILINE))
    assert listed == other


def test_every_kind_of_error_is_explained() -> None:
    text = (DOCS / "errors.md").read_text()
    kinds = {c.kind: c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, errors.HsstoreError)}
    table = set(re.findall(r"^\| `(\w+)` \| `\w+Error`", text, re.MULTILINE))
    advice = text.partition("What to do:")[2].partition("\n## ")[0]
    assert table == set(kinds)
    assert set(re.findall(r"`(\w+)`", advice)) >= set(kinds)
    codes = {str(c.exit_code) for c in kinds.values()} | {str(errors.EXIT_INTERRUPTED)}
    assert set(re.findall(r"^\| (\d+) \|", text, re.MULTILINE)) >= codes | {"0"}


def test_every_kind_of_finding_is_explained() -> None:
    files = ("checks.py", "builtcheck.py", "namecheck.py", "filecheck.py", "verify.py", "findings.py")
    source = "".join((ROOT / "hsstore" / f).read_text() for f in files)
    kinds = set(re.findall(r'(?:damage\(|note\(|at\(\s*\w*\.?record, |kind=)"(\w+)"', source))
    assert len(kinds) > 10
    table = re.findall(r"^\| `(\w+)` \| (?:damage|note) \|", (DOCS / "verify.md").read_text(), re.MULTILINE)
    assert sorted(table) == sorted(kinds)


def test_every_route_and_metric_is_documented(tmp_path: Path) -> None:
    """Both ways: what the service has stands in docs/http.md, and what stands there the service has."""
    from server.app import create_app
    from server.metrics import Metrics
    from server.settings import Settings

    make_store(tmp_path / "tiny", make_samples([5, 9])).close()
    app = create_app(Settings(stores=(tmp_path / "tiny",)))
    methods = ("get", "head", "post", "put", "delete", "patch")
    routes = {f"{m.upper()} {path}" for path, item in app.openapi()["paths"].items() for m in methods if m in item}
    text = (DOCS / "http.md").read_text()
    assert set(re.findall(r"^\| `([A-Z]+ /[^`]*)` \|", text, re.MULTILINE)) == routes | {"GET /openapi.json"}
    assert len(routes) > 12
    metrics = {f"{m.name}_total" if m.type == "counter" else m.name for m in Metrics().registry.collect()}
    assert set(re.findall(r"^\| `(hsstore_\w+)` \|", text, re.MULTILINE)) == metrics


def test_every_public_name_is_documented() -> None:
    text = (DOCS / "python.md").read_text()
    assert all(f"`{public}`" in text for public in hsstore.__all__)


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_relative_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target


def test_guarantees_name_tests_that_exist() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", README.read_text())
    assert len(named) > 10
    for file, test in named:
        assert f"def {test}(" in (ROOT / file).read_text(), f"{file}::{test}"


def shell_lines() -> Iterator[tuple[Path, str]]:
    for page in PAGES:
        for block in blocks(page, "console"):
            for line in block.replace("\\\n", " ").splitlines():
                if line.startswith("$ "):
                    yield page, line.removeprefix("$ ")


def test_commands_in_the_pages_exist() -> None:
    """Every `hsstore …` line parses: verb, options, required ones, values. Every make target and script is there."""
    makefile, n_parsed = (ROOT / "Makefile").read_text(), 0
    for page, line in shell_lines():
        match shlex.split(re.split(r" [|&]| > ", line)[0]):
            case ["make", target, *_]:
                assert re.search(rf"^{target}:", makefile, re.MULTILINE), line
            case ["python", script, *_] if script.endswith(".py"):
                assert (ROOT / script).is_file(), line
            case ["hsstore", *arguments] | ["torchrun", "--nproc-per-node", _, "-m", "trainer", *arguments]:
                try:
                    parse(arguments if line.startswith("hsstore") else ["train", *arguments])
                except click.UsageError as error:
                    pytest.fail(f"{name(page)}: {line}: {error.message}")
                n_parsed += 1
    assert n_parsed > 20


def parse(arguments: list[str]) -> None:
    """Parse a command line as click does, and run nothing."""
    if arguments[-1] == "--help":
        return
    command: click.Command = cli
    while isinstance(command, click.Group):
        context = click.Context(command)
        below = command.get_command(context, arguments[0])
        if below is None:
            raise click.UsageError(f"no command {arguments[0]}")
        command, arguments = below, arguments[1:]
    command.make_context(command.name, list(arguments))


@pytest.mark.parametrize("page", [README, DOCS / "python.md"], ids=name)
def test_examples_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each Python block runs by itself beside a store named `states`."""
    make_store(tmp_path / "states", make_samples([40, 5, 300, 17]), shard_rows=512).close()
    monkeypatch.chdir(tmp_path)
    examples = list(blocks(page, "python"))
    assert examples
    for example in examples:
        run = subprocess.run([sys.executable, "-W", "error", "-c", example], capture_output=True, text=True)
        assert run.returncode == 0, f"{example}\n{run.stderr}"


def tree() -> set[str]:
    """Paths of the annotated tree at the end of the README: names stand before column 29, two spaces a level."""
    paths, parents = set(), [""]
    for line in filter(str.strip, list(blocks(README, ""))[-1].splitlines()):
        depth, names = (len(line) - len(line.lstrip())) // 2, line[:29].split()
        paths |= {parents[depth] + entry for entry in names}
        parents[depth + 1 :] = [parents[depth] + names[0]]
    return paths


def test_the_file_tree_is_that_of_the_repository() -> None:
    paths = tree()
    missing = sorted(p for p in paths if not (ROOT / p).exists())
    assert not missing
    modules = {name(p) for p in (ROOT / "hsstore").rglob("*.py") if p.name != "__init__.py"}
    assert modules <= paths
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    folders = {f.partition("/")[0] for f in listed.stdout.splitlines() if "/" in f}
    assert folders <= {p.partition("/")[0] for p in paths}
