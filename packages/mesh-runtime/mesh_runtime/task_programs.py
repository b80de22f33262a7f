"""The executables of tasks: found, checked and called with errors that name the task."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import ReferenceType, ref

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from attrs import evolve
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from alpa_interchange.schedule import Instruction
from mesh_runtime.boundary import listing
from mesh_runtime.exported import ExportedProgram
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
) -> dict[str, TaskProgram]:
    """Return a callable per task of one mesh's `program`; equal exported programs share one."""
    ready: dict[str, TaskProgram] = {}
    shared: list[tuple[ExportedProgram, tuple[int, ...], TaskProgram]] = []
    for instruction in program:
        task = instruction.task
        if instruction.kind != "run" or task in ready:
            continue
        executable = executables[task]
        if not isinstance(executable, ExportedProgram):
            ready[task] = executable
            continue
        values = tuple(value_name(name) for name in instruction.inputs)
        unknown = set(executable.donated) - set(values)
        if unknown:
            raise ValueError(
                f"the exported program of task {task!r} donates {sorted(unknown)}, which are no "
                f"inputs of the task"
            )
        positions = tuple(k for k, value in enumerate(values) if value in executable.donated)
        key = evolve(executable, donated=())
        same = [made for one, where, made in shared if (one, where) == (key, positions)]
        if not same:
            same = [LoadedProgram(f"task {task!r}", executable, mesh, len(values), positions)]
            shared.append((key, positions, same[0]))
        ready[task] = same[0]
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


class IssuedRuns:
    """The runs of a step, which may fail after they were issued: host devices find out then that
    they have no memory for one."""

    def __init__(self) -> None:
        self._runs: list[tuple[int, int, Instruction, ReferenceType[jax.Array]]] = []

    def add(
        self, mesh: int, position: int, instruction: Instruction, results: Sequence[jax.Array]
    ) -> None:
        """Take note of a run."""
        if results:
            self._runs.append((mesh, position, instruction, ref(results[0])))

    def failure(self) -> StepError | None:
        """Return the error of the first run that failed, of those whose results are still there;
        None if none did."""
        for mesh, position, instruction, result in self._runs:
            array = result()
            if array is None or array.is_deleted():
                continue
            try:
                array.block_until_ready()
            except Exception as error:
                return StepError(f"{describe(mesh, position, instruction)} failed: {error}")
        return None


class LoadedProgram:
    """An exported program compiled for the devices of a mesh.

    An argument in another layout than the program was exported for is brought into it first. Those
    of several elements a byte (int4) have another in jax than in the compiled program, which
    refuses them (`jax.jit` does not).
    """

    def __init__(
        self,
        name: str,
        executable: ExportedProgram,
        mesh: Mesh,
        num_inputs: int,
        donated: tuple[int, ...] = (),
    ) -> None:
        program = jax.export.deserialize(bytearray(executable.program))
        if program.nr_devices != mesh.size:
            raise ValueError(
                f"the exported program of {name} is for {program.nr_devices} devices, but its "
                f"mesh has {mesh.size}; export it with shardings over a mesh of that shape"
            )
        if len(program.in_avals) != num_inputs:
            raise ValueError(
                f"the exported program of {name} takes {len(program.in_avals)} arrays, but is "
                f"given {num_inputs}"
            )
        if executable.shape:
            grid = mesh.devices.reshape(executable.shape)
            mesh = Mesh(grid, executable.axis_names, axis_types=mesh.axis_types[:1] * grid.ndim)
        self.in_avals, self.out_avals = program.in_avals, program.out_avals
        whole = NamedSharding(mesh, PartitionSpec())
        self.in_shardings = tuple(one or whole for one in program.in_shardings_jax(mesh))
        self._packed = any(_bits(aval.dtype) < 8 for aval in program.in_avals)
        self._jitted = jax.jit(
            program.call,
            out_shardings=program.out_shardings_jax(mesh),
            donate_argnums=donated,
            compiler_options=dict(executable.options) or None,
        )

    @functools.cached_property
    def compiled(self) -> Any:
        """Return the program compiled by XLA."""
        shapes = [
            jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding)
            for aval, sharding in zip(self.in_avals, self.in_shardings, strict=True)
        ]
        return self._jitted.lower(*shapes).compile()

    def __call__(self, *arguments: jax.Array) -> Sequence[jax.Array]:
        """Return what the program makes of `arguments`."""
        if self._packed:
            return self._jitted(*arguments)  # type: ignore[no-any-return]
        for argument, sharding in zip(arguments, self.in_shardings, strict=True):
            held = argument.sharding
            if held != sharding and not held.is_equivalent_to(sharding, argument.ndim):
                return self._jitted(*arguments)  # type: ignore[no-any-return]
        return self.compiled(*arguments)  # type: ignore[no-any-return]

    def placed(self, arguments: Sequence[Any]) -> list[jax.Array]:
        """Return whole arrays of the host as the program takes them."""
        return [
            jax.make_array_from_callback(whole.shape, sharding, whole.__getitem__)
            for whole, sharding in zip(map(np.asarray, arguments), self.in_shardings, strict=True)
        ]


def _bits(dtype: Any) -> int:
    """Return the bits of an element on a device."""
    if jnp.issubdtype(dtype, jnp.integer):
        return int(jnp.iinfo(dtype).bits)  # type: ignore[no-untyped-call]
    if jnp.issubdtype(dtype, jnp.floating):
        return int(jnp.finfo(dtype).bits)  # type: ignore[no-untyped-call]
    return 8
