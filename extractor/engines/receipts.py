"""From a job to what an engine is asked, and from the hooks' receipt to the job's ticket: the same for every SGLang.

Leaves how both travel to `sglang` (a process of one's own) and `http` (servers).
"""

from __future__ import annotations

from collections.abc import Sequence

from extractor.engines.base import Job, Ticket
from extractor.sglang_plugin.protocol import FINAL, Receipt


def columns_of(points: Sequence[int]) -> dict[str, int]:
    """Where each state lies among those that SGLang captures after the `points`' layers."""
    return {f"after_{k}": column for column, k in enumerate(points)} | {"final": FINAL}


def refusal(job: Job, longest_tokens: int) -> str:
    """Why a job must not be sent, "" when it may; ids outside the vocabulary are refused by the hooks."""
    n_tokens = len(job.input_ids)
    if n_tokens == 0:
        return "the sample is empty"
    if n_tokens > longest_tokens:
        return f"{n_tokens} tokens are more than the engine's longest prompt, {longest_tokens}"
    return ""


def failed_ticket(job: Job, reason: str, *, retry: bool = True) -> Ticket:
    return Ticket(source_index=job.source_index, n_rows=0, crc32c={}, error=reason, retry=retry)


def good_ticket(job: Job, receipt: Receipt, *, confirmed: bool) -> Ticket:
    """Of a receipt without error whose rows have arrived; `confirmed` when they were read back from the files."""
    assert receipt.n_rows == len(job.input_ids)
    return Ticket(source_index=job.source_index, n_rows=receipt.n_rows, crc32c=receipt.crc32c, confirmed=confirmed)
