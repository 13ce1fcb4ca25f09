"""Numbers with their nouns."""

from __future__ import annotations

from hsstore.console import human_count


def counted(n: int, noun: str) -> str:
    """1, "token" → '1 token'; 2000 → '2,000 tokens'."""
    return f"{human_count(n)} {noun}{'' if n == 1 else 's'}"
