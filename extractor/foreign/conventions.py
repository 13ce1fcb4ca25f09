"""What a layer id and the final state mean in each project, and what may be assumed where its files do not say.

A store knows `after_k` only: the residual stream after k decoder layers. Where each convention comes from stands in the
module of its format. A default is offered only where the project's own code has one way to make such files; where it
has several that leave no trace, the caller must say.

Letters: n decoder layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from extractor.foreign.sample import Norm
from hsstore.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Convention:
    name: str
    """As it stands in the command."""
    offset: int
    """k of `after_k` minus the id that the project's options and configs use."""
    default_ids: Callable[[int], list[int]]
    """Ids its code takes by itself, from n."""
    default_norms: tuple[Norm, ...]
    """Sides of the final norm under which those defaults hold."""
    norm: Norm | None
    """Side of the norm its code always stores; None: several ways exist, so a file or the caller must say."""
    writes: tuple[Norm, ...]
    """Sides that files of this format may hold, for an export."""

    def default_layers(self, n_layers: int, norm: Norm) -> list[int]:
        """k of each auxiliary state by the project's default. Raises `UsageError` where there is no safe one."""
        if norm not in self.default_norms:
            raise UsageError(
                f"{self.name} files with {norm}-norm states come from more than one program, with different layers",
                hint="name them: --layers for the k of after_k, or --layer-ids for the ids that were given there",
            )
        ks = [i + self.offset for i in self.default_ids(n_layers)]
        if sorted(set(ks)) != ks or ks[0] < 0 or ks[-1] >= n_layers:
            raise UsageError(
                f"the default layers of {self.name} for {n_layers} decoder layers are after {ks}: not ascending ones",
                hint="name them with --layers",
            )
        return ks


def _serving(n: int) -> list[int]:
    return [2, n // 2, n - 3]


def _zero_based(n: int) -> list[int]:
    return [1, n // 2 - 1, n - 4]


CONVENTIONS = {
    c.name: c
    for c in (
        Convention(
            name="specforge",
            offset=1,
            default_ids=_zero_based,
            default_norms=("post",),
            norm="post",
            writes=("post",),
        ),
        Convention(
            name="speculators",
            offset=0,
            default_ids=_serving,
            default_norms=("pre",),
            norm="pre",
            writes=("pre",),
        ),
        Convention(
            name="speculators-0.4",
            offset=1,
            default_ids=_serving,
            default_norms=("pre",),
            norm="pre",
            writes=("pre",),
        ),
        Convention(
            name="torchspec",
            offset=1,
            default_ids=_zero_based,
            default_norms=("post",),
            norm=None,
            writes=("post", "pre"),
        ),
        Convention(
            name="modelopt",
            offset=1,
            default_ids=_zero_based,
            default_norms=("post",),
            norm=None,
            writes=("post", "pre"),
        ),
    )
}
