"""The `hsstore` command: a table of verbs that load when they are called, and the way every error leaves.

`hsstore --help` imports neither numpy nor zarr. Commands raise; this module turns errors into one sentence on stderr
and the exit code of `hsstore.errors`: 0 ok, 1 unexpected, 2 usage, 3 damaged, 4 incomplete, 10 not found, 11 locked,
12 format not supported, 130 interrupted.
"""

from __future__ import annotations

import importlib
import os
import select
import sys

import click

from hsstore import __version__
from hsstore.errors import EXIT_INTERRUPTED, EXIT_READER_LEFT, HsstoreError, from_os_error

VERBS: dict[str, tuple[str, str]] = {
    "extract": ("extractor.cli:extract", "Run a verifier over prompts and store its hidden states."),
    "generate": (
        "extractor.generate.cli:generate",
        "Let the verifier answer prompts itself: training data in its own words.",
    ),
    "import": ("extractor.foreign.cli:import_", "Make a store of hidden states that another project wrote."),
    "export": ("extractor.foreign.cli:export", "Write a store's samples in the format of another project."),
    "verify": ("hsstore.commands.verify:verify", "Check that a store is whole."),
    "copy": ("hsstore.commands.copy:copy", "Copy a store to a directory or an object store, resumable."),
    "repair": ("hsstore.commands.repair:repair", "Heal a store from its replicas."),
    "serve": ("server.cli:serve", "Serve packed batches of stores over HTTP."),
    "verifier": ("extractor.serving.cli:verifier", "Serve a verifier that extractions elsewhere use."),
    "train": ("trainer.cli:train", "Train an EAGLE-3 drafter from a store or a service."),
    "audit": ("trainer.cli:audit", "Print which parts of a drafter are frozen and trained."),
    "info": ("hsstore.commands.inspect:info", "What a store holds."),
    "ls": ("hsstore.commands.inspect:ls", "List the samples of a store."),
    "show": ("hsstore.commands.inspect:show", "One sample: tokens, mask, rms of each state."),
    "quarantine": ("hsstore.commands.quarantine:command", "Take shards out of use, with a reason."),
    "gc": ("hsstore.commands.gc:gc", "Remove what killed runs left behind."),
    "manifest": ("hsstore.commands.manifest:manifest", "Build or show the manifest of a store."),
    "subset": ("hsstore.commands.subset:subset", "Make a smaller store from a larger one."),
}


class VerbGroup(click.Group):
    """A group whose commands are imported when they run; their one-line help stands in the table."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        module, _, attribute = VERBS[cmd_name][0].partition(":")
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            if not _reader_left():
                raise
            # `hsstore ls … | head`: what a shell says of a program that SIGPIPE ended, and nothing to flush at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            ctx.exit(EXIT_READER_LEFT)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in VERBS.items()])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError:
            import difflib

            near = difflib.get_close_matches(args[0], VERBS, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise click.UsageError(f"no command {args[0]!r}{hint}", ctx) from None


def _reader_left() -> bool:
    """Whether stdout is a pipe that nobody reads; any other broken pipe is an error."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return bool(poll.poll(0))


@click.command(cls=VerbGroup, context_settings={"help_option_names": ["-h", "--help"], "auto_envvar_prefix": "HSSTORE"})
@click.version_option(__version__, prog_name="hsstore")
def cli() -> None:
    """Hidden states of a verifier, stored once, trained on many times.

    Every option can also be set as HSSTORE_<COMMAND>_<OPTION>.
    """


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit. Never a traceback for an error that has a name."""
    sys.exit(run(arguments))


def run(arguments: list[str] | None = None) -> int:
    """Run the command line. Returns the exit code."""
    try:
        result = cli.main(arguments, prog_name="hsstore", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except click.ClickException as error:
        error.show()
        return 2
    except (KeyboardInterrupt, click.Abort):
        click.echo("interrupted", err=True)
        return EXIT_INTERRUPTED
    except HsstoreError as error:
        return _fail(error)
    except OSError as error:
        return _fail(from_os_error(error))


def _fail(error: HsstoreError) -> int:
    click.echo(f"hsstore: error: {_utf8(error.message)}", err=True)
    if error.hint:
        click.echo(f"  hint: {_utf8(error.hint)}", err=True)
    return error.exit_code


def _utf8(text: str) -> str:
    """A name that is no UTF-8 must not end the telling of what is wrong with it."""
    return text.encode("utf-8", "backslashreplace").decode()


if __name__ == "__main__":
    main()
