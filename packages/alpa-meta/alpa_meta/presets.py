"""The named parallelisms, as constraints on the planner and as partition specs of a step's inputs.

`parallelize(step, preset="megatron")` plans under them: the inputs are sharded as the preset says,
and the planner chooses the rest. A preset looks only at the names and shapes of inputs, the way
such layouts are written by hand. Optimiser state follows the parameter whose path ends its own. A
dim that the axes do not divide stays whole. On a mesh of one axis, "first axes" are none.

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
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from alpa_interchange import LogicalMesh
from alpa_meta.compat import Literal
from alpa_meta.errors import PlanError
from alpa_meta.pinning import Pin
from alpa_meta.step.program import Program

PRESETS = ("2d", "dp", "expert", "fsdp", "megatron", "megatron-sp", "zero2", "zero3")
"""The names of the presets."""

_WITH_MODEL_AXIS = ("megatron", "megatron-sp", "2d")
_OPTIMISER = re.compile(r"\b(opt|optimizer|mu|nu|momentum|trace)\b")
_COLUMNS = re.compile(r"\b(query|key|value|qkv)\b")
_WIDE = re.compile(r"\b(up|gate|head)\b")
_ROWS = re.compile(r"\b(out|down)\b")
_TABLES = re.compile(r"\b(embed|embedding|tables)\b")
_EXPERTS = re.compile(r"\b(up|down)\b")


def check_preset(name: str) -> None:
    """Raise PlanError unless there is a preset of this name."""
    if name not in PRESETS:
        raise PlanError(f"no preset {name!r}; there are {', '.join(PRESETS)}")


def preset_specs(
    name: str, state: Any, batch: Any, axis_sizes: Mapping[str, int]
) -> tuple[Any, Any]:
    """Return the partition specs of `state` and `batch`, trees of their structure.

    `axis_sizes` are the axes of the mesh; presets with a model axis take the last.
    """
    check_preset(name)

    def state_spec(path: Any, leaf: Any) -> PartitionSpec:
        return _state_spec(name, jax.tree_util.keystr(path), leaf, axis_sizes)

    def batch_spec(leaf: Any) -> PartitionSpec:
        return _batch_spec(name, tuple(leaf.shape), axis_sizes)

    return jax.tree_util.tree_map_with_path(state_spec, state), jax.tree.map(batch_spec, batch)


def preset_pins(name: str, program: Program, mesh: LogicalMesh) -> dict[Any, Pin]:
    """Return {variable: pin} of a preset on one mesh: of inputs, and of values where it says so."""
    check_preset(name)
    sizes = dict(zip(mesh.axis_names, mesh.shape, strict=True))
    pins = {}
    for var, leaf in zip(program.jaxpr.invars, program.inputs, strict=True):
        if leaf.role == "state":
            spec = _state_spec(name, leaf.leaf_path, var.aval, sizes)
        elif leaf.role == "batch":
            spec = _batch_spec(name, tuple(var.aval.shape), sizes)
        else:
            continue
        pins[var] = _pin(spec, len(var.aval.shape), sizes)
    if name == "megatron-sp":
        pins.update(_sequence_pins(program, sizes))
    return pins


def _sequence_pins(program: Program, axis_sizes: Mapping[str, int]) -> dict[Any, Pin]:
    """Return pins along the sequence of the residual stream, sums of [batch, sequence, width]."""
    axes = tuple(axis_sizes)
    size = axis_sizes[axes[-1]]
    pins = {}
    for eqn, phase in zip(program.jaxpr.eqns, program.phases.of_eqn, strict=True):
        shape = tuple(getattr(eqn.outvars[0].aval, "shape", ()))
        if phase != "forward" or eqn.primitive.name != "add" or len(shape) != 3 or shape[1] % size:
            continue
        if all(not isinstance(a, Literal) and tuple(a.aval.shape) == shape for a in eqn.invars):
            batch = _batch_spec("megatron-sp", shape, axis_sizes)
            first = batch[0] if len(batch) else None
            pins[eqn.outvars[0]] = _pin(_spec(first, axes[-1:]), 3, axis_sizes)
    return pins


def _pin(spec: PartitionSpec, rank: int, axis_sizes: Mapping[str, int]) -> Pin:
    entries = [*spec, *[None] * (rank - len(spec))]
    named = [(entry,) if isinstance(entry, str) else tuple(entry or ()) for entry in entries]
    return Pin(tuple(tuple(axis for axis in axes if axis_sizes[axis] > 1) for axes in named))


def _batch_spec(name: str, shape: tuple[int, ...], axis_sizes: Mapping[str, int]) -> PartitionSpec:
    axes = tuple(axis_sizes)
    if name in _WITH_MODEL_AXIS:
        axes = axes[:-1]
    size = math.prod(axis_sizes[axis] for axis in axes)
    cut = bool(axes) and bool(shape) and shape[0] % size == 0
    return _spec(axes) if cut else _spec()


def _state_spec(name: str, path: str, leaf: Any, axis_sizes: Mapping[str, int]) -> PartitionSpec:
    words = re.sub(r"[^A-Za-z0-9]+", " ", path)
    shape, axes = tuple(leaf.shape), tuple(axis_sizes)
    dims: list[tuple[str, ...] | None] = [None] * len(shape)
    cut_axes: tuple[str, ...] = ()
    if _is_key(leaf):
        return _spec(*dims)
    if name in _WITH_MODEL_AXIS:
        _cut(dims, shape, _megatron_dim(words, len(shape)), axes[-1:], axis_sizes)
        cut_axes = axes[:-1] if name == "2d" else ()
    elif name == "expert":
        dim = 0 if len(shape) == 3 and _EXPERTS.search(words) else None
        _cut(dims, shape, dim, axes[-1:], axis_sizes)
    elif name in ("zero3", "fsdp") or (name == "zero2" and _OPTIMISER.search(words)):
        cut_axes = axes
    if cut_axes:
        _cut(dims, shape, _largest(dims, shape, cut_axes, axis_sizes), cut_axes, axis_sizes)
    return _spec(*dims)


def _is_key(leaf: Any) -> bool:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return True
    return bool(leaf.dtype == np.uint32) and tuple(leaf.shape) in ((2,), (4,))


def _spec(*dims: tuple[str, ...] | None) -> PartitionSpec:
    construct: Any = PartitionSpec
    made: PartitionSpec = construct(*dims)
    return made


def _megatron_dim(words: str, num_dims: int) -> int | None:
    """Return the dim (from the end) that tensor parallelism cuts, None if the leaf stays whole."""
    bias = "bias" in words
    if _COLUMNS.search(words):
        heads_apart = num_dims >= (2 if bias else 3)
        return -2 if heads_apart else -1
    if _WIDE.search(words):
        return -1
    if _ROWS.search(words) and not bias:
        return -3 if " out" in words and num_dims >= 3 else -2
    if _TABLES.search(words) and num_dims == 2:
        return -2
    return None


def _largest(
    dims: list[tuple[str, ...] | None],
    shape: tuple[int, ...],
    axes: tuple[str, ...],
    axis_sizes: Mapping[str, int],
) -> int | None:
    """Return the largest whole dim that `axes` divide, the first of equals, else None."""
    size = math.prod(axis_sizes[axis] for axis in axes)
    free = [d for d, s in enumerate(shape) if dims[d] is None and s % size == 0 and s >= size]
    return max(free, key=lambda d: shape[d], default=None)


def _cut(
    dims: list[tuple[str, ...] | None],
    shape: tuple[int, ...],
    dim: int | None,
    axes: tuple[str, ...],
    axis_sizes: Mapping[str, int],
) -> None:
    """Put `axes` on `dim` of a spec, if they divide it."""
    if dim is None or not -len(shape) <= dim < len(shape):
        return
    if shape[dim] % math.prod(axis_sizes[axis] for axis in axes) == 0:
        dims[dim] = axes
