"""What travels between the engines of `extractor.engines`, the processes of SGLang they use, and the hooks in there.

Small msgspec records over one socket, and through SGLang's own request and answer. Numbers of states never travel in
them. Leaves to `host`, `routes` and `hooks` what is done with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

KEY = "hsstore"
"""Name of our entry in a request's `custom_params` and in an answer's `meta_info`."""

PROTOCOL = 1
"""Rises with every change of `Target`, `Receipt` or the routes that an older side would misread."""

INFO_PATH = "/hsstore/info"
ROWS_PATH = "/hsstore/rows"

FINAL = -1
"""Column of the state after the final norm; 0, 1, … are the `after_k` states in ascending order."""


class Target(msgspec.Struct, frozen=True):
    """Where one request's states go. Travels as the request's `custom_params[KEY]`."""

    request: int
    """Number of the request, unique in the engine process."""
    n_tokens: int
    row: int
    """First row in each file."""
    files: dict[str, str]
    """Absolute path by state name; "" for rows that stay in the server's spool, one state after the other."""
    columns: dict[str, int]
    """Column by state name: place among the captured `after_k` states, or FINAL."""
    ticket: str = ""
    """Of a request to a server: 128 random bits as hex digits, the name under which its rows or its errors are kept."""
    seconds: float = 0.0
    """For how long after its first rows a server may write any; 0 = without end."""

    @classmethod
    def from_params(cls, params: Mapping[str, Any] | None) -> Target | None:
        """The target in a request's custom_params, None when the request is not ours."""
        if not isinstance(params, Mapping) or KEY not in params:
            return None
        return msgspec.convert(params[KEY], cls)


class Receipt(msgspec.Struct, frozen=True):
    """What the hooks say of one request. Comes back as the only element of `meta_info[KEY]`."""

    n_rows: int
    crc32c: dict[str, int]
    """By state name, over the rows as bfloat16."""
    capture_points: tuple[int, ...]
    """Layer indices before which the loaded model takes its states: k of each `after_k`."""
    error: str = ""
    """Why there are no states, "" when there are."""


class Request(msgspec.Struct, frozen=True):
    """Parent to engine process: capture one sample."""

    target: Target
    input_ids: bytes
    """int32, little-endian."""
    rank: int | None = None
    """Data-parallel rank that must take it; None leaves it to the engine."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Engine process to parent, once: the engine is up."""

    version: str
    compute_dtype: str
    longest_tokens: int
    flags: dict[str, str]
    """Resolved settings that can change a state's bits."""
    n_ranks: int = 1
    """Data-parallel ranks; each has hooks and a writer of its own."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """Engine process to parent instead of `Ready`: the engine did not start."""

    reason: str
    usage: bool = False
    """True when the call must change (flags, model family), not a fault of the start."""
    missing_extra: bool = False
    hint: str = ""
    """What to do instead."""


class Answer(msgspec.Struct, frozen=True, tag=True):
    """Engine process to parent, one for each `Request`."""

    request: int
    receipt: Receipt


class WriteError(msgspec.Struct, frozen=True):
    """A write that failed after its request's receipt had left; one datagram to the parent's errors socket."""

    request: int
    path: str
    errno: int
    reason: str
    ticket: str = ""
    """Of a client's request to a server."""


class Start(msgspec.Struct, frozen=True):
    """First message of the parent: how to start the engine."""

    engine: dict[str, Any]
    """Keyword arguments of `sglang.Engine`, without what depends on device and family."""
    layers: tuple[int, ...]
    """k of each wanted `after_k`, ascending, at least one."""
    architecture: str
    device: str
    """`auto`, `cpu` or `cuda`."""
    cpu_pool_tokens: int
    """Size of the KV cache on a CPU, where SGLang cannot find one itself, unless `engine` names another."""


class ServedModel(msgspec.Struct, frozen=True):
    """The model directory that a server loaded, as it reads it itself."""

    path: str
    architecture: str = ""
    config_sha256: str = ""
    """"" when the directory cannot be read as ours are; `unknown` says why."""
    weights_sampled_sha256: str = ""
    unknown: str = ""


class ServerInfo(msgspec.Struct, frozen=True):
    """Answer of a server's `INFO_PATH`."""

    ready: Ready
    model: ServedModel
    radix_cache: bool
    """Whether prefixes are cached; each request then needs a salt of its own."""
    capture: bool
    """Whether the server was started to return states of layers."""
    load_format: str
    weight_version: str
    protocol: int = 0
    """PROTOCOL of the server's hsstore."""
    hsstore: str = ""
    """Its version."""


FromHost = Ready | Failed | Answer
