"""The training loop: from the first step, or a checkpoint, to the last one.

Responsible for: the order of things (validate, step, log, audit, save) and the agreement of all ranks to stop. Leaves
the step to `step`, data to `sequences`, parts to `prepare`, files to `checkpoint` and `report`.

Letters: W ranks, K TTT steps.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator
from pathlib import Path

from hsstore.api import PlanInfo
from hsstore.console import note
from hsstore.errors import HsstoreError
from trainer import checkpoint, metrics, schedule, step
from trainer.audit import FrozenSnapshot
from trainer.data import HostBatch
from trainer.interrupt import Stop
from trainer.metrics import Floats
from trainer.outcome import Outcome, Status
from trainer.prepare import Setup
from trainer.report import FILE, Clock, Report, StepFacts, announce, warn_of_other_numbers
from trainer.schedule import Cursor, StepBins
from trainer.sequences import Bin, Sequences, maker_factory, sequences
from trainer.state import TrainState, check_identity, latest, to_resume

# An Adam step moves a norm weight of 1.0 by the learning rate; float32 shows that from 2^-24 on. The audit of what
# moved waits for the first step whose rate is safely above.
VISIBLE_RATE = 2.0**-22


class Interrupted(Exception):
    """Raised on every rank at once, between two steps or in a validation."""


class Run:
    """One part of a run: made where it stands, `train` goes on to an `Outcome`."""

    def __init__(self, setup: Setup, stop: Stop) -> None:
        """Takes up the latest checkpoint when the options say so."""
        self.setup, self.stop, self.ranks, self.options = setup, stop, setup.ranks, setup.options
        self.out = Path(self.options.out)
        self.names = metrics.names(self.options.ttt_steps)
        self.step, self.cursor = 0, Cursor(epoch=0, bins_consumed=0)
        self.tokens, self.seconds = 0, 0.0
        self.first: dict[str, float] = {}
        self.last: dict[str, float] = {}
        self.validated_at = self.saved_at = -1
        self.clock = Clock()
        self.snapshot: FrozenSnapshot | None = None
        self.report: Report | None = None
        self.failure: HsstoreError | None = None
        self._resume()
        self.batches = [e.n_batches for e in setup.epochs]
        left = schedule.steps_left(self.batches, self.cursor, self.ranks.world)
        self.total_steps = min(self.step + left, self.options.max_steps or self.step + left)
        wanted = self.options.warmup_steps
        self.warmup_steps = max(1, self.total_steps // 100) if wanted is None else wanted

    def train(self) -> Outcome:
        """Steps up to the end, or to the step at which some rank was asked to stop."""
        if self.ranks.first:
            self.report = self._open_report()
            checkpoint.check_space(self.out, self.setup.model)
            announce(
                self.setup,
                self._plan(self.total_steps),
                self.total_steps,
                starts_over=self.options.resume and self.saved_at < 0,
            )
        try:
            return self._outcome(self._part())
        finally:
            if self.report is not None:
                self.report.close()

    def _part(self) -> Status:
        step.settle_buckets(self.setup)
        self.snapshot = FrozenSnapshot(self.setup.model)
        try:
            status = self._to_the_end()
        except Interrupted:
            status = "interrupted"
        if self.step and self.saved_at != self.step:
            self._save()
        if self.failure is not None:
            raise self.failure
        return status

    def _to_the_end(self) -> Status:
        if self._validation_is_due():  # of step 0, or when a stop came between a step and its validation
            self._validate()
        status = self._steps()
        if status == "finished" and self.validated_at != self.step:
            self._validate()
        return status

    def _steps(self) -> Status:
        """Raises `Interrupted` before the step at which some rank was asked to stop."""
        plan = self._plan(min(self.total_steps, self.options.stop_at or self.total_steps))
        mine: list[Bin] = [(bins.epoch, bins.bins[self.ranks.rank]) for bins in plan]
        with self._sequences(self.setup.train, mine, noise_std=self.options.noise_std) as loader:
            batches = iter(loader)
            for bins in plan:
                batch = self._next(batches, n_counts=3)
                began = time.perf_counter() - loader.last_wait_seconds
                counted, rows, guarded = self._sum_or_stop(batch.n_counted, batch.n_rows, batch.n_guarded)
                facts = StepFacts(
                    bins=bins,
                    rate=self._rate(),
                    rows=rows,
                    counted=counted,
                    guarded=guarded,
                    began=began,
                    wait_seconds=loader.last_wait_seconds,
                )
                self._step(batch, facts)
                self._end_step()
        return "finished" if self.step >= self.total_steps else "paused"

    def _plan(self, end: int) -> list[StepBins]:
        """The steps from here on, up to the one of number `end`."""
        walk = schedule.walk(self.batches, self.cursor, self.step, self.ranks.world)
        return list(itertools.takewhile(lambda bins: bins.step < end, walk))

    def _step(self, batch: HostBatch, facts: StepFacts) -> None:
        norm, floats = step.update(self.setup, batch, facts.counted, facts.rate)
        ratios = metrics.over_ranks(floats, self.ranks, self.names)
        self.step, self.cursor, self.tokens = self.step + 1, facts.bins.after, self.tokens + facts.rows
        seconds = time.perf_counter() - facts.began
        self.seconds += seconds
        self.clock.add(seconds=seconds, wait_seconds=facts.wait_seconds, rows=facts.rows)
        if self.report is not None:
            self.report.step(facts, norm=norm, ratios=ratios, clock=self.clock)
        self._audit_movement(facts)

    def _end_step(self) -> None:
        if self._validation_is_due():
            self._validate()
        if self._is_due(self.options.save_every):
            self._save()

    def _is_due(self, every: int | None) -> bool:
        ends_epoch = self.cursor.bins_consumed == 0
        return ends_epoch or (every is not None and self.step % every == 0)

    def _validation_is_due(self) -> bool:
        return self.validated_at != self.step and self._is_due(self.options.validate_every)

    def _next(self, batches: Iterator[HostBatch], *, n_counts: int) -> HostBatch:
        """The next sequence. Where data fails on one rank, all stop, so that what was trained so far can be saved."""
        try:
            return next(batches)
        except HsstoreError as error:
            self.failure = error
            self._sum_or_stop(*[0] * n_counts)
            raise

    def _sum_or_stop(self, *counts: int) -> list[int]:
        """Sums over all ranks; raises `Interrupted` on all of them when one was asked to stop."""
        stop = self.stop.requested or self.failure is not None
        *sums, stopping = self.ranks.sum([*counts, int(stop)])
        if stopping:
            raise Interrupted
        return sums

    def _sequences(self, plan: PlanInfo, bins: list[Bin], *, noise_std: float) -> Sequences:
        rows, pinned = self.setup.rows, self.ranks.device.type == "cuda"
        factory = maker_factory(self.setup.source, plan, rows, noise_std=noise_std)
        return sequences(bins, factory, rows, workers=self.options.num_workers, pinned=pinned)

    def _validate(self) -> None:
        """Metrics over the whole validation split, without noise; nothing when there is none."""
        setup, ranks = self.setup, self.ranks
        if setup.validation is None or setup.validation_epoch is None:
            return
        whole = schedule.walk([setup.validation_epoch.n_batches], Cursor(epoch=0, bins_consumed=0), 0, ranks.world)
        sums: Floats = {}
        setup.model.eval()
        mine: list[Bin] = [(0, bins.bins[ranks.rank]) for bins in whole]
        with self._sequences(setup.validation, mine, noise_std=0.0) as loader:
            batches = iter(loader)
            for _ in mine:
                batch = self._next(batches, n_counts=0)
                self._sum_or_stop()
                metrics.add(sums, step.evaluate(setup, batch))
        setup.model.train()
        ratios = metrics.over_ranks(sums, ranks, self.names)
        ratios["acceptance_length"] = metrics.acceptance_length(ratios, self.options.ttt_steps)
        if self.report is not None:
            self.report.validation(self.step, self.cursor.epoch, ratios)
        self.validated_at = self.step
        self.last = {name: value for name, value in ratios.items() if math.isfinite(value)}
        if self.step == 0:
            self.first = self.last

    def _audit_movement(self, facts: StepFacts) -> None:
        """After the first step that can move a weight: trained ones moved, frozen ones did not."""
        if self.snapshot is None or not facts.counted or facts.rate < VISIBLE_RATE:
            return
        self.snapshot.check_after_first_step(self.setup.model)
        self.snapshot = None
        if self.ranks.first:
            note(f"freeze audit after step {self.step}: all trained parameters moved, no frozen one did")

    def _resume(self) -> None:
        found = to_resume(self.options)
        if found is None:
            return
        path, state = found
        check_identity(path, state, self.setup.identity)
        checkpoint.load(path, state, self.setup.net, self.setup.optimizer, self.ranks)
        self.step, self.cursor, self.tokens, self.seconds = state.step, state.cursor, state.tokens, state.seconds
        self.first, self.last = state.first, state.last
        self.saved_at = self.step
        self.validated_at = state.validated_at
        if self.ranks.first:
            note(f"resumed {path.name} of {self.out}")
            warn_of_other_numbers(self.setup, state)

    def _save(self) -> None:
        if self.report is not None:
            self.report.sync()
        state = TrainState(
            step=self.step,
            cursor=self.cursor,
            tokens=self.tokens,
            seconds=self.seconds,
            identity=self.setup.identity,
            options=self.options.pinned(),
            world=self.ranks.world,
            threads=self.setup.threads,
            first=self.first,
            last=self.last,
            validated_at=self.validated_at,
        )
        path = checkpoint.save(
            self.out, state, self.setup.net, self.setup.optimizer, self.ranks, keep=self.options.keep
        )
        self.saved_at = self.step
        if self.ranks.first:
            note(f"saved {path.name}")

    def _rate(self) -> float:
        return schedule.learning_rate(
            self.step,
            peak=self.options.lr,
            warmup_steps=self.warmup_steps,
            total_steps=self.total_steps,
            schedule=self.options.schedule,
        )

    def _open_report(self) -> Report:
        self.out.mkdir(parents=True, exist_ok=True)
        return Report(
            self.out,
            keep_to_step=self.step if self.saved_at >= 0 else -1,
            ttt_steps=self.options.ttt_steps,
            total_steps=self.total_steps,
            log_every=self.options.log_every,
        )

    def _outcome(self, status: Status) -> Outcome:
        last = latest(self.out)
        return Outcome(
            status=status,
            step=self.step,
            total_steps=self.total_steps,
            epochs_done=self.cursor.epoch,
            tokens=self.tokens,
            seconds=self.seconds,
            tokens_per_second=self.clock.rows_per_second,
            wait_share=self.clock.wait_share,
            first=self.first,
            last=self.last,
            world=self.ranks.world,
            draft_vocab=self.setup.vocabulary.draft_size,
            draft_vocab_cover=self.setup.vocabulary.cover,
            plan_id=self.setup.train.plan_id,
            manifest_id=self.setup.source.manifest_id,
            out=str(self.out),
            metrics=str(self.out / FILE),
            checkpoint=str(last) if last else None,
        )
