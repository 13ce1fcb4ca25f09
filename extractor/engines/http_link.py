"""One server, from the URL to a sample's ticket: handshake, requests, and the road its rows take to the staged files.

Two roads. *Shared*: the server writes into the staged files, which it must see under the same path; this is proved with
a row of its own before any sample is sent. *Fetched*: it keeps the rows in its spool, and they are written here. Either
way the ticket leaves when the rows have the digests they had when captured. Leaves threads and other servers to
`http_pool`, words for what a server is not to `http_client`.

Letters: T tokens of a sample, H hidden size.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from extractor.engines.base import Job, Ticket, Transfer
from extractor.engines.http_client import Refused, VerifierClient, new_ticket
from extractor.engines.http_fetch import TornRowsError, write_rows
from extractor.engines.receipts import columns_of, failed_ticket, good_ticket
from extractor.sglang_plugin.arrivals import Arrivals
from extractor.sglang_plugin.host import generate_arguments, read_receipt
from extractor.sglang_plugin.protocol import Receipt, ServerInfo, Target, WriteError
from hsstore.answers import TransientError
from hsstore.console import note
from hsstore.errors import HsstoreError, IncompleteError, NoSpaceError, ServiceError, UsageError

PROOF_SECONDS = 15.0
_ASK_ERRORS_SECONDS = 0.5
_PROBE_ID = 1


class ServerLost(Exception):
    """The server gave no answer that holds; the sample goes to another one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What every server must deliver."""

    layers: tuple[str, ...]
    points: tuple[int, ...]
    """k of each captured `after_k`."""
    row_bytes: int
    """Of one state: 2·H."""
    answer_seconds: float
    confirm_seconds: float


class Link:
    """A server that is talked to. `capture` is called by many threads."""

    def __init__(self, client: VerifierClient, wanted: Wanted, transfer: Transfer) -> None:
        self.client, self._wanted, self._transfer = client, wanted, transfer
        self._columns = columns_of(wanted.points)
        self._numbers = itertools.count()
        self._proofs: dict[Path, bool] = {}
        self._proving = threading.Lock()
        self._n_ranks = 1

    @property
    def url(self) -> str:
        return self.client.url

    def handshake(self) -> ServerInfo:
        """What the server is, once a token has gone the whole way through each of its ranks.

        Raises `UsageError` for a server that cannot deliver what is wanted, `TransientError` for one that is not there.
        """
        info = self.client.info()
        self._n_ranks = info.ready.n_ranks
        for rank in range(self._n_ranks):
            self._probe(rank)
        return info

    def capture(self, job: Job, stop: threading.Event) -> Ticket:
        """The ticket of a job whose rows are in its files. Raises `ServerLost`; what else it raises ends the run."""
        try:
            return self._capture(job, self._is_shared(job), stop)
        except Refused as refused:
            return failed_ticket(job, refused.message)
        except ServiceError as error:
            raise ServerLost(error.message) from None

    def _capture(self, job: Job, shared: bool, stop: threading.Event) -> Ticket:
        target = self._target(len(job.input_ids), job.row, job.files if shared else dict.fromkeys(job.files, ""))
        in_place = False
        try:
            receipt = self._ask(target, job.input_ids)
            if receipt.error:
                return failed_ticket(job, receipt.error)
            if receipt.capture_points != self._wanted.points:
                raise ServerLost("it captures other layers than at the start")
            if stop.is_set():
                raise ServerLost("nobody waits any more")
            self._deliver(target, receipt, job, shared)
            in_place = shared
        finally:
            if not in_place:  # what was fetched is freed; what failed must not be written late, over another's rows
                self._drop(target)
        return good_ticket(job, receipt, confirmed=in_place)

    def _deliver(self, target: Target, receipt: Receipt, job: Job, shared: bool) -> None:
        if shared:
            try:
                self._arrivals(target, self._wanted.confirm_seconds).confirm(target, receipt)
            except IncompleteError as error:
                self._forget_proof(job)  # it may have lost the directory: then its rows are fetched from now on
                raise ServerLost(error.message) from None
        else:
            self._fetch(target, receipt, job)

    def _fetch(self, target: Target, receipt: Receipt, job: Job) -> None:
        deadline = time.monotonic() + self._wanted.confirm_seconds
        for attempt in (1, 2):
            try:
                while not self.client.rows(
                    target.ticket, lambda response: write_rows(response, job, receipt, self._wanted.row_bytes)
                ):
                    if time.monotonic() > deadline:
                        raise ServerLost(f"{self.url} had no complete rows after {self._wanted.confirm_seconds:.0f} s")
                return
            except TornRowsError as error:
                if attempt == 2:
                    raise ServerLost(f"{self.url} {error}") from None
            except IncompleteError as error:  # the server says that it could not keep them
                raise ServerLost(error.message) from None

    def _is_shared(self, job: Job) -> bool:
        """Whether the server writes into this job's files itself, proved once for each store."""
        if self._transfer == "fetch":
            return False
        root = _store_of(job)
        with self._proving:
            if root not in self._proofs:
                reason = self._why_not_shared(job)
                if reason and self._transfer == "shared":
                    raise NotShared(
                        f"{self.url} does not write where this run stages its files: {reason}",
                        hint=f"mount {root} on the server's machine under the same path, or give --transfer fetch",
                    )
                if reason:
                    note(f"{self.url} does not see {root} ({reason}): its states are fetched over HTTP")
                self._proofs[root] = not reason
            return self._proofs[root]

    def _forget_proof(self, job: Job) -> None:
        with self._proving:
            self._proofs.pop(_store_of(job), None)

    def _why_not_shared(self, job: Job) -> str:
        """Let each rank write a row into a file of its own beside the job's, and read it back; "" when it is there."""
        directory = Path(next(iter(job.files.values()))).parent
        for rank in range(self._n_ranks):
            target = self._target(1, 0, {})
            files = {name: str(directory / f"probe.{target.ticket[:8]}.{name}") for name in self._wanted.layers}
            target = msgspec.structs.replace(target, files=files)
            try:
                for path in files.values():
                    with open(path, "xb") as file:
                        file.truncate(self._wanted.row_bytes)
                receipt = self._ask(target, np.full(1, _PROBE_ID, np.int32), rank)
                if receipt.error:
                    raise ServerLost(receipt.error)
                self._arrivals(target, PROOF_SECONDS).confirm(target, receipt)
            except (IncompleteError, NoSpaceError) as error:
                self._drop(target)
                return error.message
            finally:
                for path in files.values():
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(path)
        return ""

    def _probe(self, rank: int) -> None:
        """One token whose rows are fetched: hooks that do not run, other layers and sizes show before any sample."""
        target = self._target(1, 0, dict.fromkeys(self._wanted.layers, ""))
        try:
            receipt = self._ask(target, np.full(1, _PROBE_ID, np.int32), rank)
            if receipt.error:
                raise UsageError(f"{self.url} captures nothing: {receipt.error}", hint="look at the server's log")
            self._check_points(receipt)
            expected = len(self._wanted.layers) * self._wanted.row_bytes
            n_bytes = self._probed_bytes(target)
            if n_bytes != expected:
                raise UsageError(f"{self.url} answers a token with {n_bytes} bytes of states, expected {expected}")
        except Refused as refused:
            raise UsageError(f"{self.url} refuses a request of one token: {refused.message}") from None
        finally:
            self._drop(target)

    def _probed_bytes(self, target: Target) -> int:
        deadline = time.monotonic() + self._wanted.confirm_seconds
        while (n_bytes := self.client.rows(target.ticket, lambda response: len(response.read()))) is None:
            if time.monotonic() > deadline:
                raise TransientError(f"{self.url} keeps no rows")
        return n_bytes

    def _check_points(self, receipt: Receipt) -> None:
        if receipt.capture_points != self._wanted.points:
            layers = ",".join(map(str, self._wanted.points))
            raise UsageError(
                f"{self.url} takes the states after layers {list(receipt.capture_points)},"
                f" expected {list(self._wanted.points)}",
                hint=f"give the --layers of the server, or start one with `hsstore verifier --layers {layers}`",
            )

    def _target(self, n_tokens: int, row: int, files: dict[str, str]) -> Target:
        seconds = self._wanted.answer_seconds + self._wanted.confirm_seconds
        return Target(next(self._numbers), n_tokens, row, files, self._columns, new_ticket(), seconds)

    def _ask(self, target: Target, input_ids: npt.NDArray[np.int32], rank: int | None = None) -> Receipt:
        body: dict[str, Any] = generate_arguments(target, target.ticket, rank)
        meta = self.client.generate({"input_ids": input_ids.tolist(), "rid": target.ticket, **body})
        reason = meta.get("finish_reason") or {}
        if reason.get("type") == "abort":  # it ends, or another client asked for it: no fault of the sample
            raise TransientError(f"{self.url} gave a request up: {reason.get('message')}")
        return read_receipt(meta)

    def _arrivals(self, target: Target, seconds: float) -> Arrivals:
        asked_at = 0.0

        def reported() -> list[WriteError]:
            nonlocal asked_at
            if time.monotonic() - asked_at < _ASK_ERRORS_SECONDS:
                return []
            errors = self.client.write_errors(target.ticket)
            asked_at = time.monotonic()
            return errors

        return Arrivals(reported, row_bytes=self._wanted.row_bytes, seconds=seconds)

    def _drop(self, target: Target) -> None:
        """As far as the server hears it; else it gives the rows up by time."""
        with contextlib.suppress(HsstoreError):
            self.client.drop(target.ticket)


class NotShared(UsageError):
    """`--transfer shared` was asked for, and the server does not see the staged files."""


def check_model(info: ServerInfo, url: str, *, config_sha256: str, weights_sampled: str, dtype: str) -> list[str]:
    """Differences between what a server runs and --model, one sentence each."""
    model, found = info.model, []
    if info.load_format == "dummy":
        found.append("its weights are made up (--load-format dummy)")
    if not info.capture:
        found.append("it was started without --enable-return-aux-hidden-states")
    if model.config_sha256 and model.config_sha256 != config_sha256:
        found.append(f"the config.json of {model.path} is another one")
    if model.weights_sampled_sha256 and model.weights_sampled_sha256 != weights_sampled:
        found.append(f"the weights in {model.path} are others")
    if dtype != "auto" and info.ready.compute_dtype != dtype:
        found.append(f"it runs in {info.ready.compute_dtype}, this run asks for {dtype} (--dtype)")
    return found


def disagreements(one: ServerInfo, other: ServerInfo) -> list[str]:
    """What two servers of one extraction must not differ in, `name: one → other`."""
    pairs: Sequence[tuple[str, object, object]] = (
        ("SGLang", one.ready.version, other.ready.version),
        ("dtype", one.ready.compute_dtype, other.ready.compute_dtype),
        ("config.json", one.model.config_sha256[:12], other.model.config_sha256[:12]),
        ("weights", one.model.weights_sampled_sha256[:12], other.model.weights_sampled_sha256[:12]),
        *(
            (name, one.ready.flags.get(name, "none"), other.ready.flags.get(name, "none"))
            for name in sorted({*one.ready.flags, *other.ready.flags})
        ),
    )
    return [f"{name}: {mine} → {theirs}" for name, mine, theirs in pairs if mine != theirs]


def _store_of(job: Job) -> Path:
    """Directory of staged attempts: STORE/staging/NUMBER.ATTEMPT/hidden.…"""
    return Path(next(iter(job.files.values()))).parent.parent
