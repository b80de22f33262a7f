"""Outputs that become inputs of the next step: the checks, and the sends that cross meshes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attrs import evolve

from alpa_interchange.schedule import Instruction, PipelineSchedule
from mesh_runtime.order import ScheduleOrder


def check_outputs(
    order: ScheduleOrder,
    outputs: Sequence[str],
    carry: Mapping[str, str],
    joined: Mapping[str, int],
    num_microbatches: int,
) -> None:
    """Refuse outputs and carried buffers that no mesh holds after a step."""
    remaining = {name for names in order.remaining for name in names}
    inputs = {name for names in order.inputs for name in names}
    for name in outputs:
        if name not in remaining:
            raise ValueError(
                f"output {name!r} is on no mesh after the step; it is never written, or it is freed"
            )
    for name in joined:
        parts = set(parts_of(name, num_microbatches))
        if not any(parts <= set(names) for names in order.remaining):
            raise ValueError(
                f"joined output {name!r}: no mesh holds {', '.join(sorted(parts))} after the step"
            )
    for source, target in carry.items():
        if source not in remaining:
            raise ValueError(
                f"carry: {source!r} (to become {target!r}) is on no mesh after the step; it is "
                "never written, or it is freed"
            )
        if target not in inputs:
            raise ValueError(
                f"carry: {target!r} (to be replaced by {source!r}) is an input of no mesh"
            )
    doubled = sorted({t for t in carry.values() if list(carry.values()).count(t) > 1})
    if doubled:
        raise ValueError(f"carry gives two outputs to the inputs {doubled}; each takes one")


def parts_of(name: str, num_microbatches: int) -> list[str]:
    """Return the buffers of a value of which every microbatch makes a part."""
    return [f"{name}@{k}" for k in range(num_microbatches)]


def with_carries(
    schedule: PipelineSchedule, order: ScheduleOrder, carry: Mapping[str, str]
) -> PipelineSchedule:
    """Return `schedule` with a send and receive, at its end, for each output needed elsewhere.

    An output that the mesh of its input already holds is only renamed and needs nothing.
    """
    added: list[list[Instruction]] = [[] for _ in schedule.programs]
    for source, target in carry.items():
        holder = next(mesh for mesh, names in enumerate(order.remaining) if source in names)
        for mesh, names in enumerate(order.inputs):
            if target in names and source not in order.remaining[mesh]:
                added[holder].append(Instruction(kind="send", inputs=(source,), peer=mesh))
                added[mesh].append(Instruction(kind="receive", outputs=(source,), peer=holder))
    if not any(added):
        return schedule
    programs = tuple(
        (*program, *extra) for program, extra in zip(schedule.programs, added, strict=True)
    )
    return evolve(schedule, programs=programs)
