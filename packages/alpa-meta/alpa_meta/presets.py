"""The named parallelisms, as constraints on the planner and as partition specs of a step's inputs.

`parallelize(step, preset="megatron")` plans under them: the inputs are sharded as the preset says,
and the planner chooses the rest. What a preset cuts follows from the program, not from names: which
state the forward pass reads, which dims contractions carry over into each other, what the optimiser
holds of each (`model_dims`). A dim that the axes do not divide stays whole. On a mesh of one axis,
"first axes" are none.

    dp           batch over all axes, everything else replicated
    zero2        dp, optimiser state cut over all axes
    zero3        dp, parameters and optimiser state cut over all axes ("fsdp" is the same)
    megatron     batch over the first axes, weights by Megatron's columns and rows over the last
    megatron-sp  megatron, sums of the residual stream cut along the sequence over the last axis
    2d           megatron, what is left whole of a parameter cut over the first axes as in zero3
    expert       batch over all axes, experts over the last, other parameters replicated
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from attrs import frozen
from jax.sharding import PartitionSpec
from jax.tree_util import PyTreeDef

from alpa_interchange import LogicalMesh
from alpa_meta.compat import Literal, Var, dtype_of, shape_of
from alpa_meta.errors import PlanError
from alpa_meta.model_dims import model_dims
from alpa_meta.operators import linear_operands
from alpa_meta.pinning import Pin
from alpa_meta.step.arguments import is_array
from alpa_meta.step.program import Program, Step
from alpa_meta.types import Function, PyTree

PRESETS = ("2d", "dp", "expert", "fsdp", "megatron", "megatron-sp", "zero2", "zero3")
"""The names of the presets."""

WITH_MODEL_AXIS = ("megatron", "megatron-sp", "2d")
"""The presets that keep the last axis for parameters."""

Dims = tuple[tuple[str, ...], ...]
"""The axes of each dim of an array."""


def check_preset(name: str) -> None:
    """Raise PlanError unless there is a preset of this name."""
    if name not in PRESETS:
        raise PlanError(f"no preset {name!r}; there are {', '.join(PRESETS)}")


def preset_specs(name: str, step: Step, axis_sizes: Mapping[str, int]) -> tuple[PyTree, ...]:
    """Return the partition specs of the arguments of a step, trees of their structure.

    `axis_sizes` are the axes of the mesh; presets with a model axis take the last.
    """
    check_preset(name)
    program = step.program(1)
    dims = _input_dims(name, program, axis_sizes)
    specs = iter(_spec(dims.get(var, ())) for var in program.jaxpr.invars)
    leaves, tree = _flatten(tuple(step.args))
    return tuple(tree.unflatten([next(specs) if is_array(x) else x for x in leaves]))


def preset_pins(name: str, program: Program, mesh: LogicalMesh) -> dict[Var, Pin]:
    """Return {variable: pin} of a preset on one mesh: of inputs, and of values where it says so."""
    check_preset(name)
    sizes = dict(zip(mesh.axis_names, mesh.shape, strict=True))
    pins = {var: _pin(dims, sizes) for var, dims in _input_dims(name, program, sizes).items()}
    if name == "megatron-sp":
        pins.update(_sequence_pins(program, sizes))
    return pins


@frozen
class Coverage:
    """What a preset divides over the last axis of a mesh, which with a model axis is that one: the
    share of the elements of parameters and of the flops of the forward pass's products."""

    parameters: float
    flops: float


def coverage(name: str, program: Program, mesh: LogicalMesh) -> Coverage:
    """Return what a preset covers of a program on one mesh."""
    check_preset(name)
    sizes = dict(zip(mesh.axis_names, mesh.shape, strict=True))
    model = model_dims(program)
    cut = [
        (var, number)
        for var, dims in _input_dims(name, program, sizes).items()
        for number, axes in enumerate(dims)
        if mesh.axis_names[-1] in axes
    ]
    elements = {var: math.prod(shape_of(var)) for var in model.parameters}
    covered = sum(elements.get(var, 0) for var in {var for var, _ in cut})
    return Coverage(covered / max(sum(elements.values()), 1), model.flops_share(cut))


def _flatten(tree: PyTree) -> tuple[list[PyTree], PyTreeDef]:
    return jax.tree.flatten(tree)


def _input_dims(name: str, program: Program, axis_sizes: Mapping[str, int]) -> dict[Var, Dims]:
    """Return the axes of each dim of the state and the batch under a preset."""
    axes = tuple(axis_sizes)
    model, size = model_dims(program), axis_sizes[axes[-1]]
    cut: Mapping[Var, int] = {}
    if name in WITH_MODEL_AXIS:
        cut = model.tensor_cut(size)
    elif name == "expert":
        cut = model.expert_cut(size)
    over = {"2d": axes[:-1], "zero3": axes, "fsdp": axes, "zero2": axes}.get(name, ())
    whole = set(model.parameters) if name == "zero2" else set()
    found: dict[Var, Dims] = {}
    for var, leaf in zip(program.jaxpr.invars, program.inputs, strict=True):
        shape = tuple(shape_of(var))
        if leaf.role == "batch":
            found[var] = _batch_dims(name, shape, axis_sizes)
        elif leaf.role == "state":
            dims: list[tuple[str, ...]] = [()] * len(shape)
            if var in cut:
                dims[cut[var]] = axes[-1:]
            if over and var not in whole and not _is_key(var):
                largest = _largest(dims, shape, math.prod(axis_sizes[axis] for axis in over))
                if largest is not None:
                    dims[largest] = over
            found[var] = tuple(dims)
    return found


def _sequence_pins(program: Program, axis_sizes: Mapping[str, int]) -> dict[Var, Pin]:
    """Return pins along the sequence of the residual stream, sums of [batch, sequence, width]."""
    last = tuple(axis_sizes)[-1]
    pins = {}
    for eqn, phase in zip(program.jaxpr.eqns, program.phases.of_eqn, strict=True):
        shape = tuple(getattr(eqn.outvars[0].aval, "shape", ()))
        if phase != "forward" or len(shape) != 3 or shape[1] % axis_sizes[last]:
            continue
        if len(eqn.invars) != 2 or not linear_operands(eqn):
            continue
        if all(not isinstance(a, Literal) and tuple(shape_of(a)) == shape for a in eqn.invars):
            batch = _batch_dims("megatron-sp", shape, axis_sizes)
            pins[eqn.outvars[0]] = _pin((batch[0], (last,), ()), axis_sizes)
    return pins


def _pin(dims: Dims, axis_sizes: Mapping[str, int]) -> Pin:
    return Pin(tuple(tuple(axis for axis in axes if axis_sizes[axis] > 1) for axes in dims))


def _spec(dims: Dims) -> PartitionSpec:
    construct: Function[PartitionSpec] = PartitionSpec
    made: PartitionSpec = construct(*(axes or None for axes in dims))
    return made


def _batch_dims(name: str, shape: tuple[int, ...], axis_sizes: Mapping[str, int]) -> Dims:
    axes = tuple(axis_sizes)
    if name in WITH_MODEL_AXIS:
        axes = axes[:-1]
    size = math.prod(axis_sizes[axis] for axis in axes)
    cut = bool(axes) and bool(shape) and shape[0] % size == 0
    return (axes if cut else (), *[()] * (len(shape) - 1)) if shape else ()


def _is_key(var: Var) -> bool:
    if jnp.issubdtype(dtype_of(var), jax.dtypes.prng_key):
        return True
    return dtype_of(var) == np.uint32 and shape_of(var) in ((2,), (4,))


def _largest(dims: Sequence[tuple[str, ...]], shape: tuple[int, ...], size: int) -> int | None:
    """Return the largest whole dim that `size` divides, the first of equals, else None."""
    free = [d for d, s in enumerate(shape) if not dims[d] and s % size == 0 and s >= size]
    return max(free, key=lambda d: shape[d], default=None)
