"""What people write for amounts: '64GiB', '200MB/s', '5%', '7d', '3/10'. Raises `UsageError` for anything else."""

from __future__ import annotations

import re

from hsstore.errors import UsageError

_BYTES = {"": 1, "B": 1} | {
    prefix + unit: base**power
    for power, prefixes in enumerate(("kK", "M", "G", "T", "P"), start=1)
    for prefix in prefixes
    for unit, base in (("", 1000), ("B", 1000), ("iB", 1024))
}
_SECONDS = {"s": 1, "min": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_AMOUNT = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([A-Za-z]*)")


def n_bytes(text: str) -> int:
    """'64GiB' → 68719476736; k, M, G, T, P are decimal, with an i binary."""
    value = _amount(text, _BYTES, "an amount of bytes such as 500MB or 64GiB")
    if value < 1:
        raise UsageError(f"expected at least one byte, found {text!r}")
    return int(value)


def bytes_per_second(text: str) -> int:
    """'200MB/s' → 200000000; the '/s' may be left out."""
    try:
        return n_bytes(text.removesuffix("/s"))
    except UsageError:
        raise UsageError(f"expected a rate such as 200MB/s, found {text!r}") from None


def seconds(text: str) -> float:
    """'7d' → 604800.0; s, min, h, d, w."""
    return _amount(text, _SECONDS, "a time such as 90min, 12h, 7d or 2w")


def fraction(text: str) -> float:
    """'5%' → 0.05; more than 0, at most 100."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?%", text)
    value = float(match[1]) / 100 if match else 0.0
    if not 0 < value <= 1:
        raise UsageError(f"expected a percentage above 0% and up to 100%, such as 5%, found {text!r}")
    return value


def part(text: str) -> tuple[int, int]:
    """'3/10' → (3, 10); the first of n parts is 1/n."""
    match = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", text)
    n, total = (int(match[1]), int(match[2])) if match else (0, 0)
    if not 1 <= n <= total:
        raise UsageError(f"expected a part such as 1/7 to 7/7, found {text!r}")
    return n, total


def _amount(text: str, units: dict[str, int], expected: str) -> float:
    match = _AMOUNT.fullmatch(text)
    if match is None or match[2] not in units:
        raise UsageError(f"expected {expected}, found {text!r}")
    return float(match[1]) * units[match[2]]
