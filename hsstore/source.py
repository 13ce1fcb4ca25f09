"""Where batches come from: a store on this machine or a service, behind one protocol with equal results.

Responsible for opening either from one string, for the local road, and for an HTTP road that survives a restarted
service but never a changed store. Leaves sockets to `client` and bytes to `gather`. Sources may be forked and pickled.

Letters: T tokens of a batch, V verifier vocabulary, C rows of a block.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar, get_args
from urllib.parse import quote

import numpy as np
import numpy.typing as npt

from hsstore import gather, wire
from hsstore.api import EpochInfo, PlanInfo, StoreDetail, StoreInfo
from hsstore.client import Patience, ServiceClient
from hsstore.digest import crc32c
from hsstore.errors import ConflictError, DamagedError, NotFoundError, ServiceError, UsageError
from hsstore.index import SplitName
from hsstore.plan import Plan, PlanParameters
from hsstore.records import StoreHeader
from hsstore.shardfiles import Backend
from hsstore.store import Store

log = logging.getLogger("hsstore.source")
T = TypeVar("T")
Buffer = bytearray | memoryview
Verify = Literal["off", "sampled", "always"]
SAMPLED_EVERY = 16
"""`verify="sampled"` checks the batches whose number is a multiple of this."""
_FIRST_CONTACT = Patience(attempts=4, total_seconds=20.0)  # a wrong URL should say so within seconds


class BatchSource(Protocol):
    """What a trainer sees of a store, wherever it lies."""

    @property
    def header(self) -> StoreHeader: ...

    @property
    def manifest_id(self) -> str:
        """The state of the store that every batch comes from."""

    def make_plan(self, parameters: PlanParameters) -> PlanInfo: ...

    def epoch_info(self, plan_id: str, epoch: int) -> EpochInfo: ...

    def read_batch(self, plan_id: str, epoch: int, index: int, buffer: Buffer | None = None) -> wire.Batch:
        """Batch `index` of an epoch, as views into `buffer` (if large enough), valid until that is reused."""

    def token_counts(self, split: SplitName = "train") -> npt.NDArray[np.int64]:
        """int64 [V]: how often each token is a trained one in a split."""

    def close(self) -> None: ...


def open_source(
    spec: str | Path,
    *,
    store: str | None = None,
    token: str | None = None,
    verify: Verify = "off",
    manifest_id: str | None = None,
    backend: Backend = "mmap",
) -> BatchSource:
    """Open a store directory or the URL of a service.

    `store` names one of several served stores; `token` defaults to HSSTORE_TOKEN; `manifest_id` asks for the state of
    that id, which a store that grew has kept; `backend` is how a directory is read. Raises `NotFoundError` for a path
    that is no store, `ServiceError` when nobody answers, `ConflictError` when the state cannot be had.
    """
    if verify not in get_args(Verify):
        raise UsageError(f"verify must be one of {', '.join(get_args(Verify))}, found {verify!r}")
    if str(spec).startswith(("http://", "https://")):
        client = ServiceClient(str(spec), token=token or os.environ.get("HSSTORE_TOKEN") or None)
        try:
            return HttpSource(client, store=store, verify=verify, manifest_id=manifest_id)
        except BaseException:
            client.close()
            raise
    if store is not None:
        raise UsageError(f"store={store!r} chooses among the stores of a service; {spec} is a path")
    return LocalSource(Store.open(spec, backend=backend, manifest_id=manifest_id), verify=verify)


class LocalSource:
    """A store on this machine: batches are copied out of its maps."""

    def __init__(self, store: Store, *, verify: Verify = "off") -> None:
        self._store = store
        self._verify = verify
        self._plans: dict[str, Plan] = {}

    def __getstate__(self) -> dict[str, Any]:
        parameters = [plan.parameters for plan in self._plans.values()]
        return {"store": self._store, "verify": self._verify, "plans": parameters}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["store"], verify=state["verify"])  # type: ignore[misc]
        for parameters in state["plans"]:
            self.make_plan(parameters)

    @property
    def header(self) -> StoreHeader:
        return self._store.header

    @property
    def manifest_id(self) -> str:
        return self._store.manifest_id

    def make_plan(self, parameters: PlanParameters) -> PlanInfo:
        plan = plan_of(self._store, parameters)
        return PlanInfo.of(self._plans.setdefault(plan.plan_id, plan))

    def epoch_info(self, plan_id: str, epoch: int) -> EpochInfo:
        return EpochInfo.of(self._plan(plan_id), epoch)

    def read_batch(self, plan_id: str, epoch: int, index: int, buffer: Buffer | None = None) -> wire.Batch:
        plan = self._plan(plan_id)
        try:
            if is_checked(self._verify, index):
                check_source(self._store, plan, epoch, index)
            return gather.read(self._store, plan, epoch, index, buffer)
        except DamagedError:
            self._store.close()  # a repaired file has the same name: the next read opens it
            raise

    def token_counts(self, split: SplitName = "train") -> npt.NDArray[np.int64]:
        return self._store.token_counts(split)

    def close(self) -> None:
        self._store.close()

    def _plan(self, plan_id: str) -> Plan:
        if plan_id not in self._plans:
            raise NotFoundError(f"no plan {plan_id!r} was made from this source", hint="call make_plan first")
        return self._plans[plan_id]


class HttpSource:
    """A store behind a service: batches are read from a socket into the caller's buffer."""

    def __init__(
        self,
        client: ServiceClient,
        *,
        store: str | None = None,
        verify: Verify = "off",
        manifest_id: str | None = None,
    ) -> None:
        """Asks the service for the store.

        Raises `ServiceError` when nobody answers, `UsageError` for a choice, `ConflictError` when it serves another
        state than the one of `manifest_id`.
        """
        self._client = client
        self._verify = verify
        infos = client.get("/v1/stores", list[StoreInfo], patience=_FIRST_CONTACT)
        self._name = _choose([info.name for info in infos], store, client.url)
        detail = client.get(f"/v1/stores/{_quoted(self._name)}", StoreDetail)
        self._header, self._manifest_id = detail.header, detail.info.manifest_id
        if manifest_id is not None:
            _check_unchanged(f"{client.url}, store {self._name}", manifest_id, self._manifest_id)
        self._plans: dict[str, PlanParameters] = {}

    @property
    def header(self) -> StoreHeader:
        return self._header

    @property
    def manifest_id(self) -> str:
        return self._manifest_id

    def make_plan(self, parameters: PlanParameters) -> PlanInfo:
        parameters.check()
        body = {name: getattr(parameters, name) for name in ("max_seq_len", "seed", "split", "overflow")}
        info = self._client.post("/v1/plans", {"store": self._name, **body}, PlanInfo)
        _check_unchanged(f"{self._client.url}, store {self._name}", self._manifest_id, info.manifest_id)
        self._plans[info.plan_id] = parameters
        return info

    def epoch_info(self, plan_id: str, epoch: int) -> EpochInfo:
        path = f"/v1/plans/{_quoted(plan_id)}/epochs/{epoch}"
        return self._knowing_plan(plan_id, lambda: self._client.get(path, EpochInfo))

    def read_batch(self, plan_id: str, epoch: int, index: int, buffer: Buffer | None = None) -> wire.Batch:
        path = f"/v1/plans/{_quoted(plan_id)}/epochs/{epoch}/batches/{index}"
        checked = is_checked(self._verify, index)
        batch = self._knowing_plan(plan_id, lambda: self._read(path + "?check=true" * checked, buffer, checked))
        expected = {
            "plan_id": plan_id,
            "manifest_id": self._manifest_id,
            "epoch": str(epoch),
            "batch": str(index),
        }
        for name, value in expected.items():
            if batch.metadata.get(name) != value:
                found = batch.metadata.get(name)
                raise ServiceError(f"{self._client.url}{path} holds {name} {found!r}, expected {value!r}")
        return batch

    def token_counts(self, split: SplitName = "train") -> npt.NDArray[np.int64]:
        body = self._client.read(f"/v1/stores/{_quoted(self._name)}/token_counts?split={split}")
        answer = wire.parse(body)
        _check_unchanged(self._client.url, self._manifest_id, answer.metadata.get("manifest_id", ""))
        return answer.tensors["counts"]

    def close(self) -> None:
        self._client.close()

    def _read(self, path: str, buffer: Buffer | None, checked: bool) -> wire.Batch:
        batch = wire.parse(self._client.read(path, buffer))
        if checked:
            try:
                wire.check_blocks(batch)
            except DamagedError as error:
                log.warning("reading once more: %s", error)
                batch = wire.parse(self._client.read(path, buffer))
                wire.check_blocks(batch)
        return batch

    def _knowing_plan(self, plan_id: str, call: Callable[[], T]) -> T:
        """A restarted service has forgotten the plan: tell it again, once."""
        try:
            return call()
        except NotFoundError:
            parameters = self._plans.get(plan_id)
            if parameters is None:
                raise
            self.make_plan(parameters)
            return call()


def plan_of(store: Store, parameters: PlanParameters) -> Plan:
    return Plan(store.index, store.header.split, store.manifest_id, parameters)


def check_source(store: Store, plan: Plan, epoch: int, number: int) -> int:
    """Compare every block that a batch touches, cut ones included, with its record. Returns how many.

    Raises `DamagedError` naming array, shard and rows.
    """
    at, chunk_rows = plan.index, store.header.chunk_rows
    touched: dict[tuple[int, int], None] = {}
    for segment in plan.epoch(epoch).segments(number):
        shard, row = int(at.shard[segment.sample]), int(at.row[segment.sample])
        first, last = (row + segment.start) // chunk_rows, (row + segment.stop - 1) // chunk_rows
        touched |= dict.fromkeys((shard, block) for block in range(first, last + 1))
    for spec in store.header.arrays:
        rows = np.empty(chunk_rows * spec.row_bytes, np.uint8).data  # copied: no file can be cut under a checksum
        for shard, block in touched:
            store.read_into(spec.name, shard, block * chunk_rows, rows)
            if crc32c(rows) != int(store.block_crcs(spec.name, shard)[block]):
                span = f"rows {block * chunk_rows} to {(block + 1) * chunk_rows - 1} of shard {shard}"
                raise DamagedError(
                    f"{spec.name}, {span} have another CRC32C than their record",
                    hint=f"run `hsstore verify manifest {store.root} --full`",
                )
    return len(touched) * len(store.header.arrays)


def is_checked(verify: Verify, index: int) -> bool:
    """Whether batch `index` is one that `verify` has compared with the records."""
    return verify == "always" or (verify == "sampled" and index % SAMPLED_EVERY == 0)


def _check_unchanged(where: str, before: str, now: str) -> None:
    if before != now:
        raise ConflictError(
            f"{where} now holds another state of the store: manifest {now[:12] or 'unknown'}, was {before[:12]}",
            hint="start a new run on the new state, or serve the old one again",
        )


def _choose(names: list[str], wanted: str | None, url: str) -> str:
    if wanted is not None:
        if wanted not in names:
            raise NotFoundError(f"{url} serves no store {wanted!r}; it has {', '.join(names)}")
        return wanted
    if len(names) != 1:
        raise UsageError(f"{url} serves {len(names)} stores: {', '.join(names)}", hint="choose one with --store NAME")
    return names[0]


def _quoted(name: str) -> str:
    return quote(name, safe="")
