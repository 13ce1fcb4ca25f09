"""The JSON documents that the service and its client exchange.

Responsible for their shape and nothing else: `server` answers with them and builds its OpenAPI from them, `client`
decodes into them, `source` hands them out on both roads. Store documents (header, manifest) are in `records`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hsstore.plan import Plan, PlanParameters
from hsstore.records import StoreHeader
from hsstore.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """RFC 9457: every answer that is an error."""

    type: str
    """`urn:hsstore:problem:` + kind."""
    title: str
    """The HTTP phrase of the status."""
    status: int
    detail: str
    """One sentence: expected, found, where."""
    kind: str
    """Stable code of the error tree (`hsstore.errors`)."""
    hint: str = ""
    """What helps, mostly a command; may be empty."""
    instance: str = ""
    """Path of the request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreInfo:
    """One served store: identity and totals."""

    name: str
    """Its name in URLs: the base name of its directory."""
    manifest_id: str
    """SHA-256 of its canonical manifest: names the state of the store that is served."""
    model: str
    layers: tuple[str, ...]
    hidden_size: int
    n_samples: int
    """Without failed ones."""
    n_failed: int
    n_tokens: int
    n_bytes: int

    @classmethod
    def of(cls, store: Store, name: str) -> StoreInfo:
        totals = store.totals
        return cls(
            name=name,
            manifest_id=store.manifest_id,
            model=store.capture.model,
            layers=store.layers,
            hidden_size=store.capture.hidden_size,
            n_samples=totals.n_samples,
            n_failed=totals.n_failed,
            n_tokens=totals.n_tokens,
            n_bytes=totals.n_bytes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreDetail:
    """One served store with its immutable header."""

    info: StoreInfo
    header: StoreHeader


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleInfo:
    """Where one sample lies."""

    uid: str
    source_index: int
    shard: int
    row: int
    """First row inside the shard."""
    n_tokens: int
    """T."""
    failed: bool
    """The verifier gave no states for it; no plan takes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplePage:
    """Samples `offset … offset + len(samples)` in store order."""

    offset: int
    limit: int
    total: int
    samples: tuple[SampleInfo, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleDetail:
    """One sample with its tokens."""

    sample: SampleInfo
    input_ids: list[int]
    """[T] int32."""
    loss_mask: list[int]
    """[T] uint8: 1 = trained (assistant) token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanInfo:
    """A plan as both roads describe it."""

    plan_id: str
    manifest_id: str
    parameters: PlanParameters
    n_samples: int
    """Samples that every epoch holds."""
    n_tokens: int

    @classmethod
    def of(cls, plan: Plan) -> PlanInfo:
        return cls(
            plan_id=plan.plan_id,
            manifest_id=plan.manifest_id,
            parameters=plan.parameters,
            n_samples=plan.n_samples,
            n_tokens=plan.n_tokens,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochInfo:
    """Sums over one epoch of a plan."""

    n_batches: int
    """B; batch indices are 0 … B-1."""
    n_samples: int
    n_tokens: int
    n_cut: int
    """Samples cut to `max_seq_len`."""
    n_dropped: int
    """Samples left out: longer than `max_seq_len` under `drop`, or of a single token."""

    @classmethod
    def of(cls, plan: Plan, epoch: int) -> EpochInfo:
        bins = plan.epoch(epoch)
        return cls(
            n_batches=bins.n_batches,
            n_samples=bins.n_samples,
            n_tokens=bins.n_tokens,
            n_cut=plan.n_cut,
            n_dropped=plan.n_dropped,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """Answer of the probes."""

    status: Literal["ok", "ready"]
