"""Programs that travel as bytes: `jax.export` artifacts made ready for the mesh they run on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
from jax.sharding import Mesh

from mesh_runtime.runtime import Executable


def executable_of(
    task: str,
    executable: Executable,
    mesh: Mesh,
    values: tuple[str, ...],
    donated: tuple[str, ...],
) -> Callable[..., Sequence[jax.Array]]:
    """Return the callable of `task` on `mesh`: callables as they are, bytes by `jax.export`.

    `values` are the task's input values in order, `donated` those among them it may overwrite. An
    argument in another layout than the program was exported for is brought into it first.
    """
    if not isinstance(executable, bytes):
        return executable
    import jax.export

    program = jax.export.deserialize(bytearray(executable))
    if program.nr_devices != mesh.size:
        raise ValueError(
            f"the exported program of task {task!r} is for {program.nr_devices} devices, but its mesh "
            f"has {mesh.size}; export it with shardings over a mesh of that shape"
        )
    if len(program.in_avals) != len(values):
        raise ValueError(
            f"the exported program of task {task!r} takes {len(program.in_avals)} arrays, but its run "
            f"instruction gives {len(values)}: {', '.join(values)}"
        )
    unknown = set(donated) - set(values)
    if unknown:
        raise ValueError(
            f"donated[{task!r}] names {sorted(unknown)}, which are no inputs of the task"
        )
    positions = tuple(index for index, value in enumerate(values) if value in donated)
    return jax.jit(
        program.call,
        out_shardings=program.out_shardings_jax(mesh),
        donate_argnums=positions,
    )
