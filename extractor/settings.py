"""What a user asks of `hsstore extract`, as one record. Leaves its spelling to `extractor.cli`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from hsstore import paths

DEFAULT_MAX_LENGTH = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    model: str
    """Directory of the verifier, or a hub id in the local cache."""
    prompts: Path
    out: Path
    """Directory of the store."""
    engine: str = "auto"
    urls: tuple[str, ...] = ()
    """Servers that run the verifier; empty = an engine of one's own."""
    transfer: Literal["auto", "shared", "fetch"] = "auto"
    """How rows come from servers into the staged files."""
    token_file: Path | None = None
    """Holds the servers' bearer token; None = HSSTORE_TOKEN, or none."""
    layers: str = "eagle3"
    max_length: int | None = None
    """Longest sample in tokens; None = 4,096, or the model's context when that is shorter."""
    overlong: Literal["truncate", "drop"] = "truncate"
    dtype: str = "auto"
    shard_rows: int | None = None
    """S; None = chosen from the amount of data."""
    validation_fraction: float = 0.05
    split_salt: str = "hsstore"
    weights_digest: Literal["full", "sampled"] | None = None
    """None = as the store was begun, `full` for a new one."""
    trust_remote_code: bool = False
    resume: bool = False
    append: bool = False
    """Grow the store that is there by these prompts."""
    retry_failed: bool = False
    """Try those samples again that were given up as failed."""
    max_consecutive_errors: int | None = None
    """Failed samples, or deaths of the engine, in a row that end the run; None = 8, and 4 before the first good one."""
    check_first: int = 4
    """Samples that are compared with the verifier's own weights before anything is committed; 0 = none."""
    lease_seconds: float = 120.0
    """How long a silent writer keeps the shard that it is at."""
    engine_options: dict[str, str] = field(default_factory=dict)
    template_arguments: dict[str, Any] = field(default_factory=dict)
    failed_out: Path | None = None
    """Where bad lines and failed samples are listed; None = `<out>.failed.jsonl`."""

    metrics_port: int | None = None
    """Where Prometheus metrics are served; 0 = any free port, None = nowhere."""
    metrics_host: str = "127.0.0.1"
    log_json: str | None = None
    """File that gets one JSON object per event; `-` = stderr."""
    min_free: int | None = None
    """Bytes of the file system that are left free; None = a few for records."""
    command: tuple[str, ...] = ()
    """The command line that asked, for the words that say how to go on."""

    shard: str | None = None
    """`i/n`, `auto`, `slurm` or `torchrun`: only the shards of that part; a store that is there is continued."""
    ray: str | None = None
    """Address of a Ray cluster whose nodes do the work; "" = start Ray on this machine."""
    ray_actors: int | None = None
    """How many workers; None = as many as fit on each node."""
    ray_gpus_per_actor: float | None = None
    """None = what the engine takes."""
    ray_cpus_per_actor: float = 1.0
    ray_patience: float = 600.0
    """Seconds to wait for a node when none is left."""

    @property
    def out_is_store(self) -> bool:
        return (self.out / paths.HEADER).is_file()

    @property
    def continues(self) -> bool:
        """Whether a store that is there is written on."""
        return self.out_is_store and (self.resume or self.append or self.shard is not None)

    @property
    def report(self) -> Path:
        return self.failed_out or self.out.with_name(f"{self.out.name}.failed.jsonl")
