"""Whatever a crash leaves of an operation opens, shows nothing wrong, has lost nothing, and is resumed to the same end.

Short form of `python -m tests.crash`: the same scenarios, fewer states of each.
"""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hsstore import durable, garbage
from tests.crash.engine import Trace, judge, record, without
from tests.crash.model import Disk
from tests.crash.scenarios import SCENARIOS

BY_NAME = {s.name: s for s in SCENARIOS}
BUDGET = 36
"""States of each scenario, the worst ones of every step first."""
KINDS = {"create", "mkdir", "link", "rename", "unlink", "rmdir", "data", "mode", "fsync", "ack"}


@functools.cache
def trace_of(name: str) -> Trace:
    return record(BY_NAME[name])


@pytest.mark.parametrize("name", BY_NAME)
def test_every_state_that_a_crash_may_leave_is_sound(name: str) -> None:
    trace = trace_of(name)
    verdict = judge(BY_NAME[name], trace, seed=1, per_point=4, budget=BUDGET)
    print(f"{name}: {len(trace.ops)} steps, {verdict.states} states, {len(verdict.violations)} violations")
    assert not verdict.violations, "\n".join(verdict.violations[:20])
    assert verdict.states >= min(BUDGET, len(trace.ops) // 3)


@pytest.mark.parametrize("name", BY_NAME)
def test_the_recorded_steps_give_the_directory_that_is_there(name: str) -> None:
    """A step that the recorder missed would be a step that no crash is tried at."""
    trace = trace_of(name)
    disk = Disk(trace.initial)
    for op in trace.ops:
        disk.apply(op)
    tree = disk.tree(range(len(disk.pending)), {n: f.current for n, f in disk.files.items()})
    assert {path: data for path, (_, data, _) in tree.items()} == trace.final


def test_every_kind_of_step_was_recorded() -> None:
    kinds: Counter[str] = Counter()
    for name in BY_NAME:
        kinds += trace_of(name).kinds()
    assert set(kinds) == KINDS, dict(kinds)


@pytest.mark.parametrize(
    ("function", "name"), [("fsync_dir", "commit"), ("fsync_file", "commit"), ("fsync_dir", "create")]
)
def test_a_protocol_without_its_fsyncs_is_found_out(monkeypatch: pytest.MonkeyPatch, function: str, name: str) -> None:
    """Else the states that are tried would be too tame to prove anything."""
    monkeypatch.setattr(durable, function, lambda _: None)
    trace = record(BY_NAME[name])
    monkeypatch.undo()
    verdict = judge(BY_NAME[name], trace, seed=1, per_point=6, budget=400, first=True)
    assert verdict.violations


def test_a_gc_that_takes_a_committed_attempt_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """These are the only files of a shard that is committed and not yet published: the record must keep them."""
    real = garbage._Search._winner
    # As if `_given_up` did not compare the attempt with the one that won.
    monkeypatch.setattr(garbage._Search, "_winner", lambda search, shard: real(search, shard) and "another")
    scenario = BY_NAME["gc"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scenario, "recover", lambda base: None)  # the run after it would stumble, before the judge does
        trace = record(scenario)
    monkeypatch.undo()
    assert judge(scenario, trace, seed=1, per_point=4, budget=BUDGET, first=True).violations


def test_a_repair_that_takes_the_old_file_away_first_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is still good of a damaged file can be read at every moment, from the old file or from the new one."""

    def first_unlinked(real: Callable[..., None]) -> Callable[..., None]:
        def rename(source: Any, target: Any, **options: Any) -> None:
            if "/c/" in str(target):
                Path(target).unlink(missing_ok=True)
            real(source, target, **options)

        return rename

    for name in ("rename", "replace"):
        monkeypatch.setattr(os, name, first_unlinked(getattr(os, name)))
    trace = record(BY_NAME["repair"])
    monkeypatch.undo()
    violations = judge(BY_NAME["repair"], trace, seed=1, per_point=4, budget=BUDGET).violations
    assert [v for v in violations if "was good before" in v]


def test_every_single_fsync_of_a_commit_carries_weight() -> None:
    """None of them is there for show, and leaving out one is enough to be found out."""
    trace, scenario = trace_of("commit"), BY_NAME["commit"]
    begin = next(i for i, op in enumerate(trace.ops) if op.kind == "create")
    end = max(i for i, op in enumerate(trace.ops) if op.kind == "fsync" and op.where == "s/records")
    syncs = [i for i, op in enumerate(trace.ops) if op.kind == "fsync"]
    numbers = [n for n, i in enumerate(syncs) if begin < i <= end]
    assert len(numbers) == 7, "four files, their directory, the record, its directory"
    for number in numbers:
        assert judge(scenario, without(trace, number), seed=1, per_point=8, budget=400, first=True).violations


def test_a_wrong_expectation_fails() -> None:
    """The judge counts what it was told to count."""
    scenario = type(BY_NAME["commit"])()
    scenario.committed = (0, 1)
    assert judge(scenario, trace_of("commit"), seed=1, per_point=1, budget=40, first=True).violations
    scenario.acks = (("shard", 1), ("shard", 2))
    with pytest.raises(AssertionError, match="acknowledged"):
        record(scenario)
