"""A server from its start to its end: flags, spool, process, the word that it is ready, and nothing left behind.

Responsible for saying so only when a token has gone through the very road that extractions take. Leaves SGLang's flags
to `sglang_plugin.server`, the process to `sglang_plugin.process`, the handshake to `engines.http`.
"""

from __future__ import annotations

import errno
import platform
import shlex
import shutil
import socket
import ssl
import time
from contextlib import ExitStack
from typing import cast

from extractor.engines.http import HttpEngine
from extractor.engines.sglang import cpu_pool_tokens
from extractor.serving.settings import ServingSettings
from extractor.sglang_plugin import SPOOL_VARIABLE
from extractor.sglang_plugin.process import EngineProcess
from extractor.sglang_plugin.protocol import Failed
from extractor.sglang_plugin.server import FromServer, ServerStart, Starting
from extractor.sglang_plugin.settings import layer_numbers
from extractor.sglang_plugin.spool import Spool, make_spool
from extractor.verifier import Verifier, parse_layers, read_verifier
from extractor.weights import check_complete, weight_files
from hsstore.console import human_bytes, human_count, note
from hsstore.errors import (
    HsstoreError,
    IncompleteError,
    LockedError,
    MissingExtraError,
    UsageError,
    extra_hint,
    from_os_error,
)

_POLL_SECONDS = 0.5


def serve(settings: ServingSettings) -> int:
    """Serve until a signal raises in here. Returns the exit status of a server that ended by itself.

    Raises `UsageError` for what cannot be served, `IncompleteError` when the server does not come up.
    """
    verifier = read_verifier(settings.model)
    check_complete(weight_files(verifier.path))
    layers = parse_layers(settings.layers, verifier)
    start = _start(settings, verifier, layers)
    with ExitStack() as stack:
        spool = _make_spool(settings)
        stack.callback(shutil.rmtree, spool.directory, ignore_errors=True)
        process = EngineProcess(
            start,
            log_level=settings.log_level,
            environment={SPOOL_VARIABLE: str(spool)},
            module="extractor.sglang_plugin.server",
            replies=FromServer,
        )
        stack.callback(process.close)
        given = _accepted(process, settings.start_seconds)
        scheme = "https" if "ssl_certfile" in given else "http"
        note(f"loading {verifier.name}")
        _wait_until_ready(process, settings, start, layers, given.get("ssl_certfile"))
        process.came_up()
        for line in announcement(settings, start, layers, verifier, spool, scheme):
            note(line)
        while not process.has_ended():
            time.sleep(_POLL_SECONDS)
        error = process.lost("ended")
        note(f"{error.message}; {error.hint}")
        return process.exit_status


def _start(settings: ServingSettings, verifier: Verifier, layers: tuple[str, ...]) -> ServerStart:
    return ServerStart(
        model_path=str(verifier.path),
        architecture=verifier.architecture,
        layers=layer_numbers(layers, verifier.n_layers) or (1,),  # SGLang gives `final` only beside another
        dtype=settings.dtype,
        trust_remote_code=settings.trust_remote_code,
        device=settings.device,
        cpu_pool_tokens=cpu_pool_tokens(verifier),
        host=settings.host.strip("[]"),
        port=free_port(settings.host, settings.port),
        radix_cache=settings.radix_cache,
        tokenizer=settings.tokenizer,
        token=settings.token or "",
        log_level=settings.log_level,
        flags=settings.flags,
    )


def free_port(host: str, port: int) -> int:
    """The port, once it is sure that it can be listened on now. Raises `LockedError` for one in use."""
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        with socket.create_server(found[0][4][:2], family=found[0][0]) as listener:
            return int(listener.getsockname()[1])
    except UnicodeError:  # of the IDNA codec: a label of more than 63 characters, an empty one
        raise UsageError(f"{host!r} is no name of a host", hint="check --host") from None
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise LockedError(f"port {port} of {host} is in use", hint="choose another --port, or 0 for any") from None
        raise UsageError(f"cannot listen on {host} port {port}: {error.strerror}", hint="check --host") from None


def _make_spool(settings: ServingSettings) -> Spool:
    try:
        return make_spool(settings.spool, settings.spool_bytes)
    except OSError as error:
        raise from_os_error(error) from None


def _accepted(process: EngineProcess, seconds: float) -> dict[str, str]:
    """The flags that were given, once the server has taken them. Raises what it says of them."""
    message = cast(FromServer, process.receive(seconds))
    if isinstance(message, Starting):
        return message.flags
    assert isinstance(message, Failed)
    if message.missing_extra:
        raise MissingExtraError(message.reason, hint=extra_hint("extract"))
    if message.usage:
        raise UsageError(message.reason, hint=message.hint)
    raise process.lost(f"failed with {message.reason}")


def _wait_until_ready(
    process: EngineProcess,
    settings: ServingSettings,
    start: ServerStart,
    layers: tuple[str, ...],
    certificate: str | None,
) -> None:
    """Return when a token has gone through the server, the way that extractions take."""
    deadline = time.monotonic() + settings.start_seconds
    url = url_of(settings.host, start.port, "https" if certificate else "http")
    context = ssl.create_default_context(cafile=certificate) if certificate else None
    if context is not None:
        context.check_hostname = False  # it names the host that others use, not this loopback address
    options = {"start_seconds": _POLL_SECONDS}
    while True:
        try:
            HttpEngine(
                start.model_path, [url], layers=layers, token=settings.token, context=context, options=options
            ).close()
            return
        except IncompleteError as error:
            if process.has_ended():
                raise process.lost("ended") from None
            if time.monotonic() > deadline:
                raise process.lost(f"was not ready after {settings.start_seconds:.0f} s ({error.message})") from None
        except HsstoreError:
            if process.has_ended():
                raise process.lost("ended") from None
            raise
        time.sleep(_POLL_SECONDS)


def url_of(host: str, port: int, scheme: str = "http") -> str:
    """The URL that reaches this server from here."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host.strip("[]"), host.strip("[]"))
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def announcement(
    settings: ServingSettings,
    start: ServerStart,
    layers: tuple[str, ...],
    verifier: Verifier,
    spool: Spool,
    scheme: str,
) -> list[str]:
    """What is served, where, and the next command."""
    here = url_of(settings.host, start.port, scheme)
    everywhere = settings.host.strip("[]") in ("0.0.0.0", "::")
    url = f"{scheme}://{platform.node()}:{start.port}" if everywhere else here
    spec = settings.layers if settings.layers == "eagle3" else ",".join(map(str, start.layers))
    token = " --token-file FILE" if settings.token else ""
    command = f"hsstore extract --url {url}{token} --model {shlex.quote(str(verifier.path))} --layers {spec}"
    return [
        f"serving the states {', '.join(layers)} of {verifier.name} on {url}{' (token needed)' if token else ''}",
        f"  {human_count(verifier.hidden_size)} numbers a state and token; up to {human_bytes(spool.max_bytes)} of rows"
        f" wait in {spool.directory} for clients that do not see the same files",
        f"next: {command} --prompts FILE --out STORE",
    ]
