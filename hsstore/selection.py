"""Which samples and states of a store somebody means, from what was typed: ids, ranges, a list in a file, a split.

Responsible for refusing what is not there and naming what comes nearest. Leaves what is done with them to `subset`.

Letters: N samples.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hsstore.errors import NotFoundError, UsageError
from hsstore.index import Index, SplitName, members, usable
from hsstore.records import Split

_RANGE = re.compile(r"(\d{1,18})-(\d{1,18})")
_ID = re.compile(r"\d{1,18}(-\d{1,18})?|[0-9a-f]{8,32}")
_MAX_LIST_BYTES = 1 << 30

Rows = npt.NDArray[np.intp]


def layers_of(stored: Sequence[str], text: str) -> tuple[str, ...]:
    """`final,after_2` → the states named, in the store's order. Raises `UsageError` for one that it does not hold."""
    asked = [name.strip() for name in text.split(",") if name.strip()]
    for name in asked:
        if name not in stored:
            near = difflib.get_close_matches(name, stored, n=1, cutoff=0.3)
            hint = f"did you mean {near[0]!r}?" if near else ""
            raise UsageError(f"the store has no state {name!r}; it has {', '.join(stored)}", hint=hint)
    if not asked:
        raise UsageError(f"no state is named; the store has {', '.join(stored)}")
    return tuple(name for name in stored if name in asked)


def words_of(text: str) -> list[str]:
    """What --samples means: source indexes, ranges and uids after commas, or the lines of a file that has them."""
    words = [word.strip() for word in text.split(",")]
    if all(_ID.fullmatch(word) for word in words):
        return words
    path = Path(text)
    if not path.is_file():
        wrong = next(word for word in words if not _ID.fullmatch(word))
        raise UsageError(
            f"--samples {text}: {wrong!r} is no source index, no range like 0-99, no uid, and there is no such file"
        )
    if path.stat().st_size > _MAX_LIST_BYTES:
        raise UsageError(f"{path} is too long for a list of samples: more than {_MAX_LIST_BYTES >> 20} MiB")
    lines = path.read_bytes().decode("utf-8", "replace").splitlines()
    words = [word for line in lines for word in line.partition("#")[0].replace(",", " ").split()]
    for word in words:
        if not _ID.fullmatch(word):
            raise UsageError(f"{path} has {word[:40]!r}: expected a source index, a range like 0-99 or a uid")
    if not words:
        raise UsageError(f"{path} names no sample")
    return words


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """Samples of a store, as rows of its index."""

    rows: Rows
    """[n] ascending."""
    n_failed: int
    """Samples that were meant but have no states; they are not among the rows."""


def choose(
    index: Index, split: Split, *, words: Iterable[str] | None, side: SplitName = "all", limit: int | None = None
) -> Chosen:
    """The usable samples among the named ones (`None`: all) on that side of the split.

    Raises `UsageError` for a sample that the store does not have, and when nothing is left.
    """
    named = np.full(len(index), words is None)
    for word in words or ():
        named[_rows_of(index, word)] = True
    failed = int(np.count_nonzero(named & ~usable(index)))
    rows = members(index, split, side)
    rows = rows[named[rows]]
    if not len(rows):
        raise UsageError("no usable sample is left of what was selected", hint="list them with `hsstore ls`")
    return Chosen(rows=rows[:limit], n_failed=failed)


def _rows_of(index: Index, word: str) -> slice | int:
    """Rows of a range of source indexes, or of one sample."""
    if match := _RANGE.fullmatch(word):
        first, last = int(match[1]), int(match[2])
        start, stop = np.searchsorted(index.source_index, np.array([first, last + 1], np.uint64))
        if start >= stop:
            raise UsageError(f"the store has no sample in {word}{_nearest(index, first)}")
        return slice(int(start), int(stop))
    try:
        return index.find(word)
    except NotFoundError:
        near = _nearest(index, int(word)) if word.isdecimal() else ""
        raise UsageError(f"the store has no sample {word}{near}", hint="list them with `hsstore ls`") from None


def _nearest(index: Index, number: int) -> str:
    if not len(index):
        return ": it has none"
    at = int(np.searchsorted(index.source_index, np.uint64(number)))
    around = [int(index.source_index[i]) for i in (at - 1, at) if 0 <= i < len(index)]
    return f"; the nearest is {min(around, key=lambda i: abs(i - number))}"
