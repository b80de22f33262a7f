"""Calls that go straight to the compiled program, for a step that is one task run once.

What a step does around its program (names, checks, instruction lists) takes about as long in Python
as the program of a small model takes to run. A call like an earlier one needs none of it: leaves of
the arguments are the task's operands, and its results are leaves of the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from attrs import frozen

from alpa_meta.compat import no_mesh
from alpa_meta.execution.executable import Executable
from alpa_meta.step.arguments import is_array
from alpa_meta.step.program import Step
from mesh_runtime import Pace

NOT_DIRECT = object()
"""What a direct call returns for arguments that are not like those it was made for."""


@frozen(eq=False)
class DirectCall:
    """The call of a step by the leaves of its arguments.

    `operands` are (position of the leaf, shape, dtype, sharding) of each operand, `batch` the
    positions of those that no step overwrites, `kept` (position, leaf) of the leaves that are no
    arrays. `results` make the leaves of the step's result from those of the program and the
    arguments. `pace` keeps host devices from holding too many runs.
    """

    executable: Executable
    program: Callable[..., Sequence[Any]]
    operands: tuple[tuple[int, tuple[int, ...], Any, Any], ...]
    batch: frozenset[int]
    kept: tuple[tuple[int, Any], ...]
    results: tuple[Callable[[Sequence[Any], Sequence[Any]], Any], ...]
    tree: Any
    pace: Pace

    def __call__(self, leaves: list[Any]) -> Any:
        """Return what the step returns, or NOT_DIRECT; operands among `leaves` are placed."""
        if self.executable.tracing or any(leaves[k] is not leaf for k, leaf in self.kept):
            return NOT_DIRECT
        given = [leaves[position] for position, *_ in self.operands]
        if len(set(map(id, given))) < len(given):
            return NOT_DIRECT  # one array for two inputs, each of which the step may overwrite
        values = []
        for value, (position, shape, dtype, sharding) in zip(given, self.operands, strict=True):
            if getattr(value, "shape", None) != shape or value.dtype != dtype:
                return NOT_DIRECT
            if position not in self.batch and getattr(value, "weak_type", False):
                return NOT_DIRECT  # the program would be compiled again for it
            if getattr(value, "sharding", None) != sharding:
                if not isinstance(value, (jax.Array, np.ndarray)) or _is_deleted(value):
                    return NOT_DIRECT
                if position not in self.batch or not _lies_as(value, sharding):
                    leaves[position] = value = jax.device_put(value, sharding)
            elif value.is_deleted():
                return NOT_DIRECT
            values.append(value)
        with no_mesh():
            found = self.program(*values)
        self.pace.issued(found)
        return self.tree.unflatten([result(found, leaves) for result in self.results])


def direct_call(step: Step, executable: Executable, leaves: Sequence[Any]) -> DirectCall | None:
    """Return the direct call for arguments of `leaves`; None for a plan that is not one run."""
    only, program = executable.only_run, executable.planned.program
    if only is None or step.static_argnums or program.input_parts or program.output_parts:
        return None
    assert only.task is not None
    task = executable.tasks[only.task]
    arrays = [k for k, leaf in enumerate(leaves) if is_array(leaf)]
    if len(program.inputs) > len(arrays):
        return None  # it is given statistics of the batch as well
    position = {leaf.path: k for leaf, k in zip(program.inputs, arrays, strict=True)}
    operands = tuple(
        (position[name], shape.shape, shape.dtype, shape.sharding)
        for name, shape in zip(task.task.spec.inputs, task.arguments(), strict=True)
    )
    made = {name: number for number, name in enumerate(task.task.spec.outputs)}
    outputs = iter(executable.planned.tasks.outputs)
    tree, kept, is_result, _ = step.output_tree
    return DirectCall(
        executable,
        task.function,
        operands,
        frozenset(position[leaf.path] for leaf in program.inputs if leaf.role == "batch"),
        tuple((k, leaf) for k, leaf in enumerate(leaves) if not is_array(leaf)),
        tuple(
            _result(next(outputs), made, arrays) if dynamic else _constant(leaf)
            for leaf, dynamic in zip(kept, is_result, strict=True)
        ),
        tree,
        Pace(executable.meshes[0]),
    )


def _is_deleted(value: Any) -> bool:
    return isinstance(value, jax.Array) and value.is_deleted()


def _lies_as(value: Any, sharding: Any) -> bool:
    """Return whether a value lies as `sharding` has it, though its own is another kind of sharding:
    programs take it so, and placing it takes 0.1 ms."""
    if not isinstance(value, jax.Array) or len(sharding.device_set) > 1:
        return False
    return bool(value.sharding.is_equivalent_to(sharding, value.ndim))


def _result(output: Any, made: dict[str, int], arrays: Sequence[int]) -> Any:
    if output.name is not None:
        number = made[output.name]
        return lambda results, leaves: results[number]
    if output.input is not None:
        number = arrays[output.input]
        return lambda results, leaves: leaves[number]
    return lambda results, leaves: jnp.asarray(output.constant)


def _constant(leaf: Any) -> Any:
    return lambda results, leaves: leaf
