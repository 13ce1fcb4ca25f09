"""What a user asks of `hsstore verifier`, as one record. Leaves its spelling to `extractor.serving.cli`."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from pathlib import Path

from hsstore.errors import UsageError

DEFAULT_PORT = 30000


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingSettings:
    model: str
    """Directory of the verifier, or a hub id in the local cache."""
    layers: str = "eagle3"
    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    """0 = any free one."""
    dtype: str = "auto"
    device: str = "auto"
    trust_remote_code: bool = False
    radix_cache: bool = False
    """Keep SGLang's prefix cache; each captured sample then has a salt of its own."""
    tokenizer: bool = False
    """Load the tokenizer too, so that text and chats are answered as well."""
    token: str | None = field(default=None, repr=False)
    spool: Path | None = None
    """Where rows lie that clients fetch; None = shared memory, or where temporary files lie."""
    spool_bytes: int | None = None
    log_level: str = "warning"
    start_seconds: float = 3600.0
    flags: tuple[str, ...] = ()
    """Further flags of `sglang.launch_server`."""

    def __post_init__(self) -> None:
        if self.token is None and not is_loopback(self.host):
            raise UsageError(
                f"{self.host} can be reached from other machines, so it is served only with a token",
                hint="add --token-file FILE or set HSSTORE_TOKEN, or keep --host 127.0.0.1",
            )


def is_loopback(host: str) -> bool:
    """Whether an address stays on this machine; a name other than localhost counts as not."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
