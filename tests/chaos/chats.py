"""A prompts file made of the words of this repository's own pages: chats of all spellings, and lines that are none."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
BAD_LINES = (
    "{",
    "",
    '["a list"]',
    '{"something": "else"}',
    '{"messages": []}',
    '{"messages": [{"role": "user", "content": "Nobody answers."}]}',
    '{"conversations": [{"from": "martian", "value": "Hello."}]}',
    '{"input_ids": [1, 2, 99999999], "loss_mask": [1, 1, 1]}',
)
"""Each is skipped, for a reason of its own."""


def words() -> list[str]:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    return " ".join(page.read_text() for page in pages).split()


def write_chats(path: Path, n_lines: int, *, seed: int, longest: int) -> list[int]:
    """Write that many lines, answers of up to `longest` words. Returns the numbers (from 0) of the bad ones."""
    rng, pool = random.Random(seed), words()
    bad = sorted(rng.sample(range(n_lines), max(1, n_lines // 80)))
    lines = [json.dumps(_chat(rng, pool, i, longest)) for i in range(n_lines)]
    for k, number in enumerate(bad):
        lines[number] = BAD_LINES[k % len(BAD_LINES)]
    path.write_text("\n".join(lines) + "\n")
    return bad


def _chat(rng: random.Random, pool: list[str], number: int, longest: int) -> dict[str, Any]:
    def some(least: int, most: int) -> str:
        start = rng.randrange(len(pool) - most)
        return " ".join(pool[start : start + rng.randint(least, most)])

    asked, answered = f"{number}: {some(2, max(3, longest // 4))}", some(4, longest)
    if number % 10 == 3:
        return {"text": f"{asked}\n{answered}"}
    if number % 10 == 6:
        return {"conversations": [{"from": "human", "value": asked}, {"from": "gpt", "value": answered}]}
    return {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]}
