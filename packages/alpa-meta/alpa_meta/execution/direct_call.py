"""Calls that go straight to the compiled program, for a step that is one task run once.

What a step does around its program (names, checks, instruction lists) takes about as long in Python
as the program of a small model takes to run. A call like an earlier one needs none of it: leaves of
the arguments are the task's operands, and its results are leaves of the result.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from operator import attrgetter, itemgetter, methodcaller

import jax
import jax.numpy as jnp
import numpy as np
from attrs import field, frozen
from jax.sharding import Mesh, Sharding
from jax.tree_util import PyTreeDef

from alpa_meta.compat import no_mesh
from alpa_meta.execution.executable import Executable
from alpa_meta.execution.tasks import Output
from alpa_meta.identity import Identity
from alpa_meta.step.arguments import is_array
from alpa_meta.step.program import Step
from alpa_meta.types import DType, Function, HostArray, PyTree
from mesh_runtime import Pace

NOT_DIRECT = object()
"""What a direct call returns for arguments that are not like those it was made for."""


_KIND = attrgetter("aval", "sharding")
_IS_DELETED = methodcaller("is_deleted")


@frozen
class Operand:
    """What an operand of the program must be, and the position of its leaf.

    A `batch` is overwritten by no step. What is not `returned` either, and goes to one device, may
    be an array of the host: the program takes it in 0.015 ms, placing it before takes 0.17.
    """

    position: int
    shape: tuple[int, ...]
    dtype: DType
    sharding: Sharding
    batch: bool
    returned: bool


@frozen(eq=False)
class DirectCall:
    """The call of a step by the leaves of its arguments.

    `operands` picks the operands of the program from the leaves, `states` those that a step may
    overwrite, which `state` describes; `batch` describes the others, `kept` are (position, leaf) of
    the leaves that are no arrays. `result` picks the leaves of the step's result from those of the
    program, of the arguments, `constants` that are no arrays, and arrays made of `made` anew.
    `pace` keeps host devices from holding too many runs.

    A step mostly gets the state that it gave back: its arrays share their types and shardings with
    those of the step before, `known`, so that comparing them is mostly comparing objects.
    """

    executable: Executable
    program: Function[Sequence[jax.Array]]
    operands: Callable[[Sequence[PyTree]], Sequence[PyTree]]
    states: Callable[[Sequence[PyTree]], Sequence[PyTree]]
    state: tuple[Operand, ...]
    batch: tuple[Operand, ...]
    kept: tuple[tuple[int, PyTree], ...]
    result: Callable[[Sequence[PyTree]], Sequence[PyTree]]
    constants: tuple[PyTree, ...]
    made: tuple[HostArray | jax.Array | None, ...]
    tree: PyTreeDef
    pace: Pace
    known: list[object] = field(factory=list)

    def __call__(self, leaves: list[PyTree]) -> PyTree:
        """Return what the step returns, or NOT_DIRECT; operands among `leaves` are placed."""
        if self.executable.tracing or any(leaves[k] is not leaf for k, leaf in self.kept):
            return NOT_DIRECT
        given = self.operands(leaves)
        if not Identity.distinct(given):
            return NOT_DIRECT  # one array for two inputs, each of which the step may overwrite
        states = self.states(leaves)
        if _kinds(states) != self.known:
            if not all(_is_placed(operand, leaves) for operand in self.state):
                return NOT_DIRECT
            self.known[:] = _kinds(self.states(leaves)) or ()
        elif any(map(_IS_DELETED, states)):
            return NOT_DIRECT
        if not all(_is_placed(operand, leaves) for operand in self.batch):
            return NOT_DIRECT
        with no_mesh():
            found = self.program(*self.operands(leaves))
        self.pace.issued(found)
        made = map(jnp.asarray, self.made)
        return self.tree.unflatten(self.result((*found, *leaves, *self.constants, *made)))


def direct_call(step: Step, executable: Executable, leaves: Sequence[PyTree]) -> DirectCall | None:
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
    batch = {position[leaf.path] for leaf in program.inputs if leaf.role == "batch"}
    given = executable.planned.tasks.outputs
    returned = {arrays[one.input] for one in given if one.name is None and one.input is not None}
    operands = [
        Operand(
            k := position[name], shape.shape, shape.dtype, shape.sharding, k in batch, k in returned
        )
        for name, shape in zip(task.task.spec.inputs, task.arguments(), strict=True)
    ]
    state = tuple(one for one in operands if not one.batch)
    names = {name: number for number, name in enumerate(task.task.spec.outputs)}
    outputs = iter(given)
    tree, kept, is_result, _ = step.output_tree
    constants = [leaf for leaf, dynamic in zip(kept, is_result, strict=True) if not dynamic]
    first_constant = len(names) + len(leaves)
    fixed = itertools.count(first_constant)
    made: list[HostArray | jax.Array | None] = []

    def place(output: Output) -> int:
        """Return where a result is among those of the program, the leaves and the constants."""
        if output.name is not None:
            return names[output.name]
        if output.input is not None:
            return len(names) + arrays[output.input]
        made.append(output.constant)
        return first_constant + len(constants) + len(made) - 1

    results = [place(next(outputs)) if dynamic else next(fixed) for dynamic in is_result]
    mesh = executable.meshes[0]
    assert isinstance(mesh, Mesh)
    return DirectCall(
        executable,
        task.function,
        _picker([one.position for one in operands]),
        _picker([one.position for one in state]),
        state,
        tuple(one for one in operands if one.batch),
        tuple((k, leaf) for k, leaf in enumerate(leaves) if not is_array(leaf)),
        _picker(results),
        tuple(constants),
        tuple(made),
        tree,
        Pace(mesh),
    )


def _picker(places: Sequence[int]) -> Callable[[Sequence[PyTree]], Sequence[PyTree]]:
    """Return what picks the values at some places."""
    if len(places) > 1:
        return itemgetter(*places)
    return lambda values: [values[k] for k in places]


def _kinds(values: Sequence[PyTree]) -> list[object] | None:
    """Return the types and shardings of arrays, None where some are no arrays of devices."""
    try:
        return list(map(_KIND, values))
    except AttributeError:
        return None


def _is_placed(operand: Operand, leaves: list[PyTree]) -> bool:
    """Return whether a leaf is what an operand must be; one that lies elsewhere is placed."""
    value, sharding = leaves[operand.position], operand.sharding
    if getattr(value, "shape", None) != operand.shape or value.dtype != operand.dtype:
        return False
    if not operand.batch and getattr(value, "weak_type", False):
        return False  # the program would be compiled again for it
    if getattr(value, "sharding", None) == sharding:
        return not value.is_deleted()
    if isinstance(value, jax.Array):
        if value.is_deleted():
            return False
        as_it_is = operand.batch and _lies_as(value, sharding)
    elif isinstance(value, np.ndarray):
        as_it_is = operand.batch and not operand.returned and len(sharding.device_set) == 1
    else:
        return False
    if not as_it_is:
        leaves[operand.position] = jax.device_put(value, sharding)
    return True


def _lies_as(value: jax.Array, sharding: Sharding) -> bool:
    """Return whether an array lies as `sharding` has it, though its own is another kind of
    sharding: programs take it so, and placing it takes 0.1 ms."""
    if len(sharding.device_set) > 1:
        return False
    return bool(value.sharding.is_equivalent_to(sharding, value.ndim))
