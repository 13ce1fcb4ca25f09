"""`hsstore extract` with everything that happens in a long run, resumed until the store is complete, then judged.

    python -m tests.chaos.extraction --samples 2000 --engine sglang

The real command in a process of its own. At random moments: a scheduler or host process of the engine is killed (the
run must go on by itself, or end as incomplete), the command is killed (its engine must go too) or terminated, its disk
is filled and freed later. At the end every line of the input is written, failed or skipped, every sample is there
exactly once with the tokens of its line, no committed shard was ever written again, and `verify` finds nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from hsstore import paths  # noqa: E402
from tests.chaos import chats, judgement, processes, smalldisk  # noqa: E402

Fault = Literal["crash", "kill", "term", "full"]
PATIENCE_SECONDS = 420.0
"""Nothing changes in the store for so long while a run lives: it hangs."""
GONE_SECONDS = 120.0
"""An engine whose command was killed ends in that time."""
MAX_ROUNDS = 12
ENDS: dict[Fault, set[int]] = {"crash": {0, 4}, "kill": {-9}, "term": {143, -15}, "full": {4}}
"""Exit codes that a fault may lead to; −15 when SIGTERM came before Python could take it. Zero is always allowed."""
TINY_BYTES_PER_LINE, SMOLLM2_BYTES_PER_LINE = 512 * 512, 200 * 4608


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    samples: int
    """Lines of the prompts file, bad ones among them."""
    engine: str
    model: Path
    faults: dict[Fault, int]
    seed: int = 0
    shard_rows: int = 2048
    longest: int = 70
    """Words of an answer."""
    engine_options: tuple[str, ...] = ()
    states: bool = False
    """Whether `hsstore verify states` looks at the end: a model with real weights."""


@dataclass(slots=True)
class Report:
    """What was done to the runs, and what came of it."""

    rounds: int = 0
    """Stores that were made: a fault that comes too late is given to the next one."""
    runs: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    killed: Counter[str] = field(default_factory=Counter)
    """Processes of an engine, by what they were."""
    ends: Counter[str] = field(default_factory=Counter)
    """Runs by fault and exit code."""
    survived: int = 0
    """Crashes of an engine after which the same run came to its end."""
    no_full_disk: str = ""
    """Why none was made."""
    balances: list[str] = field(default_factory=list)
    tokens: int = 0
    verified: list[str] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def lines(self) -> list[str]:
        return [
            f"stores {self.rounds}, runs of hsstore extract {self.runs}, {self.seconds:.0f} s",
            "faults: "
            + ", ".join(f"{name} {n}" for name, n in sorted(self.faults.items()))
            + (f" (no full disk: {self.no_full_disk})" if self.no_full_disk else ""),
            f"engine processes killed: {dict(self.killed)}; runs that outlived a crash of their engine {self.survived}",
            "ends: " + ", ".join(f"{name} {n}" for name, n in sorted(self.ends.items())),
            *self.balances,
            f"tokens {self.tokens}; " + "; ".join(self.verified),
            f"violations {len(self.violations)}",
        ]


class Extraction:
    """One store, from nothing to complete."""

    def __init__(
        self,
        settings: Settings,
        report: Report,
        plan: list[Fault],
        directory: Path,
        disk: smalldisk.SmallDisk | None,
        say: Callable[[str], None],
    ) -> None:
        self.settings, self.report, self.plan, self.disk, self.say = settings, report, plan, disk, say
        self.rng = random.Random(f"{settings.seed}/{report.rounds}")
        self.directory = directory
        directory.mkdir()
        self.prompts = directory / "chats.jsonl"
        self.bad = chats.write_chats(
            self.prompts, settings.samples, seed=settings.seed + report.rounds, longest=settings.longest
        )
        self.out = (disk.point if disk else directory) / f"store-{report.rounds}"
        self.committed: dict[str, tuple[int, int]] = {}
        self.n_shards = 0
        self.planned = len(plan)
        self.outcome: dict[str, Any] = {}

    def run(self) -> None:
        """Run after run until one says that all is done."""
        for _ in range(6 * (len(self.plan) + 4)):
            code = self._one_run()
            self._look()
            if code == 0:
                judgement.judge(self)
            if code == 0 or self.report.violations:
                return
        self.violation("it never came to an end")

    def violation(self, text: str) -> None:
        self.say(f"VIOLATION {text}")
        self.report.violations.append(text)

    def command(self, *more: str) -> list[str]:
        s = self.settings
        options = [part for option in s.engine_options for part in ("--engine-option", option)]
        files = ["--model", str(s.model), "--prompts", str(self.prompts), "--out", str(self.out)]
        shape = ["--engine", s.engine, "--shard-rows", str(s.shard_rows), *options]
        return [sys.executable, "-m", "hsstore.cli", "extract", *files, *shape, "--resume", "--json", "--quiet", *more]

    def environment(self) -> dict[str, str]:
        (self.directory / "tmp").mkdir(exist_ok=True)
        return os.environ | {
            "HSSTORE_STATE_DIR": str(self.directory / "state"),
            "TMPDIR": str(self.directory / "tmp"),
            **({} if self.settings.states else {"OMP_NUM_THREADS": "1"}),  # a tiny model is faster with one
        }

    def _one_run(self) -> int:
        number = self.report.runs = self.report.runs + 1
        stdout, stderr = self.directory / f"{number}.out", self.directory / f"{number}.err"
        with open(stdout, "wb") as out, open(stderr, "wb") as err:
            process = subprocess.Popen(
                self.command(), stdout=out, stderr=err, env=self.environment(), cwd=ROOT, start_new_session=True
            )
        faults, family, engines = self._disturb(process)
        code = process.wait()
        self._judge_end(number, code, faults, family, stderr.read_text(errors="replace"))
        self.report.survived += "crash" in faults and (code == 0 or engines > 1)
        if text := stdout.read_text():
            self.outcome = json.loads(text)
        if code == 4 and self._only_failed(number):
            return self._retry_failed()
        return code

    def _retry_failed(self) -> int:
        """Samples that died with two engines are whole: they must come through when nothing disturbs."""
        self.say(f"{self.outcome['failed']} failed, tried again")
        number = self.report.runs = self.report.runs + 1
        done = subprocess.run(
            self.command("--retry-failed"), capture_output=True, text=True, env=self.environment(), cwd=ROOT
        )
        (self.directory / f"{number}.err").write_text(done.stderr)
        self.report.ends[f"retry {done.returncode}"] += 1
        if done.returncode:
            self.violation(f"--retry-failed ended with {done.returncode}: {done.stderr[-600:]}")
        else:
            self.outcome = json.loads(done.stdout)
        return done.returncode

    def _disturb(self, process: subprocess.Popen[bytes]) -> tuple[list[Fault], list[processes.Process], int]:
        """Faults until the run ends or is to end; its processes at the last one; how many engines it had."""
        given: list[Fault] = []
        hosts: set[int] = set()
        family: list[processes.Process] = []
        while self.plan and self._wait(process, self._moment(given)):
            fault = self.plan[0]
            family = processes.below(process.pid)
            hosts |= {p.pid for p in family if p.part == "host"}
            if not self._give(fault, process, family):
                continue
            self.plan.pop(0)
            given.append(fault)
            self.report.faults[fault] += 1
            self.say(f"run {self.report.runs}: {fault} with {len(self.records())} of {self.n_shards} shards committed")
            if fault == "full":
                self._wait(process, lambda: False)  # it must end by itself
            if fault != "crash":
                break
        if not given or given[-1] == "crash":
            self._wait(process, lambda: False)
        return given, family, len(hosts)

    def _moment(self, given: list[Fault]) -> Callable[[], bool]:
        """When the next fault is due: soon after a certain share of the shards, some as early as the start."""
        share = (self.planned - len(self.plan) + self.rng.random()) / (self.planned + 1)
        early = self.rng.random() < 0.2 and not given and self.plan[0] in ("kill", "term")
        linger = self.rng.uniform(0.0, 8.0 if early else 0.5)
        since: list[float] = []

        def due() -> bool:
            if not since and (early or len(self.records()) >= max(1, share * self._shards())):
                since.append(time.monotonic())
            return bool(since) and time.monotonic() - since[0] >= linger

        return due

    def _give(self, fault: Fault, process: subprocess.Popen[bytes], family: list[processes.Process]) -> bool:
        if fault == "crash":
            parts = [p for p in family if p.part]
            if not parts:  # between two engines
                time.sleep(0.05)
                return False
            victim = self.rng.choice(parts)
            victim.kill()
            self.report.killed[victim.part] += 1
        elif fault == "full":
            assert self.disk is not None
            self.disk.fill(self.rng.randrange(1 << 16))
        else:
            process.send_signal(signal.SIGKILL if fault == "kill" else signal.SIGTERM)
        return True

    def _wait(self, process: subprocess.Popen[bytes], due: Callable[[], bool]) -> bool:
        """True when it is due, False when the run has ended before; one that hangs is ended."""
        seen, changed = self._progress(), time.monotonic()
        while process.poll() is None:
            if due():
                return True
            time.sleep(0.02)
            if (now := self._progress()) != seen:
                seen, changed = now, time.monotonic()
            elif time.monotonic() - changed > PATIENCE_SECONDS:
                self.violation(f"run {self.report.runs} did nothing for {PATIENCE_SECONDS:.0f} s")
                for member in processes.below(process.pid):
                    member.kill()
                process.kill()
                process.wait()
        return False

    def _progress(self) -> object:
        """What changes as long as a run works or starts an engine."""
        staging = self.out / paths.STAGING
        attempts = sorted(os.listdir(staging)) if staging.is_dir() else []
        temporary = self.directory / "tmp"
        return self.records(), attempts, sorted(os.listdir(temporary)) if temporary.is_dir() else []

    def _judge_end(
        self, number: int, code: int, faults: list[Fault], family: list[processes.Process], stderr: str
    ) -> None:
        last = faults[-1] if faults else ""
        self.report.ends[f"{last or 'undisturbed'} {code}"] += 1
        allowed = {0}.union(*(ENDS[fault] for fault in faults))
        if code not in allowed and not (code == 4 and self._only_failed(number)):
            self.violation(f"run {number} ended with {code} after {faults}: {stderr[-800:]}")
        if "Traceback (most recent call last)" in stderr:
            self.violation(f"run {number} ended with a traceback: {stderr[-1500:]}")
        if last == "full":
            if code == 4 and "space" not in stderr:
                self.violation(f"run {number} on a full disk said: {stderr[-800:]}")
            self._refused_while_full()
        self._wait_until_gone(number, family)
        if code in (0, 143) and (left := self._staged()):
            self.violation(f"run {number} ended with {code} and left {left}")

    def _only_failed(self, number: int) -> bool:
        """Whether a run that nothing disturbed is incomplete because of samples that failed in an earlier one."""
        text = (self.directory / f"{number}.out").read_text()
        return bool(text) and json.loads(text)["failed"] > 0 and json.loads(text)["remaining"] == 0

    def _refused_while_full(self) -> None:
        """The same command on a disk that is still full says so, and harms nothing."""
        assert self.disk is not None
        self.disk.fill(0)
        done = subprocess.run(self.command(), capture_output=True, text=True, env=self.environment(), cwd=ROOT)
        self.report.ends[f"still full {done.returncode}"] += 1
        complete = done.returncode == 0  # nothing was left to be written
        if not complete and (done.returncode != 4 or "Traceback" in done.stderr):
            self.violation(f"on a full disk it ended with {done.returncode}: {done.stderr[-800:]}")
        self.disk.free()

    def _wait_until_gone(self, number: int, family: list[processes.Process]) -> None:
        end = time.monotonic() + GONE_SECONDS
        while (left := processes.left_of(family)) and time.monotonic() < end:
            time.sleep(0.05)
        for process in left:
            self.violation(f"run {number} left a process behind: {process.command[:120]}")
            process.kill()

    def _staged(self) -> list[str]:
        staging = self.out / paths.STAGING
        return sorted(os.listdir(staging)) if staging.is_dir() else []

    def records(self) -> list[str]:
        directory = self.out / paths.RECORDS
        return sorted(p for p in os.listdir(directory) if p.endswith(".json")) if directory.is_dir() else []

    def _shards(self) -> int:
        if not self.n_shards and (self.out / paths.HEADER).exists():
            self.n_shards = judgement.shards(self.out)
        return self.n_shards

    def _look(self) -> None:
        """No committed shard goes or is written again, and what is there is sound."""
        for name in self.records():
            found = os.stat(self.out / paths.RECORDS / name)
            stamp = (found.st_mtime_ns, found.st_ino)
            if self.committed.setdefault(name, stamp) != stamp:
                self.violation(f"{name} was committed twice")
        if gone := set(self.committed) - set(self.records()):
            self.violation(f"{sorted(gone)} had been committed and are gone")
        self.report.violations += judgement.damage(self.out, "quick")


def chaos(settings: Settings, directory: Path, say: Callable[[str], None]) -> Report:
    """Stores until every fault was given."""
    report, started = Report(), time.monotonic()
    plan: list[Fault] = [fault for fault, n in settings.faults.items() for _ in range(n)]
    if "full" in plan and (why := smalldisk.may_mount(directory)):
        report.no_full_disk, plan = why, [fault for fault in plan if fault != "full"]
    random.Random(settings.seed).shuffle(plan)
    per_line = SMOLLM2_BYTES_PER_LINE if settings.states else TINY_BYTES_PER_LINE
    with ExitStack() as stack:
        disk = None
        if "full" in plan:
            size = 2 * settings.samples * per_line + (1 << 28)
            disk = stack.enter_context(smalldisk.SmallDisk(directory / "disk", size))
        while (plan or not report.rounds) and not report.violations:
            report.rounds += 1
            if report.rounds > MAX_ROUNDS:
                report.violations.append(f"{plan} never hit a run")
                break
            Extraction(settings, report, plan, directory / f"round-{report.rounds}", disk, say).run()
    report.seconds = time.monotonic() - started
    return report


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="tests.chaos.extraction", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=2000, help="lines of the input")
    parser.add_argument("--engine", choices=["sglang", "transformers"], default="sglang")
    parser.add_argument("--model", type=Path, help="of random weights, say; SmolLM2 when left out")
    parser.add_argument("--crashes", type=int, default=10, help="of engine processes")
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--terms", type=int, default=5)
    parser.add_argument("--full", type=int, default=3, help="how often the disk is filled")
    parser.add_argument("--shard-rows", type=int, default=2048)
    parser.add_argument("--longest", type=int, default=70, help="words of an answer")
    parser.add_argument("--engine-option", action="append", default=[])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="work in that directory and leave it, but for a small disk")
    parser.add_argument("--json", action="store_true", help="the report as JSON on stdout")
    options = parser.parse_args()
    if options.full and os.geteuid():
        smalldisk.enter_namespace(["tests.chaos.extraction", *sys.argv[1:]])
    if options.model is None:
        from tests.models import smollm2
    faults: dict[Fault, int] = {
        "crash": options.crashes if options.engine == "sglang" else 0,
        "kill": options.kills,
        "term": options.terms,
        "full": options.full,
    }
    settings = Settings(
        samples=options.samples,
        engine=options.engine,
        model=options.model or smollm2(),
        faults=faults,
        seed=options.seed,
        shard_rows=options.shard_rows,
        longest=options.longest,
        engine_options=tuple(options.engine_option),
        states=options.model is None,
    )
    with ExitStack() as stack:
        if options.keep:
            options.keep.mkdir()
        directory = options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hsstore-chaos-")))
        report = chaos(settings, directory.resolve(), lambda line: print(line, file=sys.stderr, flush=True))
    if options.json:
        print(json.dumps({name: getattr(report, name) for name in report.__slots__}))
    else:
        print("\n".join(report.lines()))
    return 1 if report.violations else 0


if __name__ == "__main__":
    sys.exit(main())
