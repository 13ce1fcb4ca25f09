"""What a check of states reports.

Kinds of damage, stable: `model` sizes, `weights`, `config`, `tokenizer` digests or numbers of another one, `norm` side
of the final norm, `layer` another layer's states, `shift` rows moved, `sample` rows of another sample, `rows` zeros or
nothing known, `scale` all rows times a number, `agreement` the head does not predict the next token, `statistics` not
as recorded, `finite` NaN or Inf, `ids` outside the vocabulary, `read` rows that cannot be read. Of notes: `skipped`,
`undecided`, `template`, `digest`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from hsstore.findings import printable

_SHOWN = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    severity: Literal["damage", "note"]
    """`damage`: the states must not be trained on. `note`: something to know, such as a check that was not made."""
    kind: str
    states: tuple[str, ...]
    """Which states it is about; () for all, or none in particular."""
    detail: str
    """What was expected and what was found."""
    samples: tuple[int, ...] = ()
    """source_index of the samples that show it; () for all that were checked."""

    def __str__(self) -> str:
        states = f"{', '.join(self.states)}: " if self.states else ""
        shown = ", ".join(str(i) for i in self.samples[:_SHOWN])
        more = f" and {len(self.samples) - _SHOWN} more" if len(self.samples) > _SHOWN else ""
        where = f"; samples {shown}{more}" if self.samples else ""
        return f"{self.severity}: {self.kind}: {states}{self.detail}{where}"


def damage(kind: str, detail: str, *states: str, samples: tuple[int, ...] = ()) -> Finding:
    return Finding(severity="damage", kind=kind, states=states, detail=printable(detail), samples=samples)


def note(kind: str, detail: str, *states: str, samples: tuple[int, ...] = ()) -> Finding:
    return Finding(severity="note", kind=kind, states=states, detail=printable(detail), samples=samples)


def merged(findings: list[Finding]) -> list[Finding]:
    """The same said of several states or samples, said once; damage first."""
    found: dict[tuple[str, str, str], Finding] = {}
    for one in findings:
        key = (one.severity, one.kind, one.detail)
        old = found.setdefault(key, one)
        if old is not one:
            states = tuple(dict.fromkeys((*old.states, *one.states)))
            everywhere = not old.samples or not one.samples
            samples = () if everywhere else tuple(sorted({*old.samples, *one.samples}))
            found[key] = replace(old, states=states, samples=samples)
    return sorted(found.values(), key=lambda f: f.severity)
