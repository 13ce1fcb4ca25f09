"""`hsstore repair`: heal a store from replicas; exit 0 when it is sound again, 3 when something remains."""

from __future__ import annotations

import dataclasses
import json as jsonlib
import os
from collections.abc import Iterable
from pathlib import Path

import click

from hsstore import console, ledger, manifest, units
from hsstore.commands.inspect import STORE
from hsstore.credentials import checked_token, read_token_file
from hsstore.errors import DamagedError, HsstoreError, UsageError
from hsstore.places import Place
from hsstore.repair import Repair
from hsstore.repairlog import Event, Options, Summary
from hsstore.replicas import open_replica
from hsstore.verify import Verifier


@click.command()
@click.argument("store", type=STORE)
@click.option("--from", "replicas", metavar="REPLICA|URL", multiple=True, help="Where good bytes are; may be repeated.")
@click.option(
    "--full/--quick",
    default=False,
    help="Full: look at every byte of STORE first. Quick (default): what a quick verification sees, what the last full"
    " ones found on this machine, and --findings.",
)
@click.option(
    "--findings",
    type=click.Path(dir_okay=False, allow_dash=True),
    help="Also look at the files that `hsstore verify … --json` printed here; - reads them from stdin.",
)
@click.option("--dry-run", is_flag=True, help="Say what would be done; fetch no block, change nothing.")
@click.option(
    "--quarantine-rest",
    is_flag=True,
    help="Put a tombstone on each shard that no replica can mend: `hsstore extract … --resume` does it again.",
)
@click.option("--token", envvar="HSSTORE_TOKEN", show_envvar=True, help="Token of a service; better in --token-file.")
@click.option("--token-file", type=click.Path(path_type=Path), help="File that holds the token.")
@click.option(
    "--patience",
    metavar="TIME",
    default="2min",
    show_default=True,
    help="How long to go on trying when a service stays away: 30s, 10min, 1h.",
)
@click.option("--json", is_flag=True, help="One JSON object per event and a last one with the summary.")
@click.option("--quiet", is_flag=True, help="No progress, no notes: what is lost or left, and the exit code.")
def repair(
    store: str,
    replicas: tuple[str, ...],
    full: bool,
    findings: str | None,
    dry_run: bool,
    quarantine_rest: bool,
    token: str | None,
    token_file: Path | None,
    patience: str,
    json: bool,
    quiet: bool,
) -> None:
    """Heal STORE from replicas: copies of it in a directory, a bucket, on a web server or an hsstore service.

    Only blocks of rows that are bad are fetched, each is checked against the record in STORE, and the file is written
    anew: none is changed in place, and the manifest id stays. Without --from only what STORE itself implies is rebuilt.

    Exit code 0: sound. 3: something remains damaged. 130: stopped by Ctrl-C; run it again.
    """
    console.set_quiet(quiet)
    root, secret = Path(store), _token(token, token_file)
    options = Options(
        full=full,
        suspects=frozenset(_suspects(findings)) if findings is not None else frozenset(),
        dry_run=dry_run,
        quarantine_rest=quarantine_rest,
        state=ledger.state_dir(),
    )
    shown = _Shown(store, json=json, quiet=quiet)
    work = Repair(root, _open(root, replicas, secret, units.seconds(patience)), options, tell=shown.event)
    with console.Progress(0, "repair", unit="bytes") as progress:
        work.on_progress = lambda verifier: _progress(progress, verifier)
        summary = work.run()
    shown.conclusion(summary)


def _token(token: str | None, token_file: Path | None) -> str | None:
    if token_file is not None:
        return read_token_file(token_file)
    return checked_token(token, "--token (or HSSTORE_TOKEN)") if token is not None else None


def _open(root: Path, replicas: Iterable[str], token: str | None, patience_seconds: float) -> list[Place]:
    """Each replica. One that cannot be opened is an error: a mistyped path should not be found out after hours."""
    try:
        uuid: str | None = manifest.load_header(root).uuid
    except HsstoreError:
        uuid = None
    return [open_replica(s, root, uuid=uuid, token=token, patience_seconds=patience_seconds) for s in replicas]


def _suspects(path: str) -> Iterable[str]:
    """Damaged files out of the lines of `verify --json`."""
    with click.open_file(path, encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                entry = jsonlib.loads(line)
                if entry["type"] == "finding" and entry["severity"] == "damage":
                    yield os.fspath(entry["file"])
            except (ValueError, KeyError, TypeError, RecursionError):
                raise UsageError(
                    f"line {number} of {path} is no line of `hsstore verify … --json`",
                    hint=f"hsstore verify manifest STORE --full --json > {path}",
                ) from None


def _progress(progress: console.Progress, verifier: Verifier) -> None:
    done = verifier.summary
    progress.total = max(done.bytes_to_read, done.bytes_read)
    progress.update(done.bytes_read, f"looking · {done.damage} damaged")


class _Shown:
    """Events and counts as they are shown."""

    def __init__(self, store: str, *, json: bool, quiet: bool) -> None:
        self.store, self.json, self.quiet = store, json, quiet
        self.shards: set[int] = set()
        """Shards that can be quarantined."""

    def event(self, event: Event) -> None:
        if event.action == "lost" and event.shard is not None:
            self.shards.add(event.shard)
        if event.action == "quarantined" and event.shard is not None:
            self.shards.discard(event.shard)
        if self.json:
            console.echo_json_line({"type": event.action, **dataclasses.asdict(event)})
        elif event.action == "refused":
            console.warn(f"not used: {event.detail}")
        elif not self.quiet or event.action in ("lost", "left"):
            click.echo(str(event))

    def conclusion(self, summary: Summary) -> None:
        if self.json:
            console.echo_json_line({"type": "summary", **dataclasses.asdict(summary)})
        elif not self.quiet:
            click.echo(_sentence(summary))
        if summary.suspects_unknown:
            console.warn(f"{summary.suspects_unknown} files in the findings are none of this store's and were left out")
        if summary.quarantined:
            console.note("extract what they held with the original `hsstore extract …` command and --resume")
        if summary.remaining:
            files = f"{summary.remaining} file{'s' * (summary.remaining != 1)}"
            raise DamagedError(f"{files} of {self.store} cannot be mended", hint=self._hint(summary))

    def _hint(self, summary: Summary) -> str:
        if summary.replicas_away:
            return "run it again when every replica answers: one that stayed away may have what is lost"
        if not self.shards:
            return "give another replica with --from; what is `left` has to be looked at by hand"
        chosen = " ".join(f"--shard {n}" for n in sorted(self.shards))
        return (
            f'give another replica, or `hsstore quarantine {self.store} {chosen} --reason "no replica"`'
            " (repair … --quarantine-rest does that), then the original `hsstore extract …` with --resume"
        )


def _sentence(summary: Summary) -> str:
    state = f"{summary.remaining} damaged" if summary.remaining else "sound"
    would = "would: " if summary.dry_run else ""
    faults = f"; {summary.replica_faults} places were damaged in a replica too" if summary.replica_faults else ""
    fetched = f"{summary.blocks_fetched:,} blocks fetched"
    if not summary.dry_run:
        fetched += f" ({console.human_bytes(summary.bytes_fetched)})"
    gone = f", {summary.quarantined} shards quarantined" if summary.quarantined else ""
    after = "" if summary.dry_run else f"; {state}, manifest {summary.manifest_id[:12] or 'unknown'}"
    return (
        f"{would}{summary.files_republished:,} files written anew, {fetched}, {summary.documents_restored} documents"
        f" restored, {summary.derived_rebuilt} rebuilt{gone}, {summary.lost} lost{faults}{after}"
    )
