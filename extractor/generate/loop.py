"""The lines of the input through a source: how many at once, what is sent again, when to give up.

A line is open from its first question to its last answer. Where a source answers groups, a group is opened when the
one before it is closed; else as many lines are open as may be in flight. A lost engine is started again with back-off,
and what was on its way is sent again; what was on its way twice is sent alone, so that a line that kills engines is
found and fails alone. Leaves what a reply means to `dialogue`, the files to whoever takes the outcomes.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice

from extractor.generate.dialogue import Dialogue, Rules, Written
from extractor.generate.scan import Line
from extractor.generate.sources.base import Ask, OutOfPatienceError, Reply, Source
from extractor.report import Failure
from extractor.supervise import Breaker, wait_seconds
from hsstore.console import warn
from hsstore.errors import IncompleteError

_RESUME = (
    "every answer so far is kept: mend the engine, then run the same with --resume; if the lines are at fault, with a"
    " larger --max-consecutive-errors as well"
)
LOSSES_TOGETHER = 2
"""After so many lost engines a line is sent alone."""


class Loop:
    def __init__(
        self,
        source: Source,
        rules: Rules,
        breaker: Breaker,
        on_tokens: Callable[[int], None] = lambda _n: None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._source, self._rules, self._breaker = source, rules, breaker
        self._on_tokens, self._sleep = on_tokens, sleep
        self._open: dict[int, Dialogue] = {}
        self._waiting: deque[Ask] = deque()
        self._sent: dict[tuple[int, int], Ask] = {}
        self._losses: Counter[tuple[int, int]] = Counter()
        """By ask: engines lost while it was on its way."""
        self._restarts = 0
        self.tokens = 0
        """Of all answers so far."""

    def run(self, lines: Iterable[Line], is_done: Callable[[int], bool]) -> Iterator[Written | Failure]:
        """What has become of each line that is not done, as it comes.

        Raises `IncompleteError` when the breaker opens or the engine does not come back.
        """
        rest = self._lines(lines, is_done)
        while True:
            yield from self._admit(rest)
            if not self._open:
                return
            try:
                self._send()
                replies = self._source.collect(lambda n: self._on_tokens(self.tokens + n))
            except OutOfPatienceError:
                raise
            except IncompleteError as error:
                yield from self._recover(error)
                continue
            for reply in replies:
                yield from self._settle(reply)

    def _lines(self, lines: Iterable[Line], is_done: Callable[[int], bool]) -> Iterator[list[Dialogue]]:
        """The lines to open together: one, or a group of which at least one is not done."""
        size = self._source.group
        if not size:
            yield from ([Dialogue(line, self._rules)] for line in lines if not is_done(line.number))
            return
        every = iter(lines)
        while group := list(islice(every, size)):
            again = [is_done(line.number) for line in group]
            if not all(again):
                yield [Dialogue(line, self._rules, again=a) for line, a in zip(group, again, strict=True)]

    def _admit(self, rest: Iterator[list[Dialogue]]) -> Iterator[Written | Failure]:
        """Open lines while there is room for them."""
        while self._has_room():
            opened = next(rest, None)
            if opened is None:
                return
            for dialogue in opened:
                self._open[dialogue.number] = dialogue
            for dialogue in opened:
                yield from self._go_on(dialogue)

    def _has_room(self) -> bool:
        return not self._open if self._source.group else len(self._open) < self._source.in_flight

    def _go_on(self, dialogue: Dialogue) -> Iterator[Written | Failure]:
        step = dialogue.next_ask()
        if isinstance(step, Ask):
            self._waiting.append(step)
        else:
            yield from self._close(dialogue, step)

    def _close(self, dialogue: Dialogue, outcome: Written | Failure) -> Iterator[Written | Failure]:
        del self._open[dialogue.number]
        if not dialogue.again:
            yield outcome

    def _send(self) -> None:
        """All that waits; one that is under suspicion goes alone, when nothing else is on its way."""
        for _ in range(len(self._waiting)):
            ask = self._waiting.popleft()
            alone = self._losses[ask.key] >= LOSSES_TOGETHER
            if alone and self._sent:
                self._waiting.append(ask)
                continue
            self._sent[ask.key] = ask
            self._source.submit(ask)
            if alone:
                return

    def _settle(self, reply: Reply) -> Iterator[Written | Failure]:
        if self._sent.pop(reply.key, None) is None:
            return  # of an ask that was given up
        self._losses.pop(reply.key, None)
        dialogue = self._open[reply.key[0]]
        self.tokens += reply.completion_tokens
        failure = dialogue.take(reply)
        if failure is not None:
            yield from self._close(dialogue, failure)
        if reply.error:  # behind the yield: the failure is on disk before the breaker ends the run
            self._bad(f"line {reply.key[0]}: {reply.error}, {reply.detail}")
        else:
            self._breaker.good()
            self._restarts = 0
        if failure is None:
            yield from self._go_on(dialogue)

    def _recover(self, error: IncompleteError) -> Iterator[Written | Failure]:
        """Start the engine again, and sort what was on its way: once more, alone, or given up."""
        lost, self._sent = list(self._sent.values()), {}
        warn(f"{error.message}; starting it again")
        guilty = lost[0] if len(lost) == 1 and self._losses[lost[0].key] >= LOSSES_TOGETHER else None
        for ask in lost:
            self._losses[ask.key] += 1
        if guilty is not None:
            detail = f"{self._losses[guilty.key]} engines were lost on it, the last time it was alone: {error.message}"
            failed = Reply(key=guilty.key, error="engine_lost", detail=detail)
            dialogue = self._open[guilty.line]
            failure = dialogue.take(failed)
            assert failure is not None
            yield from self._close(dialogue, failure)
        self._waiting.extendleft(ask for ask in reversed(lost) if ask is not guilty)
        self._restart(error)

    def _bad(self, reason: str) -> None:
        try:
            self._breaker.bad(reason)
        except IncompleteError as error:
            raise IncompleteError(error.message, hint=_RESUME) from None

    def _restart(self, error: IncompleteError) -> None:
        while True:
            self._bad(error.message)
            self._restarts += 1
            self._sleep(wait_seconds(self._restarts))
            try:
                self._source.restart()
            except IncompleteError as again:
                error = again
                continue
            return
