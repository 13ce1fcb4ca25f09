"""What a server is told at its start, checked once.

Responsible for the rule that an address others can reach needs a token. Leaves reading the token to `auth` and
opening the stores to `service`.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from pathlib import Path

from hsstore.errors import UsageError
from hsstore.source import Verify


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds that keep one client from taking the server away from the others."""

    page_samples: int = 1000
    """Most samples of one page."""
    plans: int = 16
    """Plans kept; an evicted one comes back by POSTing it again."""
    streams: int = 64
    """Batch bodies on their way at the same time; more of them wait."""
    wait_seconds: float = 10.0
    """How long a body may wait for its turn before the answer is 503 with Retry-After."""
    stall_seconds: float = 60.0
    """How long a client may leave 4 MiB unread before its connection is closed."""
    grace_seconds: float = 10.0
    """How long bodies may finish after SIGTERM."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    stores: tuple[Path, ...]
    host: str = "127.0.0.1"
    port: int = 8420
    """0 = any free one."""
    token: str | None = field(default=None, repr=False)
    token_file: Path | None = None
    """Read again whenever it changes; wins over `token`."""
    verify_reads: Verify = "off"
    """Which batches have their blocks compared with the records before the first byte is sent, whoever asks."""
    limits: Limits = Limits()

    def __post_init__(self) -> None:
        if not self.stores:
            raise UsageError("no store to serve", hint="hsstore serve STORE")
        if not self.needs_token and not is_loopback(self.host):
            raise UsageError(
                f"{self.host} can be reached from other machines, so it is served only with a token",
                hint="add --token-file FILE or set HSSTORE_TOKEN, or keep --host 127.0.0.1",
            )

    @property
    def needs_token(self) -> bool:
        return self.token is not None or self.token_file is not None


def is_loopback(host: str) -> bool:
    """Whether an address stays on this machine; a name other than localhost counts as not."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
