"""One verification of a store's states: choose samples, read them, run every check that can be run.

Leaves words and exit codes to `cli` and `show`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from extractor.states import choice, identity, statistics
from extractor.states.check import Options, Report, check
from extractor.states.finding import Finding, damage, merged
from extractor.states.identity import Digest, Identity
from extractor.states.sample import Checked
from extractor.states.statistics import Recorded
from extractor.verifier import Verifier, read_verifier
from hsstore import manifest
from hsstore.errors import DamagedError, IncompleteError
from hsstore.records import Capture
from hsstore.store import Store

WHOLE_SHARDS_BYTES = 2_000_000_000  # read for statistics: some seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a user asks of `hsstore verify states`."""

    store: Path
    model: str
    samples: int = 16
    max_tokens: int | None = None
    """Of each sample, from its beginning; None = all."""
    seed: int = 0
    digest: Digest = "auto"
    options: Options = field(default_factory=Options)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """All that was found."""

    store: str
    manifest_id: str
    capture: Capture
    verifier: Verifier
    seed: int
    n_samples: int
    """Usable ones in the store."""
    n_failed: int
    n_shards: int
    n_quarantined: int
    checked: tuple[Checked, ...]
    identity: Identity
    report: Report | None
    """None when no number could be compared."""
    recorded: Recorded
    findings: tuple[Finding, ...]
    """Of all checks, damage first."""
    seconds: float

    @property
    def sound(self) -> bool:
        return not any(f.severity == "damage" for f in self.findings)

    @property
    def is_decided(self) -> bool:
        return not self.sound or (self.report is not None and self.report.is_decided)


def verify(settings: Settings, say: Callable[[str], None] = lambda _text: None) -> Verification:
    """Raises `NotFoundError` without a store or model, `DamagedError` for one that cannot be opened."""
    started = time.monotonic()
    with Store.open(settings.store, backend="pread") as store:
        verifier = read_verifier(settings.model)
        capture = store.capture
        say("comparing digests")
        found = identity.compare(capture, verifier, settings.digest)
        rows = choice.choose(store, settings.samples, settings.seed)
        if not rows:
            raise IncompleteError(f"{settings.store} has no usable sample yet", hint="extract some first")
        samples, unreadable = _read(store, rows, settings.max_tokens)
        say(f"comparing {len(samples)} samples, {sum(s.n_tokens for s in samples):,} tokens")
        recorded = statistics.compare(store, samples, WHOLE_SHARDS_BYTES)
        report = None
        if found.fits and samples:
            report = check(samples, verifier, capture, settings.options, lambda s: _near(store, s))
        if report and report.forward and report.sound:
            found = identity.settled(found)
        totals = store.totals
        return Verification(
            store=str(settings.store),
            manifest_id=store.manifest_id,
            capture=capture,
            verifier=verifier,
            seed=settings.seed,
            n_samples=totals.n_samples,
            n_failed=totals.n_failed,
            n_shards=totals.n_shards,
            n_quarantined=_n_quarantined(store),
            checked=tuple(samples),
            identity=found,
            report=report,
            recorded=recorded,
            findings=tuple(
                merged([*found.findings, *unreadable, *(report.findings if report else ()), *recorded.findings])
            ),
            seconds=time.monotonic() - started,
        )


def _read(store: Store, rows: list[int], max_tokens: int | None) -> tuple[list[Checked], list[Finding]]:
    samples, unreadable = [], []
    for row in rows:
        index = int(store.index.source_index[row])
        try:
            sample = Checked(
                source_index=index,
                input_ids=store.input_ids(row),
                loss_mask=store.loss_mask(row),
                states={name: store.hidden(row, name) for name in store.layers},
                shard=int(store.index.shard[row]),
            )
            samples.append(sample.cut(max_tokens))
        except DamagedError as error:
            unreadable.append(damage("read", error.message, samples=(index,)))
    return samples, unreadable


def _near(store: Store, sample: Checked) -> Mapping[int, npt.NDArray[np.int32]]:
    return dict(choice.neighbours(store, sample.source_index))


def _n_quarantined(store: Store) -> int:
    return len(manifest.quarantined(manifest.load_tombstones(store.root, store.header)))
