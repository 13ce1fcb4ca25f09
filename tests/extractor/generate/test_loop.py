"""Scheduling: every line has one outcome, whatever the engine does."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from extractor.chat import ChatTokenizer
from extractor.generate.conversation import script_of
from extractor.generate.dialogue import Rules, Written
from extractor.generate.loop import Loop
from extractor.generate.scan import Line
from extractor.generate.settings import Sampling
from extractor.generate.sources.base import Ask, Reply, SourceInfo
from extractor.report import Failure
from extractor.supervise import Breaker
from hsstore.errors import IncompleteError

N_LINES = 40


class FakeSource:
    """Answers with the last question in capitals; dies when it is told so."""

    def __init__(self, *, group: int = 0, in_flight: int = 6) -> None:
        self.info = SourceInfo(engine="fake", version="1", compute_dtype="", context_tokens=400, flags={})
        self.group, self.in_flight = group, in_flight
        self.kills: Callable[[list[Ask]], bool] = lambda _asks: False
        self.reply: Callable[[Ask], Reply] = capitals
        self.asks: list[Ask] = []
        self.most = self.restarts = 0
        self.batches: list[list[int]] = []

    def submit(self, ask: Ask) -> None:
        self.asks.append(ask)
        self.most = max(self.most, len(self.asks))

    def collect(self, on_tokens: Callable[[int], None]) -> list[Reply]:
        assert self.asks
        if self.kills(self.asks):
            self.asks = []
            raise IncompleteError("the engine ended")
        taken, self.asks = (self.asks, []) if self.group else (self.asks[-1:], self.asks[:-1])
        self.batches.append([ask.line for ask in taken])
        return [self.reply(ask) for ask in taken]

    def restart(self) -> None:
        self.restarts += 1

    def close(self) -> None: ...


def capitals(ask: Ask) -> Reply:
    text = ask.messages[-1]["content"].upper()
    return Reply(
        key=ask.key, text=text, finish_reason="stop", prompt_tokens=len(ask.prompt_ids), completion_tokens=len(text)
    )


def lines(n: int = N_LINES) -> list[Line]:
    out = []
    for number in range(1, n + 1):
        turns = [{"role": "user", "content": f"q{number}.{turn}"} for turn in range(1 + number % 3)]
        document: dict[str, Any] = {"messages": turns, "id": f"id-{number}"}
        out.append(Line(number=number, document=document, script=script_of(document, "all")))
    return out


def run(
    source: FakeSource, chat: ChatTokenizer, *, done: frozenset[int] = frozenset(), limit: int = 8
) -> dict[int, Written | Failure]:
    sampling = Sampling(temperature=0, top_p=1, top_k=0, max_new_tokens=50, seed=0, stop=())
    rules = Rules(chat=chat, sampling=sampling, context_tokens=400, reasoning="separate", drop_truncated=False)
    loop = Loop(source, rules, Breaker(limit), sleep=lambda _s: None)
    outcomes: dict[int, Written | Failure] = {}
    for outcome in loop.run(lines(), done.__contains__):
        assert outcome.line not in outcomes
        outcomes[outcome.line] = outcome
    return outcomes


def assert_whole(outcomes: dict[int, Written | Failure], without: set[int] = frozenset()) -> None:  # type: ignore[assignment]
    assert sorted(outcomes) == list(range(1, N_LINES + 1))
    for number, outcome in outcomes.items():
        if number in without:
            assert isinstance(outcome, Failure)
            continue
        assert isinstance(outcome, Written)
        document = json.loads(outcome.data)
        assert document["id"] == f"id-{number}"
        spoken = [m["content"] for m in document["messages"]]
        assert spoken == [text for turn in range(1 + number % 3) for text in (f"q{number}.{turn}", f"Q{number}.{turn}")]


@pytest.mark.parametrize("group", [0, 7])
def test_every_line_is_answered_once_in_its_own_order(group: int, byte_chat: ChatTokenizer) -> None:
    source = FakeSource(group=group)
    assert_whole(run(source, byte_chat))
    assert source.most <= (group or source.in_flight)


def test_groups_are_the_same_after_a_resume(byte_chat: ChatTokenizer) -> None:
    """Answers depend a little on who is answered together, so a half-written group is answered whole again."""
    whole, rest = FakeSource(group=7), FakeSource(group=7)
    run(whole, byte_chat)
    done = frozenset({*range(1, 18), 30})
    outcomes = run(rest, byte_chat, done=done)
    assert set(outcomes) == set(range(1, N_LINES + 1)) - done
    assert rest.batches == [batch for batch in whole.batches if min(batch) > 14]


def test_a_dying_engine_costs_no_line(byte_chat: ChatTokenizer) -> None:
    """Now and then it dies with everything in flight: all of it is sent again to the next one."""
    source, calls = FakeSource(), 0

    def every_seventh(_asks: list[Ask]) -> bool:
        nonlocal calls
        calls += 1
        return calls % 7 == 0

    source.kills = every_seventh
    assert_whole(run(source, byte_chat))
    assert source.restarts > 3


def test_a_line_that_kills_engines_fails_alone(byte_chat: ChatTokenizer) -> None:
    """Its neighbours in flight are sent again, and only it is given up."""
    source = FakeSource()
    source.kills = lambda asks: any(ask.line == 11 for ask in asks)
    outcomes = run(source, byte_chat)
    assert_whole(outcomes, without={11})
    failure = outcomes[11]
    assert isinstance(failure, Failure)
    assert (failure.status, failure.reason) == ("failed", "engine_lost")
    assert source.restarts == 3


def test_errors_of_some_lines_are_listed_and_the_rest_goes_on(byte_chat: ChatTokenizer) -> None:
    source = FakeSource()
    bad = {5, 6, 20}
    source.reply = lambda ask: (
        Reply(key=ask.key, error="engine_error", detail="boom") if ask.line in bad else capitals(ask)
    )
    outcomes = run(source, byte_chat)
    assert_whole(outcomes, without=bad)
    assert all(outcomes[n].reason == "engine_error" for n in bad)  # type: ignore[union-attr]


def test_too_many_errors_in_a_row_end_the_run(byte_chat: ChatTokenizer) -> None:
    """An engine that fails on everything would turn a whole file into failures."""
    source, replies = FakeSource(), 0

    def broken_later(ask: Ask) -> Reply:
        nonlocal replies
        replies += 1
        return capitals(ask) if replies <= 10 else Reply(key=ask.key, error="engine_error", detail="boom")

    source.reply = broken_later
    with pytest.raises(IncompleteError, match="boom"):
        run(source, byte_chat, limit=5)
    assert replies == 15


def test_an_engine_that_does_not_come_back_ends_the_run(byte_chat: ChatTokenizer) -> None:
    source = FakeSource()
    source.kills = lambda _asks: True
    with pytest.raises(IncompleteError):
        run(source, byte_chat)


def test_a_history_that_grows_beyond_the_context_is_skipped(byte_chat: ChatTokenizer) -> None:
    """It is decided by the line itself, so it is no failure that a resume would try again."""
    source = FakeSource()
    source.reply = lambda ask: Reply(key=ask.key, text="x" * 390, finish_reason="stop", completion_tokens=390)
    outcomes = run(source, byte_chat)
    skipped = [o for o in outcomes.values() if isinstance(o, Failure)]
    assert {o.line for o in skipped} == {n for n in range(1, N_LINES + 1) if n % 3}
    assert {(o.status, o.reason) for o in skipped} == {("skipped", "prompt_too_long")}


def test_an_answer_stays_one_line_for_every_reader(byte_chat: ChatTokenizer) -> None:
    """Line ends of Unicode are legal inside JSON, but `str.splitlines` cuts there."""
    source = FakeSource()
    source.reply = lambda ask: Reply(key=ask.key, text="a\x85b\u2028c\u2029d\ne", finish_reason="stop")
    written = [o for o in run(source, byte_chat).values() if isinstance(o, Written)]
    assert written
    for outcome in written:
        (line,) = outcome.data.decode().splitlines()
        assert json.loads(line)["messages"][-1]["content"] == "a\x85b\u2028c\u2029d\ne"
