"""What a plan says a program communicates, one value per collective.

`bytes` is always the size of the collective's result on one device, for one execution, because that
is what both a plan and compiled HLO state directly; `link_bytes` is what a device sends for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from attrs import field, frozen
from attrs.validators import in_

KINDS = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
    "send",
)
"""The collectives of XLA; `send` stands for a point-to-point pair that is no collective."""


def link_bytes(kind: str, result_bytes: float, group_size: int) -> float:
    """Return the bytes one device sends for one execution by a ring algorithm.

    With n = `group_size` and b = `result_bytes`: all-reduce 2b(n-1)/n, all-gather and all-to-all
    b(n-1)/n, reduce-scatter b(n-1) (its result is 1/n of what is reduced), the others b
    (Thakur, Rabenseifner and Gropp, Optimization of Collective Communication Operations, 2005).
    """
    n = group_size
    if kind == "all-reduce":
        return 2 * result_bytes * (n - 1) / n
    if kind in ("all-gather", "all-to-all", "ragged-all-to-all"):
        return result_bytes * (n - 1) / n
    if kind == "reduce-scatter":
        return result_bytes * (n - 1)
    return result_bytes if n > 1 else 0.0


def _sorted_names(axes: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(axes))


@frozen(kw_only=True)
class PlannedCollective:
    """One collective the plan asks for: over mesh `axes`, `bytes` per device, `trips` times a step.

    `trips` is the product of the lengths of the loops around it, None in a loop whose length is not
    known before it runs. `source` is the user's line ("model.py:17 (attention)"), `reason` says why
    it is there ("gradient of params/head"); both are only shown. `scope` is the `jax.named_scope`
    the collective is emitted in, if it has one of its own: among equals, the one whose scope the
    compiled op carries is taken.
    """

    kind: str = field(validator=in_(KINDS))
    axes: tuple[str, ...] = field(converter=_sorted_names)
    bytes: int = field()
    dtype: str
    trips: int | None = field(default=1)
    source: str = ""
    reason: str = ""
    scope: str = ""

    @bytes.validator
    def _non_negative(self, _: object, value: int) -> None:
        if value < 0:
            raise ValueError(f"PlannedCollective.bytes must be at least 0, got {value}")

    @trips.validator
    def _positive(self, _: object, value: int | None) -> None:
        if value is not None and value < 1:
            raise ValueError(f"PlannedCollective.trips must be at least 1 or None, got {value}")

    def link_bytes(self, axis_sizes: Mapping[str, int]) -> float:
        """Return the bytes one device sends for all executions; a loop of unknown length once."""
        group_size = 1
        for axis in self.axes:
            group_size *= axis_sizes[axis]
        return link_bytes(self.kind, self.bytes, group_size) * (self.trips or 1)
