"""What one server serves: its stores by name, the plans it was asked for, its bounds.

Responsible for opening every store before the first request, for keeping the last few plans, and for noticing damage
before a byte of it is read in user space. Leaves HTTP to `routes`, packing to `hsstore.plan`, bytes to
`hsstore.gather`.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hsstore.api import EpochInfo, PlanInfo, SampleDetail, SampleInfo, SamplePage, StoreInfo
from hsstore.errors import DamagedError, NotFoundError, UsageError
from hsstore.gather import BatchView
from hsstore.index import SplitName
from hsstore.manifest import load_layouts
from hsstore.plan import KEPT_EPOCHS, EpochPlan, Plan, PlanParameters, plan_id
from hsstore.records import FLAG_FAILED
from hsstore.source import plan_of
from hsstore.store import Store
from server.files import Catalogue
from server.metrics import Metrics
from server.settings import Limits, Settings
from server.streaming import Slots


@dataclass(slots=True, kw_only=True)
class ServedStore:
    """An open store under its name."""

    name: str
    store: Store
    files: Catalogue
    _counts: dict[SplitName, npt.NDArray[np.int64]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def info(self) -> StoreInfo:
        return StoreInfo.of(self.store, self.name)

    def open_shards(self) -> int:
        """Shards that were laid out and have no record."""
        planned = sum(len(layout.shards) for layout in load_layouts(self.store.root, self.store.header))
        return planned - len(self.store.state.shards)

    def page(self, offset: int, limit: int) -> SamplePage:
        total = len(self.store.index)
        rows = range(offset, min(offset + limit, total))
        return SamplePage(offset=offset, limit=limit, total=total, samples=tuple(self._sample(i) for i in rows))

    def detail(self, sample: str) -> SampleDetail:
        i = self.store.index.find(sample)
        with self.noticing_damage():
            return SampleDetail(
                sample=self._sample(i),
                input_ids=self.store.input_ids(i).tolist(),
                loss_mask=self.store.loss_mask(i).tolist(),
            )

    def token_counts(self, split: SplitName) -> npt.NDArray[np.int64]:
        """int64 [V], computed once per split."""
        with self._lock, self.noticing_damage():
            if split not in self._counts:
                self._counts[split] = self.store.token_counts(split)
            return self._counts[split]

    def _sample(self, i: int) -> SampleInfo:
        index = self.store.index
        return SampleInfo(
            uid=index.uid_hex(i),
            source_index=int(index.source_index[i]),
            shard=int(index.shard[i]),
            row=int(index.row[i]),
            n_tokens=int(index.n_tokens[i]),
            failed=bool(int(index.flags[i]) & FLAG_FAILED),
        )

    @contextmanager
    def noticing_damage(self) -> Iterator[None]:
        """Let go of the maps when a file turned out damaged: the next request maps, and checks, the repaired one."""
        try:
            yield
        except DamagedError:
            self.store.close()
            raise


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldPlan:
    """A plan with the store that it packs."""

    served: ServedStore
    plan: Plan
    epoch_computed: Callable[[], None]
    """Called for every epoch that was not held any more."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    """`Plan` keeps its last epochs without a lock of its own."""
    _seen: deque[EpochPlan] = field(default_factory=lambda: deque(maxlen=KEPT_EPOCHS))
    """The epochs that `plan` holds: it lets the oldest go as well."""

    def info(self) -> PlanInfo:
        return PlanInfo.of(self.plan)

    def epoch(self, epoch: int) -> EpochInfo:
        with self.lock:
            self._pack(epoch)
            return EpochInfo.of(self.plan, epoch)

    def view(self, epoch: int, number: int) -> BatchView:
        with self.lock:
            self._pack(epoch)
            return BatchView(self.served.store, self.plan, epoch, number)

    def _pack(self, epoch: int) -> None:
        packed = self.plan.epoch(epoch)
        if not any(seen is packed for seen in self._seen):
            self._seen.append(packed)
            self.epoch_computed()


class Service:
    """Everything the routes need, one per app."""

    def __init__(self, settings: Settings) -> None:
        """Opens every store. Raises what `Store.open` raises, and `UsageError` for two stores of one name."""
        self.limits: Limits = settings.limits
        self.private = settings.needs_token
        self.verify_reads = settings.verify_reads
        self.metrics = Metrics()
        self.slots = Slots(settings.limits.streams, settings.limits.wait_seconds)
        self.metrics.streams.set_function(lambda: self.slots.in_use)
        self.stores = self._open(settings.stores)
        self._plans: OrderedDict[str, HeldPlan] = OrderedDict()
        self._lock = threading.Lock()

    def _open(self, roots: tuple[Path, ...]) -> dict[str, ServedStore]:
        stores: dict[str, ServedStore] = {}
        for root in roots:
            name = os.path.basename(os.path.abspath(root))  # a link gives another name; `..` gives none
            if name in stores:
                raise UsageError(
                    f"two stores are named {name!r}: {stores[name].store.root} and {root}",
                    hint="serve them from two servers, or link one under another name",
                )
            store = Store.open(root)
            stores[name] = ServedStore(name=name, store=store, files=Catalogue(store))
            self.metrics.samples.labels(name).set(store.totals.n_samples)
            self.metrics.tokens.labels(name).set(store.totals.n_tokens)
        return stores

    def close(self) -> None:
        for served in self.stores.values():
            served.store.close()

    def store(self, name: str) -> ServedStore:
        if name not in self.stores:
            raise NotFoundError(f"no store {name!r} is served; there is {', '.join(self.stores)}")
        return self.stores[name]

    def only_store(self) -> ServedStore:
        """The store meant by a request that names none."""
        if len(self.stores) > 1:
            raise UsageError(f"several stores are served, so name one of {', '.join(self.stores)}")
        return next(iter(self.stores.values()))

    def make_plan(self, store: str | None, parameters: PlanParameters) -> tuple[HeldPlan, bool]:
        """The plan, and whether it was unknown until now."""
        served = self.only_store() if store is None else self.store(store)
        key = plan_id(served.store.manifest_id, parameters)
        with self._lock:
            if key in self._plans:
                self._plans.move_to_end(key)
                return self._plans[key], False
        new = HeldPlan(
            served=served,
            plan=plan_of(served.store, parameters),
            epoch_computed=self.metrics.plans.labels("epoch").inc,
        )
        self.metrics.plans.labels("plan").inc()
        with self._lock:
            held = self._plans.setdefault(new.plan.plan_id, new)
            self._plans.move_to_end(new.plan.plan_id)
            while len(self._plans) > self.limits.plans:
                self._plans.popitem(last=False)
        return held, held is new

    def plan(self, plan_id: str) -> HeldPlan:
        with self._lock:
            if plan_id not in self._plans:
                raise NotFoundError(f"no plan {plan_id!r} is known here", hint="POST its parameters to /v1/plans again")
            self._plans.move_to_end(plan_id)
            return self._plans[plan_id]
