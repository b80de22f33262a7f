"""Accounts for every collective of a compiled program by collectives of its plan.

XLA may merge planned collectives, drop redundant ones or run one on less data. It may not add one,
change a kind, use other mesh axes or move more bytes. So each tensor of a compiled collective must
be paid for by planned collectives of its kind and axes, each of which can be spent once per
execution. Payment is sought in this order, from the strictest:

1. one planned collective of the same bytes, dtype and number of executions;
2. the same bytes and dtype, out of a loop of another length (unrolled, hoisted, length unknown);
3. several planned ones whose bytes add up (XLA's combiner);
4. all-reduces of the same bytes along axes that together are the compiled one's (folded);
5. the smallest planned one, or several, with at least as many bytes (less data than planned).

Taking the strictest first never makes a later payment impossible: an equal can always be exchanged.
What nothing pays for is unplanned.

One artefact is let pass: XLA's CPU backend sends bfloat16, and reduces 16-bit floats, as float32.
There, a float32 collective may be paid for by 16-bit ones of half its bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from attrs import define, field

from alpa_meta.audit.hlo import CompiledCollective
from alpa_meta.audit.planned import PlannedCollective
from alpa_meta.audit.replica_groups import axes_of_groups, axes_of_pairs
from alpa_meta.audit.report import AuditLine, AuditReport, Dropped

MAX_SUMS = 100_000
"""Partial sums tried to explain one merged collective before it counts as less data."""

_HALVES = ("bfloat16", "float16")


@define
class _Supply:
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


_Payment: TypeAlias = tuple[list[_Supply], str]
"""The planned collectives that pay for a demand, none if the rule finds none, and a note."""


@define
class _Demand:
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
        return _HALVES if self.narrow else (self.compiled_dtype,)


def account(
    planned: Iterable[PlannedCollective],
    compiled: Iterable[CompiledCollective],
    axis_sizes: Mapping[str, int],
    *,
    backend: str = "cpu",
) -> AuditReport:
    """Return the account of `compiled` by `planned` on a mesh of `axis_sizes` (row-major order).

    `backend` is the platform of the compiled program, "cpu" or "cuda".
    """
    planned = tuple(planned)
    unknown = {axis for one in planned for axis in one.axes} - set(axis_sizes)
    if unknown:
        raise ValueError(
            f"planned collectives name the mesh axes {sorted(unknown)}, but the mesh has "
            f"{sorted(axis_sizes)}; pass the logical mesh the plan was made for"
        )
    supplies = []
    for one in planned:
        long_axes = tuple(axis for axis in one.axes if axis_sizes[axis] > 1)
        if long_axes and one.bytes > 0:
            supplies.append(_Supply(one, long_axes, one.trips))
    moving = [(one, axes) for one in compiled if (axes := _axes(one, axis_sizes)) != ()]
    demands = [_demands(one, axes, backend) for one, axes in moving]
    _pay([demand for group in demands for demand in group], supplies)
    return AuditReport(
        axis_sizes=dict(axis_sizes),
        lines=tuple(
            _line(one, axes, group) for (one, axes), group in zip(moving, demands, strict=True)
        ),
        dropped=tuple(
            Dropped(planned=supply.planned, executions=supply.left)
            for supply in supplies
            if supply.left is not None and supply.left > 0
        ),
        planned=tuple(supply.planned for supply in supplies),
    )


def _axes(one: CompiledCollective, axis_sizes: Mapping[str, int]) -> tuple[str, ...] | None:
    if one.kind == "send":
        return None
    read = axes_of_pairs if one.kind == "collective-permute" else axes_of_groups
    return read(one.groups, axis_sizes)


def _demands(one: CompiledCollective, axes: tuple[str, ...] | None, backend: str) -> list[_Demand]:
    """Return what the tensors of a compiled collective ask for; nothing where no axes fit."""
    if axes is None:
        return []
    return [
        _Demand(
            kind=one.kind,
            axes=axes,
            compiled_bytes=part,
            compiled_dtype=dtype,
            trips=one.trips,
            op_name=one.op_name,
            widened=_widened(one, dtype, backend),
        )
        for part, dtype in zip(one.parts, one.dtypes, strict=True)
        if part > 0
    ]


def _pay(demands: Sequence[_Demand], supplies: Sequence[_Supply]) -> None:
    """Fill `paid` of every demand that can be paid, strictest rule first, largest demand first."""
    exact = (_equal, _equal_in_another_loop, _added_up, _folded)
    attempts = [(narrow, rule) for narrow in (False, True) for rule in exact]
    attempts += [(False, _with_less_data), (True, _with_less_data)]
    largest_first = sorted(demands, key=lambda demand: -demand.compiled_bytes)
    for narrow, rule in attempts:
        for demand in largest_first:
            if demand.paid or narrow not in demand.widened:
                continue
            demand.narrow = narrow
            usable = [supply for supply in supplies if supply.covers(demand.trips)]
            chosen, note = rule(demand, usable)
            for supply in chosen:
                supply.spend(demand.trips)
            demand.paid = [supply.planned for supply in chosen]
            if chosen and note:
                demand.notes.append(note)


def _widened(one: CompiledCollective, dtype: str, backend: str) -> tuple[bool, ...]:
    """Return the widths to try: False as compiled, True as 16-bit floats sent as float32."""
    if one.promoted:
        return (True,)
    return (False, True) if backend == "cpu" and dtype == "float32" else (False,)


def _payable(demand: _Demand, supplies: Sequence[_Supply]) -> list[_Supply]:
    """Return the supplies of the demand's kind, axes and dtype, the likeliest origin first."""
    fitting = [
        supply
        for supply in supplies
        if (supply.planned.kind, supply.axes) == (demand.kind, demand.axes)
        and supply.planned.dtype in demand.dtypes
    ]
    return sorted(fitting, key=lambda supply: not _came_from(demand, supply.planned))


def _came_from(demand: _Demand, planned: PlannedCollective) -> bool:
    """Return whether the compiled op carries the name scope the plan emitted its collective in."""
    return bool(planned.scope) and planned.scope in demand.op_name.split("/")


def _equal(demand: _Demand, supplies: Sequence[_Supply]) -> _Payment:
    for supply in _payable(demand, supplies):
        if (supply.planned.bytes, supply.planned.trips) == (demand.bytes, demand.trips):
            return [supply], ""
    return [], ""


def _equal_in_another_loop(demand: _Demand, supplies: Sequence[_Supply]) -> _Payment:
    for supply in _payable(demand, supplies):
        if supply.planned.bytes == demand.bytes:
            return [supply], _loop_note(supply.planned, demand)
    return [], ""


def _loop_note(planned: PlannedCollective, demand: _Demand) -> str:
    if demand.trips is None:
        return f"XLA does not know the loop's length; the plan says {planned.trips}"
    return f"runs {demand.trips} times where the plan says {planned.trips or 'an unknown number'}"


def _added_up(demand: _Demand, supplies: Sequence[_Supply]) -> _Payment:
    """Return planned collectives of equal trips whose bytes add up to the demand's."""
    payable = _payable(demand, supplies)
    same_loop = [supply for supply in payable if supply.planned.trips == demand.trips]
    reached: dict[int, list[_Supply]] = {0: []}
    for supply in same_loop:
        for total, chosen in list(reached.items()):
            longer = total + supply.planned.bytes
            if longer <= demand.bytes and longer not in reached:
                reached[longer] = [*chosen, supply]
        if demand.bytes in reached or len(reached) > MAX_SUMS:
            break
    return reached.get(demand.bytes, []), "merged"


def _folded(demand: _Demand, supplies: Sequence[_Supply]) -> _Payment:
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


def _with_less_data(demand: _Demand, supplies: Sequence[_Supply]) -> _Payment:
    """Return the smallest sufficient planned collective, else the largest ones that suffice."""
    fitting = [
        supply
        for supply in supplies
        if (supply.planned.kind, supply.axes) == (demand.kind, demand.axes)
        and (not demand.narrow or supply.planned.dtype in demand.dtypes)
    ]
    ascending = sorted(fitting, key=lambda supply: supply.planned.bytes)
    for supply in ascending:
        if supply.planned.bytes >= demand.bytes:
            return [supply], _less_note([supply], demand)
    chosen: list[_Supply] = []
    for supply in reversed(ascending):
        chosen.append(supply)
        if sum(one.planned.bytes for one in chosen) >= demand.bytes:
            return chosen, _less_note(chosen, demand)
    return [], ""


def _less_note(chosen: Sequence[_Supply], demand: _Demand) -> str:
    total = sum(supply.planned.bytes for supply in chosen)
    dtypes = {supply.planned.dtype for supply in chosen} - set(demand.dtypes)
    changed = f", as {'/'.join(demand.dtypes)} for {'/'.join(sorted(dtypes))}" if dtypes else ""
    return f"{demand.bytes} bytes where the plan says {total}{changed}"


def _line(
    one: CompiledCollective, axes: tuple[str, ...] | None, demands: Sequence[_Demand]
) -> AuditLine:
    paid = tuple(planned for demand in demands for planned in demand.paid)
    unpaid = sum(demand.compiled_bytes for demand in demands if not demand.paid)
    widened = bool(demands) and all(demand.narrow for demand in demands if demand.paid)
    notes = [note for demand in demands for note in demand.notes]
    if len(demands) > 1:
        notes.insert(0, f"merged {len(demands)}")
    if paid and widened:
        notes.append("16-bit floats sent as float32 by the CPU backend, counted at 16 bits")
    return AuditLine(
        compiled=one,
        axes=axes,
        planned=paid,
        unplanned_bytes=one.bytes if axes is None else unpaid,
        widened=bool(paid) and widened,
        notes=tuple(dict.fromkeys(notes)),
    )
