"""What enters a mesh: which inputs go where, and in which layout each value arrives."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from alpa_interchange.schedule import PipelineSchedule
from mesh_runtime.order import ScheduleOrder, describe, value_name
from mesh_runtime.runtime import StepError


def complete_layouts(
    schedule: PipelineSchedule,
    order: ScheduleOrder,
    layouts: Sequence[Mapping[str, Any]],
    carry: Mapping[str, str],
) -> list[dict[str, Any]]:
    """Return `layouts` (per mesh, by value) where a carried value takes the layout of its input.

    Refuses a schedule with an input or received value whose layout is unknown.
    """
    complete: list[dict[str, Any]] = [dict(mapping) for mapping in layouts]
    for mesh, known in enumerate(complete):
        for source, target in carry.items():
            if target in order.inputs[mesh] and value_name(target) in known:
                known.setdefault(value_name(source), known[value_name(target)])
    for mesh, program in enumerate(schedule.programs):
        for name in order.inputs[mesh]:
            if value_name(name) not in complete[mesh]:
                raise ValueError(f"input {name!r} of mesh {mesh} has no entry in shardings[{mesh}]")
        for position, instruction in enumerate(program):
            for name in instruction.outputs if instruction.kind == "receive" else ():
                if value_name(name) not in complete[mesh]:
                    raise ValueError(
                        f"{describe(mesh, position, instruction)}: {value_name(name)!r} has no "
                        f"entry in shardings[{mesh}], so its layout there is unknown"
                    )
    return complete


def layout_on(
    index: int, mesh: Mesh, value: str, spec: NamedSharding | PartitionSpec
) -> NamedSharding:
    """Return the layout of `value` on mesh number `index`; refuse devices outside it."""
    if isinstance(spec, PartitionSpec):
        return NamedSharding(mesh, spec)
    if not isinstance(spec, NamedSharding):
        raise TypeError(
            f"shardings[{index}][{value!r}] must be a NamedSharding or PartitionSpec, got {spec!r}"
        )
    if not isinstance(spec.mesh, Mesh):
        return NamedSharding(mesh, spec.spec)
    inside = set(mesh.devices.flat)
    if not spec.device_set <= inside:
        raise ValueError(
            f"shardings[{index}][{value!r}] covers {len(spec.device_set)} devices, of which "
            f"{len(spec.device_set - inside)} are not among the {len(inside)} devices of mesh "
            f"{index}"
        )
    return spec


def destinations(order: ScheduleOrder, names: Iterable[str], verb: str) -> list[tuple[int, str]]:
    """Return (mesh, name) for every mesh that has `name` as an input, for a step also one that is
    given whole; refuse unknown names."""
    found = []
    for name in names:
        meshes = order.reading(name) if verb == "step" else order.readers.get(name, ())
        if not meshes:
            known = sorted(order.readers)
            raise ValueError(
                f"{verb}: {name!r} is an input of no mesh; the schedule's inputs are "
                f"{listing(known)}"
            )
        found += [(mesh, name) for mesh in meshes]
    return found


def rows_of_part(name: str, num_rows: int, count: int) -> int:
    """Return the rows of a microbatch of a value that is given whole."""
    if num_rows % count:
        raise ValueError(
            f"{name!r} has {num_rows} rows, which {count} microbatches cannot share evenly; give "
            "as many rows as the schedule was made for"
        )
    return num_rows // count


def apart(order: ScheduleOrder, batch: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return `batch` with the values given whole ("x") cut into their microbatches ("x@0", ...)."""
    made: dict[str, Any] = {}
    for name, value in batch.items():
        names = order.microbatches.get(name)
        if names is None:
            made[name] = value
        elif len(names) == 1:
            made[names[0]] = value
        else:
            rows = rows_of_part(name, value.shape[0], len(names))
            made.update((part, value[k * rows : (k + 1) * rows]) for k, part in enumerate(names))
    return made


def check_present(mesh: int, wanted: Iterable[str], held: Iterable[str]) -> None:
    """Refuse a step on `mesh` that lacks an input."""
    there = set(held)
    missing = [name for name in wanted if name not in there]
    if missing:
        raise StepError(
            f"mesh {mesh} reads {listing(missing)} before anything writes it; give it to put() "
            "(state) or step() (batch). A state buffer that the schedule frees or donates needs an "
            "entry in `carry` to survive the step"
        )


def listing(names: Sequence[str], limit: int = 12) -> str:
    """Return names for a message, shortened past `limit`."""
    shown = ", ".join(repr(name) for name in names[:limit]) or "nothing"
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
