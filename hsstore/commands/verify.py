"""`hsstore verify`: findings as they are met, one line each; exit 0 sound, 3 damaged, 130 stopped by Ctrl-C."""

from __future__ import annotations

import dataclasses
import importlib
import secrets
import time

import click

from hsstore import console, ledger, units
from hsstore.commands.inspect import STORE
from hsstore.errors import DamagedError, UsageError
from hsstore.findings import Finding, printable
from hsstore.verify import Budget, Depth, Options, Part, Sample, Verifier

_JSON_PROGRESS_SECONDS = 10.0


_ELSEWHERE = {"states": "extractor.states.cli:states"}
"""Commands of packages that the core does not know: imported when they are called."""


class _Group(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*super().list_commands(ctx), *_ELSEWHERE]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _ELSEWHERE:
            return super().get_command(ctx, cmd_name)
        module, _, attribute = _ELSEWHERE[cmd_name].partition(":")
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command


@click.group(cls=_Group)
def verify() -> None:
    """Check that a store is whole, and that its states are those of its verifier."""


@verify.command()
@click.argument("store", type=STORE)
@click.option(
    "--full/--quick",
    default=None,
    help="Quick: records, names, sizes, footers, small files (default). Full: every byte.",
)
@click.option("--part", metavar="N/T", help="Every byte of the N-th of T parts of the files: 1/7 today, 2/7 tomorrow …")
@click.option("--sample", metavar="PERCENT", help="This share of all blocks, drawn at random over all files: 5%.")
@click.option("--bytes", metavar="SIZE", help="As many blocks, drawn at random, as make this size: 64GiB.")
@click.option("--seed", type=click.IntRange(0), help="Draw the same blocks as the run that printed this seed.")
@click.option("--resume", is_flag=True, help="Leave out what the last run of this depth, which was stopped, has read.")
@click.option("--newer-than", metavar="AGE", help="Leave out files that were read whole in the last 12h, 7d, 2w …")
@click.option("--jobs", type=click.IntRange(1), help="Files that are read at once; as many as cores without it.")
@click.option("--rate-limit", metavar="RATE", help="Read at most this much a second, all jobs together: 200MB/s.")
@click.option("--cached", is_flag=True, help="Let the page cache answer for the disk.")
@click.option("--json", is_flag=True, help="One JSON object per finding and a last one with the summary.")
@click.option("--quiet", is_flag=True, help="No notes, no progress: damage and exit code only.")
def manifest(
    store: str,
    full: bool | None,
    part: str | None,
    sample: str | None,
    bytes: str | None,
    seed: int | None,
    resume: bool,
    newer_than: str | None,
    jobs: int | None,
    rate_limit: str | None,
    cached: bool,
    json: bool,
    quiet: bool,
) -> None:
    """Check STORE against its own records. Reads only; never changes a byte of it.

    Exit code 0: sound. 3: damaged. 10: no store there. 12: another format. 130: stopped by Ctrl-C; see --resume.
    """
    console.set_quiet(quiet)
    depth = _depth(full, part, sample, bytes, seed)
    if (resume or newer_than is not None) and not (depth == "full" or isinstance(depth, Part)):
        raise UsageError("--resume and --newer-than go with --full or --part: only files that are read whole are noted")
    if resume and newer_than is not None:
        raise UsageError("give --resume or --newer-than, not both")
    options = Options(
        jobs=jobs,
        cached=cached,
        bytes_per_second=units.bytes_per_second(rate_limit) if rate_limit is not None else None,
        state=ledger.state_dir(),
        resume=resume,
        newer_than_s=units.seconds(newer_than) if newer_than is not None else None,
    )
    run = _Run(store, Verifier(store, depth, options), json=json, quiet=quiet)
    run.findings()
    run.conclusion()


def _depth(full: bool | None, part: str | None, sample: str | None, size: str | None, seed: int | None) -> Depth:
    """The one depth that was asked for."""
    given = {"--full" if full else "--quick": full, "--part": part, "--sample": sample, "--bytes": size}
    asked = [name for name, value in given.items() if value is not None]
    if len(asked) > 1:
        raise UsageError(
            f"found {' and '.join(asked)}, which exclude each other",
            hint="give one of --quick, --full, --part, --sample, --bytes",
        )
    if seed is not None and sample is None and size is None:
        raise UsageError("--seed goes with --sample or --bytes: nothing else is drawn at random")
    drawn = secrets.randbits(32) if seed is None else seed
    if part is not None:
        n, total = units.part(part)
        return Part(n=n, total=total)
    if sample is not None:
        return Sample(fraction=units.fraction(sample), seed=drawn)
    if size is not None:
        return Budget(n_bytes=units.n_bytes(size), seed=drawn)
    return "full" if full else "quick"


class _Run:
    """One verification as it is shown."""

    def __init__(self, store: str, verifier: Verifier, *, json: bool, quiet: bool) -> None:
        self.store, self.verifier, self.json, self.quiet = printable(store), verifier, json, quiet
        self.seconds = 0.0
        self._last_line = time.monotonic()
        verifier.on_warning = console.warn
        verifier.on_plan = self._planned

    def findings(self) -> None:
        summary = self.verifier.summary
        with console.Progress(0, f"verify {summary.depth}", unit="bytes") as progress:
            self.verifier.on_progress = lambda: self._progress(progress)
            try:
                for finding in self.verifier.findings():
                    self._show(finding)
            except KeyboardInterrupt:
                self._stopped()
                raise
            self.seconds = progress.seconds

    def conclusion(self) -> None:
        summary, quick = self.verifier.summary, self.verifier.depth == "quick"
        if self.json:
            line = {"type": "summary", "seconds": round(self.seconds, 3), **dataclasses.asdict(summary)}
            console.echo_json_line(line)
        elif not self.quiet:
            click.echo(self._sentence())
            if not summary.damage and quick:
                console.note("bytes of large files are read by --full, --part, --sample or --bytes")
        if summary.damage:
            places = f"{summary.damage} place{'s' * (summary.damage != 1)}"
            raise DamagedError(
                f"{self.store} is damaged in {places}",
                hint=f"mend it from a copy: `hsstore repair {self.store} --from REPLICA`",
            )

    def _sentence(self) -> str:
        summary = self.verifier.summary
        state = f"{'DAMAGED' if summary.damage else 'sound'} ({summary.depth})"
        rate = console.human_bytes(summary.bytes_read / max(self.seconds, 1e-3))
        drawn = f", {summary.blocks:,} blocks drawn with seed {summary.seed}" if summary.seed is not None else ""
        before = f", {summary.files_skipped:,} of them verified before" if summary.files_skipped else ""
        gone = f", {summary.quarantined_shards} quarantined" if summary.quarantined_shards else ""
        took = f"{self.seconds:.1f} s" if self.seconds < 60 else console.human_seconds(self.seconds)
        return (
            f"{state}: {summary.shards:,} shards, {summary.samples:,} samples, {summary.files:,} files"
            f"{before}{drawn}; {console.human_bytes(summary.bytes_read)} read in {took} ({rate}/s);"
            f" {summary.damage} damaged, {summary.open_shards} shards open{gone}"
        )

    def _show(self, finding: Finding) -> None:
        if self.json:
            console.echo_json_line({"type": "finding", **dataclasses.asdict(finding)})
        elif finding.severity == "damage" or not self.quiet:
            click.echo(str(finding))

    def _planned(self) -> None:
        summary = self.verifier.summary
        if self.verifier.options.resume and self.verifier.since is None:
            console.note(f"no verification of depth {summary.depth} was stopped: beginning with all files")
        if summary.files_skipped:
            console.note(f"{summary.files_skipped:,} of {summary.files:,} files were verified before and are left out")
        if summary.seed is not None:
            amount = console.human_bytes(summary.bytes_to_read)
            console.note(f"{summary.blocks:,} blocks ({amount}), drawn with --seed {summary.seed}")
        if isinstance(self.verifier.depth, Part) and not summary.files_whole + summary.files_skipped:
            console.warn(f"no file of this store falls into {summary.depth}: it has {summary.files} files")

    def _progress(self, progress: console.Progress) -> None:
        summary = self.verifier.summary
        progress.total = max(summary.bytes_to_read, summary.bytes_read)
        rate = console.human_bytes(summary.bytes_read / max(progress.seconds, 1e-3))
        progress.update(summary.bytes_read, f"{rate}/s · {summary.damage} damaged")
        now = time.monotonic()
        if self.json and now - self._last_line >= _JSON_PROGRESS_SECONDS:
            self._last_line = now
            line = {"bytes_read": summary.bytes_read, "bytes_to_read": progress.total, "damage": summary.damage}
            eta = progress.seconds * (progress.total - summary.bytes_read) / max(summary.bytes_read, 1)
            times = {"seconds": round(progress.seconds, 3), "eta_seconds": round(eta, 3)}
            console.echo_json_line({"type": "progress", **line, **times})

    def _stopped(self) -> None:
        depth, summary = self.verifier.depth, self.verifier.summary
        read = console.human_bytes(summary.bytes_read)
        hint = ""
        if depth == "full" or isinstance(depth, Part):
            option = f"--part {depth.n}/{depth.total}" if isinstance(depth, Part) else "--full"
            hint = f"; continue with `hsstore verify manifest {self.store} {option} --resume`"
        click.echo(f"stopped after {read}, {summary.damage} damaged so far{hint}", err=True)
