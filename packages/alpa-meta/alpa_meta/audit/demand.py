"""What compiled collectives ask for and planned ones supply: the two sides of an account."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TypeAlias

from attrs import define, field

from alpa_meta.audit.planned import PlannedCollective

HALVES = ("bfloat16", "float16", "int16")

_NAME = re.compile(r"[\w.\-]+")
_BUCKET = re.compile(r"[\w.\-]+(?:\+[\w.\-]+)+")


@define
class Supply:
    """A planned collective and how many executions are not spent, None in an endless loop."""

    planned: PlannedCollective
    axes: tuple[str, ...]
    left: int | None

    def covers(self, trips: int | None) -> bool:
        """Return whether `trips` executions can be spent; a loop XLA cannot count spends all."""
        if self.left is None:
            return True
        return self.left > 0 if trips is None else self.left >= trips

    def spend(self, trips: int | None) -> None:
        """Take `trips` executions."""
        if self.left is not None:
            self.left = 0 if trips is None else self.left - trips


Payment: TypeAlias = tuple[Sequence[Supply], str]
"""The planned collectives that pay for a demand, none if the rule finds none, and a note."""


@define
class Demand:
    """One tensor of a compiled collective; `widened` lists what it may be: as compiled, 16-bit."""

    kind: str
    axes: tuple[str, ...]
    compiled_bytes: int
    compiled_dtype: str
    trips: int | None
    op_name: str
    widened: tuple[bool, ...]
    narrow: bool = False
    paid: list[PlannedCollective] = field(factory=list)
    notes: list[str] = field(factory=list)

    @property
    def bytes(self) -> int:
        """Result bytes at the width the payment is sought for."""
        return self.compiled_bytes // 2 if self.narrow else self.compiled_bytes

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Dtypes the payment may have."""
        return HALVES if self.narrow else (self.compiled_dtype,)

    def names(self) -> tuple[str, ...]:
        """Return the name scopes the compiled op was emitted in."""
        return tuple(dict.fromkeys(_NAME.findall(self.op_name)))

    def buckets(self) -> tuple[frozenset[str], ...]:
        """Return the name scopes of each bucket in the compiled op: one tensor sent for several."""
        found = dict.fromkeys(_BUCKET.findall(self.op_name))
        return tuple(frozenset(bucket.split("+")) for bucket in found)

    def take(self, chosen: Sequence[Supply], note: str) -> None:
        """Spend what pays for the demand, if anything does, and note how."""
        for supply in chosen:
            supply.spend(self.trips)
        self.paid = [supply.planned for supply in chosen]
        if chosen and note:
            self.notes.append(note)


def payable(demand: Demand, supplies: Sequence[Supply]) -> list[Supply]:
    """Return the supplies of the demand's kind, axes and dtype, the likeliest origin first."""
    fitting = [
        supply
        for supply in supplies
        if (supply.planned.kind, supply.axes) == (demand.kind, demand.axes)
        and supply.planned.dtype in demand.dtypes
    ]
    names = set(demand.names())
    return sorted(fitting, key=lambda supply: supply.planned.scope not in names)


def folded(demand: Demand, supplies: Sequence[Supply]) -> Payment:
    """Return all-reduces of the demand's bytes along axes that partition the demand's axes."""
    if demand.kind != "all-reduce":
        return [], ""
    missing = set(demand.axes)
    chosen = []
    for supply in supplies:
        planned = supply.planned
        if (planned.kind, planned.bytes) != ("all-reduce", demand.bytes):
            continue
        if planned.dtype in demand.dtypes and set(supply.axes) <= missing:
            chosen.append(supply)
            missing -= set(supply.axes)
    return ([], "") if missing else (chosen, "folded from all-reduces along single axes")


def loop_note(planned: PlannedCollective, demand: Demand) -> str:
    """Return what to say where plan and program count a loop differently, else nothing."""
    if demand.trips == planned.trips:
        return ""
    if demand.trips is None:
        return f"XLA does not know the loop's length; the plan says {planned.trips}"
    return f"runs {demand.trips} times where the plan says {planned.trips or 'an unknown number'}"


def less_note(chosen: Sequence[Supply], demand: Demand) -> str:
    """Return what to say where the program sends less data than the plan."""
    total = sum(supply.planned.bytes for supply in chosen)
    dtypes = {supply.planned.dtype for supply in chosen} - set(demand.dtypes)
    changed = f", as {'/'.join(demand.dtypes)} for {'/'.join(sorted(dtypes))}" if dtypes else ""
    return f"{demand.bytes} bytes where the plan says {total}{changed}"
