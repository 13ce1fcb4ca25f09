"""The freeze audit: which parameters a drafter has, which of them are trained, and where each came from.

Responsible for: the table, the check before the first step that exactly the expected parameters are trained, and the
check after it that trained ones moved and frozen ones did not, bit for bit. A drafter with the wrong part frozen trains
without an error and accepts less; this is where it stops instead. Leaves rendering of JSON to `audit_cli`.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from hsstore.errors import ConflictError
from trainer.drafter import DrafterOptions
from trainer.verifier import VerifierPlaces

if TYPE_CHECKING:
    from rich.table import Table

# Component by the start of a parameter's name; the first that fits counts, and each is one row of the table.
COMPONENTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("embed_tokens", ("embed_tokens.",)),
    ("verifier_lm_head", ("verifier_lm_head.",)),
    ("verifier_norm", ("verifier_norm.",)),
    ("lm_head", ("lm_head.",)),
    ("fc", ("fc.",)),
    ("input norm", ("input_norm.", "fc_norm.")),
    ("decoder layer", ("layers.0.self_attn.", "layers.0.mlp.")),
    ("decoder layer norms", ("layers.0.",)),
    ("final norm", ("norm.",)),
)
FROZEN = frozenset(("embed_tokens", "verifier_lm_head", "verifier_norm"))
FRESH = "fresh, from the seed"

Expectations = Mapping[str, bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditRow:
    """One component."""

    component: str
    parameters: int
    trained: bool
    source: str
    """Where its weights came from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditReport:
    rows: tuple[AuditRow, ...]
    problems: tuple[str, ...]
    """One sentence per parameter that is wrongly frozen or trained; empty when all is as expected."""

    @property
    def total(self) -> int:
        return sum(row.parameters for row in self.rows)

    @property
    def trained(self) -> int:
        return sum(row.parameters for row in self.rows if row.trained)

    def row(self, component: str) -> AuditRow:
        return next(row for row in self.rows if row.component == component)

    def as_json(self) -> dict[str, object]:
        return {
            "total": self.total,
            "trained": self.trained,
            "frozen": self.total - self.trained,
            "components": [dataclasses.asdict(row) for row in self.rows],
            "problems": list(self.problems),
        }

    def table(self) -> Table:
        """The audit for people."""
        from rich.table import Table

        table = Table(title="freeze audit", title_justify="left")
        table.add_column("component")
        table.add_column("parameters", justify="right")
        table.add_column("")
        table.add_column("weights from")
        for row in self.rows:
            table.add_row(row.component, f"{row.parameters:,}", _state(row.trained), row.source)
        table.add_section()
        table.add_row("trained", f"{self.trained:,}", "", "")
        table.add_row("all", f"{self.total:,}", "", "")
        return table

    def lines(self) -> list[str]:
        """The audit for a log: one line per component."""
        width = max(len(row.component) for row in self.rows)
        lines = [
            f"{row.component:<{width}}  {row.parameters:>15,}  {_state(row.trained):<7}  {row.source}"
            for row in self.rows
        ]
        return [*lines, f"{'trained':<{width}}  {self.trained:>15,}", f"{'all':<{width}}  {self.total:>15,}"]


def expectations(options: DrafterOptions) -> dict[str, bool]:
    """Component → whether it is to be trained."""
    expected = {name: name not in FROZEN for name, _ in COMPONENTS}
    expected["lm_head"] = options.train_lm_head
    return expected


def sources(places: VerifierPlaces | None, where: str = "") -> dict[str, str]:
    """Component → where its weights came from; without places only the verifier's config is known."""
    if places is None:
        parts = dict.fromkeys(("embed_tokens", "verifier_lm_head", "verifier_norm", "lm_head"), f"verifier ({where})")
        return {**parts, "lm_head": f"starts as the verifier's rows ({where})"}
    rows = "rows of " if not places.tied else "rows of the tied "
    return {
        "embed_tokens": str(places.embed),
        "verifier_lm_head": f"{rows}{places.lm_head}",
        "verifier_norm": str(places.norm),
        "lm_head": f"starts as {rows}{places.lm_head}",
    }


def audit(model: torch.nn.Module, expected: Expectations, weights_from: Mapping[str, str] | None = None) -> AuditReport:
    """Count a drafter's parameters by component; works on the meta device and on a model wrapped by DDP."""
    counts: dict[str, int] = {}
    trained: dict[str, bool] = {}
    for name, parameter in _named(model):
        component = component_of(name)
        counts[component] = counts.get(component, 0) + parameter.numel()
        trained[component] = trained.get(component, False) or parameter.requires_grad
    weights_from = weights_from or {}
    rows = tuple(
        AuditRow(
            component=component,
            parameters=counts[component],
            trained=trained[component],
            source=weights_from.get(component, FRESH if component not in FROZEN else "verifier"),
        )
        for component in [name for name, _ in COMPONENTS if name in counts]
    )
    return AuditReport(rows=rows, problems=tuple(_problems(model, expected)))


def component_of(name: str) -> str:
    """Component of a parameter name. A parameter no component claims must not train unseen."""
    for component, starts in COMPONENTS:
        if name.startswith(starts):
            return component
    raise ConflictError(f"parameter {name!r} belongs to no known part of a drafter")


def check_before_step(model: torch.nn.Module, expected: Expectations) -> None:
    """Raise `ConflictError` naming the parameters that are wrongly frozen or trained, or that nobody loaded."""
    problems = [*_problems(model, expected), *_not_finite(model, "was never loaded: it holds NaN or infinity")]
    if problems:
        raise ConflictError(f"freeze audit: {'; '.join(problems)}")


class FrozenSnapshot:
    """Digests of all parameters before the first step, to see after it what moved.

    Digests and not copies: 2.6 G parameters would be 7.6 GB per rank; hashing them once takes some seconds.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._digests = {name: _digest(parameter) for name, parameter in _named(model)}

    def check_after_first_step(self, model: torch.nn.Module) -> None:
        """Raise `ConflictError` naming each frozen parameter that moved, trained one that did not, or one with NaN.

        For a step that had trained rows and a learning rate above zero; without them nothing is to move.
        """
        problems = list(_not_finite(model, "holds NaN or infinity after the first step"))
        for name, parameter in _named(model):
            moved = _digest(parameter) != self._digests[name]
            if parameter.requires_grad and not moved:
                problems.append(f"{name} is trained but did not move in the first step")
            elif moved and not parameter.requires_grad:
                problems.append(f"{name} is frozen but moved in the first step")
        if problems:
            raise ConflictError(f"freeze audit: {'; '.join(problems)}")


def _problems(model: torch.nn.Module, expected: Expectations) -> Sequence[str]:
    problems = []
    for name, parameter in _named(model):
        want = expected[component_of(name)]
        if parameter.requires_grad != want:
            problems.append(f"{name} is {_state(parameter.requires_grad)}, expected {_state(want)}")
    return problems


def _not_finite(model: torch.nn.Module, complaint: str) -> Sequence[str]:
    return [f"{name} {complaint}" for name, parameter in _named(model) if not bool(parameter.isfinite().all())]


def _named(model: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    """Parameters by the name they have without DDP's wrapper."""
    return [(name.removeprefix("module."), parameter) for name, parameter in model.named_parameters()]


def _digest(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy().data).digest()


def _state(trained: bool) -> str:
    return "trained" if trained else "frozen"
