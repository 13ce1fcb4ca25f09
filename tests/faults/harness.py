"""Runs a scenario once for every call to the operating system, each time with that call failing, and says what broke.

What must hold after every fault (`Harness.inject`): a clear error or none, no descriptor left open, nothing visible
that is not whole, nothing lost that was committed before, and the same command without the fault completes to the same
contents. Leaves to `scenarios` what is done, to `shim` how a call is made to fail.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import io
import os
import random
import shutil
import signal
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hsstore.cli import run
from hsstore.errors import HsstoreError, from_os_error
from tests.faults.shim import SHORT, Call, Fault, Shim

HANGS_SECONDS = 240

EXIT_CODES: dict[int, set[int]] = {
    errno.ENOSPC: {4},
    errno.EDQUOT: {4},
    errno.EROFS: {2},
    errno.EACCES: {2},
    errno.EPERM: {2},
    errno.EMFILE: {1},
    errno.EIO: {1, 3},
    errno.ENOMEM: {1},
    errno.EMLINK: {1},
    errno.ENOLCK: {1},
    errno.EINVAL: set(),  # advice: nothing may fail for it
}
"""What a command may leave with, by what the system answered (docs/errors.md)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How an act ended."""

    code: int
    message: str = ""
    output: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Something hsstore does in a directory of its own (the box)."""

    name: str
    prepare: Callable[[Path], None]
    """Builds the state before; once, without faults."""
    act: Callable[[Path], Outcome]
    """What is done under faults."""
    promise: Callable[[Path, Outcome], None]
    """Asserts what an act that reported success promised."""
    check: Callable[[Path, Outcome, Sequence[Call]], None]
    """Asserts what must hold after any act, given the calls that were made to fail."""
    finish: Callable[[Path], None]
    """What a user does next when the act failed, without faults."""
    state: Callable[[Path], object]
    """What must be the same at the end, whatever failed."""
    codes: Callable[[Fault, Call], set[int]] = lambda fault, _: EXIT_CODES[fault.code]
    """Exit codes that an act may have under a fault, beside 0."""
    may_pass: Callable[[Fault, Call], bool] = lambda fault, call: True
    """Whether an act may report success although that call failed."""


def _hangs(*_: object) -> None:
    raise AssertionError(f"still at it after {HANGS_SECONDS} s")


def called(act: Callable[[], object]) -> Outcome:
    """An act through Python, its error worded as the command line words it."""
    try:
        act()
    except HsstoreError as error:
        return Outcome(code=error.exit_code, message=error.message)
    except OSError as error:
        worded = from_os_error(error)
        return Outcome(code=worded.exit_code, message=worded.message)
    return Outcome(code=0)


def command(*arguments: str | Path) -> Outcome:
    """An act through the command line, in this process; a traceback or two errors fail at once."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run([str(a) for a in arguments])
    errors = [line for line in err.getvalue().splitlines() if line.startswith("hsstore: error: ")]
    assert "Traceback" not in err.getvalue() + out.getvalue()
    assert len(errors) == (code != 0), f"exit code {code}, {err.getvalue()!r}"
    message = errors[0].removeprefix("hsstore: error: ") if errors else ""
    return Outcome(code=code, message=message, output=out.getvalue())


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken:
    """A fault after which something did not hold."""

    scenario: str
    fault: Fault
    call: Call
    why: str

    def __str__(self) -> str:
        how = "from there on" if self.fault.lasting else "once"
        where = f"call {self.fault.at} {self.call.name}({self.call.path}) at {self.call.place}"
        return f"{self.scenario}: {self.fault.name} {how} at {where}:\n{self.why}"


@dataclass(slots=True)
class Tally:
    """What was injected; `broken` is what a run must leave empty."""

    injected: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    """By (scenario, kind of call, fault)."""
    outcomes: Counter[str] = field(default_factory=Counter)
    tolerated: Counter[str] = field(default_factory=Counter)
    """Places whose failure did not fail the act, by how often."""
    places: set[str] = field(default_factory=set)
    calls: Counter[str] = field(default_factory=Counter)
    broken: list[Broken] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        self.injected += other.injected
        self.outcomes += other.outcomes
        self.tolerated += other.tolerated
        self.places |= other.places
        self.calls += other.calls
        self.broken += other.broken


class Harness:
    """One scenario, its template of the state before and what a run without faults ends with."""

    def __init__(self, scenario: Scenario, directory: Path) -> None:
        self.scenario = scenario
        signal.signal(signal.SIGALRM, _hangs)
        self._template, self.box = directory / "template", directory / "box"
        self._template.mkdir(parents=True)
        scenario.prepare(self._template)
        self.calls = self._record()
        self.expected = self._state()
        self.tally = Tally()
        self.tally.calls[scenario.name] = len(self.calls)

    def _record(self) -> list[Call]:
        self._reset()
        with Shim(self.box) as shim:
            outcome = self.scenario.act(self.box)
        assert outcome.code == 0, f"{self.scenario.name} fails without a fault: {outcome.message}"
        self.scenario.promise(self.box, outcome)
        self.scenario.check(self.box, outcome, [])
        return shim.calls

    def _state(self) -> object:
        self.scenario.finish(self.box)
        return self.scenario.state(self.box)

    def _reset(self) -> None:
        shutil.rmtree(self.box, ignore_errors=True)
        copy_tree(self._template, self.box)

    def faults(self) -> list[Fault]:
        """Every call with every error that it may answer, once and from then on."""
        every = [Fault(at=c.number, code=code, lasting=lasting) for c in self.calls for code, lasting in modes(c)]
        assert every, f"{self.scenario.name} makes no calls"
        return every

    def sample(self, n: int, seed: int) -> list[Fault]:
        """At most `n` of the faults: each place in the code at least once as far as they reach, the rest drawn."""
        drawn = random.Random(f"{seed} {self.scenario.name}").sample(self.faults(), len(self.faults()))
        seen: set[tuple[str, str]] = set()
        first, rest = [], []
        for fault in drawn:
            at = (self.calls[fault.at].place, self.calls[fault.at].name)
            (rest if at in seen else first).append(fault)
            seen.add(at)
        return (first + rest)[:n]

    def inject(self, fault: Fault) -> None:
        """Run the act with that fault and add to the tally what did not hold."""
        self._reset()
        call = self.calls[fault.at]
        before = descriptors()
        signal.alarm(HANGS_SECONDS)
        try:
            with Shim(self.box, fault) as shim:
                outcome = self.scenario.act(self.box)
            self._judge(fault, call, outcome, shim.raised, before)
        except Exception:
            text = traceback.format_exc(limit=-6)
            self.tally.broken.append(Broken(scenario=self.scenario.name, fault=fault, call=call, why=text))
        finally:
            signal.alarm(0)

    def _judge(self, fault: Fault, call: Call, outcome: Outcome, raised: list[Call], before: Counter[str]) -> None:
        scenario = self.scenario
        assert raised, "the fault was not reached"
        assert (raised[0].kind, raised[0].number) == (call.kind, fault.at), f"met {raised[0]} first"
        self.tally.injected[scenario.name, call.kind, fault.name + ("+" if fault.lasting else "")] += 1
        self.tally.places.add(f"{call.place} {call.name}")
        leaked = descriptors() - before
        if leaked:
            gc.collect()  # what only an exception's frames held
            leaked = descriptors() - before
        assert not leaked, f"descriptors left open: {dict(leaked)}"
        if outcome.code:
            allowed = scenario.codes(fault, call)
            assert outcome.code in allowed, f"exit code {outcome.code}, expected {allowed}: {outcome.message}"
            assert outcome.message, "no message"
            assert "\n" not in outcome.message
            assert "Errno" not in outcome.message, outcome.message
        else:
            assert scenario.may_pass(fault, call), "reports success although that call failed"
            self.tally.tolerated[f"{call.name} {fault.name} at {call.place}"] += 1
            scenario.promise(self.box, outcome)
        self.tally.outcomes[f"{fault.name}: exit {outcome.code}"] += 1
        scenario.check(self.box, outcome, raised)
        scenario.finish(self.box)
        found = scenario.state(self.box)
        assert found == self.expected, f"ends as {found}, expected {self.expected}"


def modes(call: Call) -> Iterator[tuple[int, bool]]:
    for code in call.faults:
        yield code, False
        yield code, True


def descriptors() -> Counter[str]:
    """What the open descriptors of this process lead to."""
    found: Counter[str] = Counter()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            found[os.readlink(f"/proc/self/fd/{fd}")] += 1
    return Counter({k: v for k, v in found.items() if not k.startswith(("/proc/", "pipe:", "socket:", "anon_inode:"))})


def copy_tree(source: Path, target: Path) -> None:
    """`cp -a`: hard links stay links, times and modes stay."""
    links: dict[int, Path] = {}
    for directory, _, files in os.walk(source):
        here = target / Path(directory).relative_to(source)
        here.mkdir()
        for name in files:
            path = Path(directory) / name
            known = links.setdefault(path.stat().st_ino, here / name)
            if known == here / name:
                shutil.copy2(path, known)
            else:
                os.link(known, here / name)
    for directory, _, _ in os.walk(source, topdown=False):
        shutil.copystat(directory, target / Path(directory).relative_to(source))


def in_memory(otherwise: Path | None = None) -> Path | None:
    """Where files cost no disk: nothing here is about the disk."""
    memory = Path("/dev/shm")
    return memory if os.access(memory, os.W_OK) else otherwise


def run_all(harness: Harness, faults: Sequence[Fault]) -> Tally:
    for fault in faults:
        harness.inject(fault)
    return harness.tally


__all__ = ["SHORT", "Harness", "Outcome", "Scenario", "Tally", "called", "command", "in_memory", "run_all"]
