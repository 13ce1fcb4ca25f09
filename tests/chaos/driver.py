"""Rounds of chaos: processes over one store that are killed, stopped beyond their lease, woken and started again."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from hsstore import paths
from tests.chaos.board import PHASES, Board
from tests.chaos.worker import Job, bury, read, sweep, write
from tests.chaos.world import World, make_input, read_acks

Role = Literal["writer", "quarantine", "gc", "reader"]
MAIN: dict[Role, Callable[[Job], None]] = {"writer": write, "quarantine": bury, "gc": sweep, "reader": read}
PATIENCE_SECONDS = 300.0
"""A round in which nothing is killed any more must end in that time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    kills: int
    """Ends when so many SIGKILLs …"""
    stops: int
    """… and so many SIGSTOPs beyond the lease were given."""
    writers: int
    """Rounds have 1 to so many."""
    seed: int
    lease_seconds: float = 0.3
    linger_seconds: float = 0.003
    kills_per_round: int = 40
    stops_per_round: int = 5
    broken: str = ""


@dataclass(slots=True)
class Report:
    """What was done to the writers, and what came of it."""

    rounds: int = 0
    kills: int = 0
    """Of writers."""
    others_killed: int = 0
    """Of processes that quarantine, sweep or read."""
    compared: int = 0
    """Rounds whose manifest_id was compared with that of an undisturbed run."""
    stops: int = 0
    """Longer than the lease, of a process at work on a shard."""
    overtaken: int = 0
    """Of them those whose shard was committed by another meanwhile."""
    starts: int = 0
    ends: int = 0
    """Processes that came to their own end."""
    killed_in: Counter[str] = field(default_factory=Counter)
    stopped_in: Counter[str] = field(default_factory=Counter)
    totals: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def lines(self) -> list[str]:
        t = self.totals
        return [
            f"rounds {self.rounds}, {self.seconds:.0f} s, started {self.starts}, ended by themselves {self.ends}",
            f"SIGKILLs of writers {self.kills}, of others {self.others_killed};"
            f" SIGSTOPs of writers beyond their lease {self.stops}, of these overtaken {self.overtaken}",
            "killed while: " + ", ".join(f"{p} {self.killed_in[p]}" for p in PHASES if self.killed_in[p]),
            "stopped while: " + ", ".join(f"{p} {self.stopped_in[p]}" for p in PHASES if self.stopped_in[p]),
            f"commits {t['commits']}, races lost {t['races_lost']}, rolled forward {t['rolled_forward']},"
            f" leases taken over {t['taken_over']}",
            f"layouts added {t['layouts_added']}, quarantined {t['quarantined']}, garbage removed {t['removed']}",
            f"times that a reader looked at every sample meanwhile {t['read']}",
            f"rounds compared with an undisturbed run {self.compared}",
            f"violations {len(self.violations)}",
        ]


@dataclass(slots=True)
class Process:
    pid: int
    role: Role
    slot: int
    stopped_at: float | None = None
    wake_at: float = 0.0
    shard: int = -1
    """What it worked on when it was stopped."""
    await_overtaking: bool = False


class Round:
    """One fresh store and the processes on it."""

    def __init__(self, settings: Settings, report: Report, number: int, directory: Path) -> None:
        self.settings, self.report = settings, report
        self.rng = random.Random(f"{settings.seed}/{number}")
        self.writers = 2 + number % 2 if settings.broken else settings.writers - number % settings.writers
        noisy = bool(settings.broken) or number % 2 == 1
        inputs = (make_input(f"first {number % 3}", 20), make_input(f"second {number % 3}", 9))
        self.world = World(directory / "store", inputs, noisy)
        self.acks = directory / "acks"
        self.errors = directory / "errors"
        self.board = Board(self.writers + 3)
        self.board.quarantines_left = 0 if settings.broken else number % 3
        self.processes: list[Process] = []
        self.kills_left, self.stops_left = settings.kills_per_round, settings.stops_per_round

    def run(self) -> list[str]:
        """Returns the violations."""
        self.acks.mkdir()
        self.errors.mkdir()
        self.world.create()
        for slot in range(self.writers):
            self._start("writer", slot)
        self._start("quarantine", self.writers)
        self._start("gc", self.writers + 1)
        if not self.settings.broken:  # there it would see what the judgement is to find
            self._start("reader", self.writers + 2)
        problems = self._disturb()
        self.report.rounds += 1
        self.report.compared += not self.world.noisy
        self.report.totals += Counter(self.board.totals())
        self.report.totals["layouts_added"] += len(paths.numbers_in(self.world.root / paths.LAYOUTS)) - 1
        return problems or list(self.world.violations(read_acks(self.acks)))

    def _start(self, role: Role, slot: int) -> None:
        self.report.starts += 1
        job = Job(
            world=self.world,
            board=self.board,
            slot=slot,
            acks=self.acks,
            lease_seconds=self.settings.lease_seconds,
            linger_seconds=self.settings.linger_seconds,
            broken=self.settings.broken,
            rng=random.Random(self.rng.random()),
        )
        self.board.work_on(slot, -1)
        pid = os.fork()
        if pid == 0:
            _child(MAIN[role], job, self.errors)
        self.processes.append(Process(pid, role, slot))

    def _disturb(self) -> list[str]:
        """Signals until all writers have ended by themselves."""
        calm_since: float | None = None
        while any(p.role == "writer" for p in self.processes):
            self._reap()
            if problems := self._failures():
                return self._give_up(problems)
            now = time.monotonic()
            self._wake(now)
            if self.kills_left <= 0 and self.stops_left <= 0:
                calm_since = calm_since or now
                if now - calm_since > PATIENCE_SECONDS:
                    return self._give_up(["a restart did not come to its end"])
            else:
                self._hit(now)
            time.sleep(self.rng.uniform(0.0005, 0.008))
        self.board.over = True
        deadline = time.monotonic() + PATIENCE_SECONDS
        while self.processes:
            self._wake(time.monotonic() + PATIENCE_SECONDS)
            self._reap()
            if time.monotonic() > deadline:
                return self._give_up(["what is no writer did not come to its end"])
            time.sleep(0.002)
        return self._failures()

    def _reap(self) -> None:
        for process in list(self.processes):
            pid, status = os.waitpid(process.pid, os.WNOHANG)
            if pid == 0:
                continue
            self.processes.remove(process)
            code = os.waitstatus_to_exitcode(status)
            if code == 0:
                self.report.ends += 1
            else:
                (self.errors / f"{pid}.exit").write_text(f"{process.role} ended with {code}")

    def _failures(self) -> list[str]:
        return [f"a process failed: {path.read_text().strip()}" for path in sorted(self.errors.iterdir())]

    def _give_up(self, problems: list[str]) -> list[str]:
        for process in self.processes:
            os.kill(process.pid, signal.SIGKILL)
            os.waitpid(process.pid, 0)
        self.processes.clear()
        return problems

    def _wake(self, now: float) -> None:
        for process in self.processes:
            if process.stopped_at is None:
                continue
            overtaken = process.shard >= 0 and paths.record(self.world.root, process.shard).exists()
            if now < process.wake_at and not (process.await_overtaking and overtaken):
                continue
            beyond = now - process.stopped_at > self.settings.lease_seconds
            if process.await_overtaking and not beyond:
                continue
            os.kill(process.pid, signal.SIGCONT)
            process.stopped_at = None
            if process.shard >= 0 and beyond:
                self.report.stops += 1
                self.report.overtaken += overtaken
                self.stops_left -= 1

    def _hit(self, now: float) -> None:
        """Perhaps a signal: at a random one, or at one that is where few were hit."""
        running = [p for p in self.processes if p.stopped_at is None]
        chance = self.rng.random()
        if self.kills_left > 0 and chance < 0.25:
            candidates = [*running, *(p for p in self.processes if p.stopped_at is not None and chance < 0.01)]
            writers = [p for p in candidates if p.role == "writer"]
            others = self.rng.random() < 0.1
            self._kill(self._choose(candidates if others else writers, self.report.killed_in))
        elif self.stops_left > 0 and chance < 0.5:
            at_work = [p for p in running if p.role == "writer" and self.board.shard(p.slot) >= 0]
            stopped = len(self.processes) - len(running)
            if at_work and stopped < max(1, self.writers // 2):
                self._stop(self._choose(at_work, self.report.stopped_in), now)

    def _choose(self, candidates: list[Process], hits: Counter[str]) -> Process | None:
        if not candidates:
            return None
        if self.rng.random() < 0.5:
            return self.rng.choice(candidates)
        return min(candidates, key=lambda p: (hits[self.board.phase(p.slot)], self.rng.random()))

    def _kill(self, process: Process | None) -> None:
        if process is None:
            return
        os.kill(process.pid, signal.SIGKILL)
        os.waitpid(process.pid, 0)
        self.processes.remove(process)
        if process.role == "writer":
            self.report.kills += 1
            self.kills_left -= 1
        else:
            self.report.others_killed += 1
        self.report.killed_in[self.board.phase(process.slot)] += 1
        self._start(process.role, process.slot)

    def _stop(self, process: Process | None, now: float) -> None:
        if process is None:
            return
        os.kill(process.pid, signal.SIGSTOP)
        lease = self.settings.lease_seconds
        process.stopped_at = now
        process.shard = self.board.shard(process.slot)
        process.await_overtaking = self.writers > 1 and self.rng.random() < 0.7
        process.wake_at = now + lease * (
            self.rng.uniform(5, 7) if process.await_overtaking else self.rng.uniform(1.1, 2)
        )
        self.report.stopped_in[self.board.phase(process.slot)] += 1


MANY_KILLS = 500
"""After so many, every step of a writer must have been hit."""


def _missed(report: Report) -> list[str]:
    if report.kills < MANY_KILLS:
        return []
    expected = [phase for phase in PHASES if phase not in ("quarantine", "gc")]
    return [f"no writer was killed while: {phase}" for phase in expected if not report.killed_in[phase]]


def _child(main: Callable[[Job], None], job: Job, errors: Path) -> None:
    code = 1
    try:
        main(job)
        code = 0
    except BaseException:
        (errors / f"{os.getpid()}").write_text(traceback.format_exc())
    finally:
        os._exit(code)


def chaos(settings: Settings, scratch: Path, say: Callable[[str], None]) -> Report:
    """Rounds until enough signals were given, or a round broke a promise."""
    report, start = Report(), time.monotonic()
    while not report.violations and (report.kills < settings.kills or report.stops < settings.stops):
        directory = scratch / f"{report.rounds}"
        directory.mkdir()
        report.violations += Round(settings, report, report.rounds, directory).run()
        report.seconds = time.monotonic() - start
        say(f"round {report.rounds}: {report.kills} kills, {report.stops} stops, {report.seconds:.0f} s")
        shutil.rmtree(directory)
    if not report.violations:
        report.violations += _missed(report)
    return report
