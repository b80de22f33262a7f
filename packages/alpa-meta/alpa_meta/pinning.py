"""User pins: input shardings that the planner must keep."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from alpa_interchange import LogicalMesh, ShardingSpec
from alpa_meta.errors import PlanError
from alpa_meta.program import Program


def pinned_inputs(
    program: Program, mesh: LogicalMesh, pins: Mapping[str, Any]
) -> dict[Any, ShardingSpec]:
    """Return {input variable: spec} for pins on paths; axes that the mesh lacks are dropped.

    A pin is a PartitionSpec or a tuple with one entry per dim: None, an axis name, or axis names.
    """
    by_path = {
        leaf.path: (var, leaf)
        for var, leaf in zip(program.jaxpr.invars, program.inputs, strict=True)
    }
    specs = {}
    for path, pin in pins.items():
        if path not in by_path:
            close = [name for name in by_path if path.strip("'[]") in name][:5]
            raise PlanError(
                f"Options.pins names {path!r}, which is no input of the step"
                + (f"; did you mean {close}?" if close else "")
            )
        var, leaf = by_path[path]
        specs[var] = _spec(path, pin, tuple(leaf.aval.shape), mesh)
    return specs


def _spec(path: str, pin: Any, shape: tuple[int, ...], mesh: LogicalMesh) -> ShardingSpec:
    entries = [*pin, *[None] * (len(shape) - len(tuple(pin)))]
    if len(entries) != len(shape):
        raise PlanError(f"the pin of {path!r} has {len(entries)} dims, the input has {len(shape)}")
    dims = []
    for dim, (entry, size) in enumerate(zip(entries, shape, strict=True)):
        names = () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
        axes = tuple(name for name in names if name in mesh.axis_names)
        if size % mesh.size(axes):
            raise PlanError(
                f"the pin of {path!r} shards dim {dim} of size {size} over {axes}, whose "
                f"{mesh.size(axes)} devices do not divide it"
            )
        dims.append(axes)
    return ShardingSpec(tuple(dims))
