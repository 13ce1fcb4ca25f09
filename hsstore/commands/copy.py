"""`hsstore copy`: a store to another place, resumable; exit 0 copied, 3 damage at the source, the rest copied."""

from __future__ import annotations

import dataclasses

import click

from hsstore import console, units
from hsstore.copying import Copy, Event, Summary
from hsstore.credentials import checked_token
from hsstore.errors import DamagedError, HsstoreError
from hsstore.places import Place, is_url, open_place
from hsstore.reading import RateLimit
from hsstore.serviceplace import open_service


@click.command()
@click.argument("source")
@click.argument("destination")
@click.option("--jobs", type=click.IntRange(1, 64), default=4, show_default=True, help="Shards at once.")
@click.option("--rate-limit", default=None, metavar="RATE", help="Bytes to read a second, such as 200MB/s.")
@click.option(
    "--patience",
    default="2min",
    show_default=True,
    metavar="TIME",
    help="How long to go on trying when a service stays away.",
)
@click.option("--token", envvar="HSSTORE_TOKEN", show_envvar=True, help="Token of a service as the source.")
@click.option("--json", is_flag=True, help="One JSON object per shard and note, and a last one with the summary.")
@click.option("--quiet", is_flag=True, help="No notes, no progress: damage, result and exit code only.")
def copy(
    source: str,
    destination: str,
    jobs: int,
    rate_limit: str | None,
    patience: str,
    token: str | None,
    json: bool,
    quiet: bool,
) -> None:
    """Copy the store SOURCE to DESTINATION: a directory, s3://…, gs://… or az://….

    SOURCE may also be a service (http://HOST:PORT, or http://HOST:PORT/v1/stores/NAME) or a plain web server.

    Every file is hashed while it is read, and read again at the destination; each shard is committed by itself. To
    resume, run the same command again. Exit code 0: copied. 3: damage at the source; what is sound was copied.
    """
    console.set_quiet(quiet)
    rate = RateLimit(units.bytes_per_second(rate_limit)) if rate_limit else None
    seconds = units.seconds(patience)
    work = Copy(_source(source, seconds, token), _place(destination, seconds), jobs=jobs, rate=rate)
    with console.Progress(0, "copy", unit="MB") as progress:
        work.on_progress = lambda: _show(progress, work)
        try:
            for event in work.events():
                _tell(event, json=json, quiet=quiet)
        except (HsstoreError, OSError, KeyboardInterrupt):
            if work.summary.shards:
                console.note(f"{_counts(work.summary)}; to resume, run the same command again")
            raise
        seconds = progress.seconds
    _report(work.summary, source, destination, seconds, json=json)


def _source(spec: str, patience_seconds: float, token: str | None) -> Place:
    if spec.lower().startswith(("http://", "https://")):
        token = checked_token(token, "--token (or HSSTORE_TOKEN)") if token is not None else None
        service = open_service(spec, uuid=None, token=token, patience_seconds=patience_seconds)
        if service is not None:
            return service
    return _place(spec, patience_seconds)


def _place(spec: str, patience_seconds: float) -> Place:
    if not is_url(spec) or spec.lower().startswith("file:"):
        return open_place(spec)
    from hsstore.objectplace import Patience, open_object_place

    return open_object_place(spec, Patience(total_seconds=patience_seconds))


def _show(progress: console.Progress, work: Copy) -> None:
    progress.total = work.total_bytes // 10**6
    rate = work.done_bytes / max(progress.seconds, 0.001)
    done = min(work.done_bytes // 10**6, progress.total)
    progress.update(done, f"{work.summary.copied} shards · {console.human_bytes(rate)}/s")


def _tell(event: Event, *, json: bool, quiet: bool) -> None:
    if json:
        console.echo_json_line({"type": event.kind, **dataclasses.asdict(event)})
    elif event.kind == "damaged":
        click.echo(str(event))
    elif event.kind == "note" and not quiet:
        console.note(str(event))


def _counts(summary: Summary) -> str:
    return f"{summary.copied} shards copied, {summary.already_there} were there, {summary.shards} at the source"


def _report(summary: Summary, source: str, destination: str, seconds: float, *, json: bool) -> None:
    same = summary.source_manifest_id == summary.manifest_id
    equal = same and not summary.damaged  # what is damaged stands in neither manifest
    if json:
        document = {"type": "summary", "seconds": round(seconds, 3), "equal": equal, **dataclasses.asdict(summary)}
        console.echo_json_line(document)
    else:
        rate = f" ({console.human_bytes(summary.bytes / max(seconds, 0.001))}/s)" if summary.copied else ""
        click.echo(f"{_counts(summary)}; {console.human_bytes(summary.bytes)} in {seconds:.1f} s{rate}")
        console.table(
            [
                ("source", f"{summary.source_manifest_id}  {source}"),
                ("destination", f"{summary.manifest_id}  {destination}"),
                ("manifests", "equal" if equal else "equal but for what is damaged" if same else "DIFFERENT"),
            ]
        )
    if not same and not summary.damaged and not summary.more_there:
        raise DamagedError(f"{destination} is not what was copied", hint="run `hsstore verify manifest` on both")
    if summary.damaged:
        raise DamagedError(
            f"{source}: {summary.damaged} damaged, not copied; everything else was",
            hint="repair what is named above, then run the same command again",
        )
