"""The executables of tasks: found, checked and called with errors that name the task."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.export
from jax.sharding import Mesh

from alpa_interchange.schedule import Instruction
from mesh_runtime.boundary import listing
from mesh_runtime.order import describe, value_name
from mesh_runtime.runtime import Executable, StepError

TaskProgram = Callable[..., Sequence[jax.Array]]


def check_tasks(
    programs: Sequence[Sequence[Instruction]], executables: Mapping[str, Executable]
) -> None:
    """Refuse a schedule that runs a task without executable, or one task on two meshes."""
    where: dict[str, int] = {}
    for mesh, program in enumerate(programs):
        for position, instruction in enumerate(program):
            task = instruction.task
            if instruction.kind != "run":
                continue
            if where.setdefault(task, mesh) != mesh:
                raise ValueError(
                    f"task {task!r} runs on mesh {where[task]} and on mesh {mesh}; a task belongs "
                    "to one mesh, so give the two programs different names"
                )
            if task not in executables:
                raise ValueError(
                    f"{describe(mesh, position, instruction)} has no executable; executables are "
                    f"given for {listing(sorted(executables))}"
                )


def task_programs(
    program: Sequence[Instruction],
    executables: Mapping[str, Executable],
    mesh: Mesh,
    donated: Mapping[str, Sequence[str]],
) -> dict[str, TaskProgram]:
    """Return a callable per task of one mesh's `program`; equal exported programs share one."""
    ready: dict[str, TaskProgram] = {}
    shared: dict[tuple[bytes, tuple[int, ...]], TaskProgram] = {}
    for instruction in program:
        task = instruction.task
        if instruction.kind != "run" or task in ready:
            continue
        executable = executables[task]
        if not isinstance(executable, bytes):
            ready[task] = executable
            continue
        values = tuple(value_name(name) for name in instruction.inputs)
        unknown = set(donated.get(task, ())) - set(values)
        if unknown:
            raise ValueError(
                f"donated[{task!r}] names {sorted(unknown)}, which are no inputs of the task"
            )
        positions = tuple(k for k, value in enumerate(values) if value in donated.get(task, ()))
        key = (executable, positions)
        if key not in shared:
            shared[key] = _exported_program(task, executable, mesh, values, positions)
        ready[task] = shared[key]
    return ready


def call(
    programs: Mapping[str, TaskProgram],
    mesh: int,
    position: int,
    instruction: Instruction,
    arguments: Sequence[jax.Array],
) -> Sequence[jax.Array]:
    """Return what the executable of a run gives; an error names the instruction and the reason."""
    try:
        results = programs[instruction.task](*arguments)
    except Exception as error:
        gone = [
            name
            for name, array in zip(instruction.inputs, arguments, strict=True)
            if array.is_deleted()
        ]
        reason = str(error)
        if gone:
            reason = (
                f"its input {listing(gone)} was donated to an earlier run; a donated buffer may "
                f"not be read again ({error})"
            )
        raise StepError(f"{describe(mesh, position, instruction)} failed: {reason}") from error
    if not isinstance(results, tuple | list) or len(results) != len(instruction.outputs):
        came: Any = type(results)
        if isinstance(results, tuple | list):
            came = f"{len(results)} arrays"
        raise StepError(
            f"{describe(mesh, position, instruction)} must return {len(instruction.outputs)} "
            f"arrays ({listing(instruction.outputs)}), but its executable returned {came}"
        )
    return results


def _exported_program(
    task: str, executable: bytes, mesh: Mesh, values: Sequence[str], donated: tuple[int, ...]
) -> TaskProgram:
    """Return the program serialised by `jax.export`, for the devices of `mesh`.

    An argument in another layout than the program was exported for is brought into it first.
    """
    program = jax.export.deserialize(bytearray(executable))
    if program.nr_devices != mesh.size:
        raise ValueError(
            f"the exported program of task {task!r} is for {program.nr_devices} devices, but its "
            f"mesh has {mesh.size}; export it with shardings over a mesh of that shape"
        )
    if len(program.in_avals) != len(values):
        raise ValueError(
            f"the exported program of task {task!r} takes {len(program.in_avals)} arrays, but its "
            f"run instruction gives {len(values)}: {', '.join(values)}"
        )
    return jax.jit(
        program.call, out_shardings=program.out_shardings_jax(mesh), donate_argnums=donated
    )
