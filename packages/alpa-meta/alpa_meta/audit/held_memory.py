"""What the devices of a mesh hold over a step, by its schedule and its compiled programs.

A program's own audit knows its operands, results and temporaries. Between programs a mesh holds
what others wait for: what was kept for backward passes, keys and values of earlier token slices,
parts of gradients. At every instruction that runs a program it holds

    the buffers that are alive, results of the program among them, + its temporaries
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from attrs import frozen
from jax.sharding import Sharding

from alpa_interchange import Instruction
from alpa_meta.compat import dtype_of, shape_of
from alpa_meta.spmd.program import global_shape
from alpa_meta.types import DType

if TYPE_CHECKING:
    from alpa_meta.execution.compiled_task import CompiledTask
    from alpa_meta.execution.executable import Executable


@frozen
class HeldMemory:
    """The most bytes that a device of a mesh holds: of buffers alone, and with temporaries while
    the program `task` runs, which is when it is most."""

    buffer_bytes: float
    peak_bytes: float
    task: str


def held_memory(executable: Executable) -> tuple[HeldMemory, ...]:
    """Return what each mesh holds over a step that is compiled for devices of this process; the
    arrays of the batch are left out."""
    tasks, graph = executable.tasks, executable.planned.tasks.graph
    sizes = _sizes(tasks)
    batch = {leaf.path for leaf in executable.planned.program.inputs if leaf.role == "batch"}
    homes = [(n, home) for n, home in zip(graph.inputs, graph.home, strict=True) if n not in batch]
    return tuple(
        _held(instructions, {n: sizes[n] for n, home in homes if home == mesh}, sizes, tasks)
        for mesh, instructions in enumerate(executable.schedule.programs)
    )


def _held(
    instructions: Sequence[Instruction],
    live: dict[str, float],
    sizes: Mapping[str, float],
    tasks: Mapping[str, CompiledTask],
) -> HeldMemory:
    """Return what is held while these run; `live` are the bytes of what is there before."""
    buffers = peak = sum(live.values())
    fullest = ""
    for one in instructions:
        live.update({name: sizes[name.split("@")[0]] for name in one.outputs})
        if one.kind == "run":
            held = sum(live.values())
            buffers = max(buffers, held)
            analysis = tasks[one.task].compiled.memory_analysis()
            assert analysis is not None
            held += analysis.temp_size_in_bytes
            if held > peak:
                peak, fullest = held, one.task
        if one.kind == "free":
            for name in one.inputs:
                live.pop(name, None)
    return HeldMemory(buffers, peak, fullest)


def _sizes(tasks: Mapping[str, CompiledTask]) -> dict[str, float]:
    """Return the bytes on a device of every value that tasks read or make."""
    found: dict[str, float] = {}
    for task in tasks.values():
        spec = task.task.spec
        for name, shape in zip(spec.inputs, task.arguments(), strict=False):
            found[name] = _bytes(shape.shape, shape.dtype, shape.sharding)
        _, layouts = task.shardings()
        results = zip(spec.outputs, task.task.outvars, task.plan.outputs)
        for (name, var, made), layout in zip(results, layouts, strict=False):
            whole = global_shape(shape_of(var), made, task.mesh)  # of an unreduced sum, its parts
            found.setdefault(name, _bytes(whole, dtype_of(var), layout))
    return found


def _bytes(shape: tuple[int, ...], dtype: DType, sharding: Sharding | None) -> float:
    held = shape if sharding is None else sharding.shard_shape(shape)
    return float(math.prod(held) * dtype.itemsize)
