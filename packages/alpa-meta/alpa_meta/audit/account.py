"""Accounts for every collective of a compiled program by collectives of its plan.

XLA may merge planned collectives, drop redundant ones or run one on less data. It may not add one,
change a kind, use other mesh axes or move more bytes. So each tensor of a compiled collective must
be paid for by planned collectives of its kind and axes, each of which can be spent once per
execution: by those it was emitted as (`by_name`), or, where the plan names none, by any that fit
(`by_size`). What nothing pays for is unplanned.

XLA's CUDA passes keep only some of the names of what they merge or reorder. There, what its names
do not pay for may be paid for by others of exactly its bytes, never by larger ones.

A planned all-reduce compiled to a reduce-scatter fails too, though it moves fewer bytes: a changed
kind is a changed program, and a plan that wants the scatter can say so.

One artefact is let pass: XLA's CPU backend sends bfloat16, and reduces 16-bit floats, as float32.
There, a float32 collective may be paid for by 16-bit ones of half its bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from alpa_meta.audit.by_name import deviation, pay_by_name
from alpa_meta.audit.by_size import pay_by_size
from alpa_meta.audit.demand import Demand, Supply
from alpa_meta.audit.hlo import CompiledCollective
from alpa_meta.audit.planned import PlannedCollective
from alpa_meta.audit.replica_groups import axes_of_groups, axes_of_pairs
from alpa_meta.audit.report import AuditLine, AuditReport, Dropped


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
            supplies.append(Supply(one, long_axes, one.trips))
    moving = [(one, axes) for one in compiled if (axes := _axes(one, axis_sizes)) != ()]
    demands = [_demands(one, axes, backend) for one, axes in moving]
    named = all(supply.planned.scope for supply in supplies)
    every = [demand for group in demands for demand in group]
    if named:
        pay_by_name(demands, supplies)
        if backend != "cpu":
            pay_by_size(every, supplies, less_data=False)
    else:
        pay_by_size(every, supplies)
    return AuditReport(
        axis_sizes=dict(axis_sizes),
        lines=tuple(
            _line(one, axes, group, supplies if named else None)
            for (one, axes), group in zip(moving, demands, strict=True)
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


def _demands(one: CompiledCollective, axes: tuple[str, ...] | None, backend: str) -> list[Demand]:
    """Return what the tensors of a compiled collective ask for; nothing where no axes fit."""
    if axes is None:
        return []
    return [
        Demand(
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


def _widened(one: CompiledCollective, dtype: str, backend: str) -> tuple[bool, ...]:
    """Return the widths to try: False as compiled, True as 16-bit floats sent as float32."""
    if one.promoted:  # what is merged into it may have been float32 before
        return (True,) if len(one.parts) == 1 else (True, False)
    return (False, True) if backend == "cpu" and dtype == "float32" else (False,)


def _line(
    one: CompiledCollective,
    axes: tuple[str, ...] | None,
    demands: Sequence[Demand],
    named: Sequence[Supply] | None,
) -> AuditLine:
    paid = tuple(planned for demand in demands for planned in demand.paid)
    unpaid = [demand for demand in demands if not demand.paid]
    widened = sum(demand.compiled_bytes for demand in demands if demand.paid and demand.narrow)
    notes = [note for demand in demands for note in demand.notes]
    if len(demands) > 1:
        notes.insert(0, f"merged {len(demands)}")
    if widened:
        notes.append("16-bit floats sent as float32 by the CPU backend, counted at 16 bits")
    wrong = [] if named is None else [deviation(demand, named) for demand in unpaid]
    return AuditLine(
        compiled=one,
        axes=axes,
        planned=paid,
        unplanned_bytes=one.bytes if axes is None else sum(d.compiled_bytes for d in unpaid),
        widened=widened / one.bytes if widened else 0.0,
        notes=tuple(dict.fromkeys(notes)),
        deviation="; ".join(dict.fromkeys(wrong)),
    )
