"""Batches whose examples do not lie along dim 0, such as time-major ones, [T, B, ...].

What cuts, shards and hands out batches takes the examples to lie along dim 0. A step of other
batches is made one of such batches: the dims of what it is given are moved, where they lie, and the
function moves them back first, which costs the program a transposition of its inputs.

    step(state, batch [T, B])  ->  step'(state, batch' [B, T]) = step(state, transposed batch')
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from attrs import evolve

from alpa_meta.errors import PlanError
from alpa_meta.step.arguments import flat_arguments
from alpa_meta.step.program import Step
from alpa_meta.step.pure_call import PureCall
from alpa_meta.step.roles import is_key
from alpa_meta.types import Function, PyTree, Spec

BatchDims = tuple[int, ...]
"""For each array among the arguments of a call, the dim of its examples; 0 for other arrays."""


def examples_first(call: PureCall, dims: BatchDims, static_argnums: tuple[int, ...]) -> PureCall:
    """Return the call of the step whose batches have their examples along dim 0."""
    if not any(dims):
        return call
    flat = flat_arguments(call.args, static_argnums)
    arrays = [_first(*pair) for pair in zip(flat.arrays(), dims, strict=True)]
    return evolve(
        call,
        function=_moving_back(call.function, dims, static_argnums),
        args=tuple(flat.call_with(arrays)),
        key=(call.key, dims),
        batch_dims=dims,
    )


def other_dims(step: Step) -> Iterator[BatchDims]:
    """Yield the other ways in which the arrays of a step may have a batch in common: every array of
    an argument has a dim of its size. Only some arguments need to where the step has no batch."""
    shapes = [leaf.aval.shape for leaf in step.leaves]
    members = _may_hold_examples(step)
    needed = set(step.batch_arguments) if step.batch_size is not None else set()
    seen = {(0,) * len(shapes)}
    for size in dict.fromkeys(
        size for group in members.values() for k in group for size in shapes[k] if size > 1
    ):
        with_size = {
            argument: group
            for argument, group in members.items()
            if all(size in shapes[k] for k in group)
        }
        if not with_size or not needed <= with_size.keys():
            continue
        for skipped in (0, 1):  # of dims that are as long, as where there are as many steps in time
            dims = [0] * len(shapes)
            for group in with_size.values():
                for k in group:
                    places = [dim for dim, length in enumerate(shapes[k]) if length == size]
                    dims[k] = places[min(skipped, len(places) - 1)]
            if tuple(dims) not in seen:
                seen.add(tuple(dims))
                yield tuple(dims)


def moved_dim(dim: int, first: int) -> int:
    """Return where a dim lies once dim `first` is moved in front of all."""
    return 0 if dim == first else dim + (dim < first)


def moved_by_path(step: Step) -> dict[str, int]:
    """Return, by path, the dims that were moved in front."""
    pairs = zip(step.leaves, step.batch_dims, strict=False)  # none where nothing was moved
    return {leaf.path: dim for leaf, dim in pairs if dim}


def moved_pins(pins: Mapping[str, Spec], step: Step) -> dict[str, Spec]:
    """Return pins of the arrays that a user gives as pins of those with the examples first."""
    found = dict(pins)
    for path, first in moved_by_path(step).items() if pins else ():
        if path in pins:
            entries = list(pins[path])
            entries += [None] * (first + 1 - len(entries))
            found[path] = (entries.pop(first), *entries)
    return found


def _may_hold_examples(step: Step) -> dict[int, list[int]]:
    """Return the arguments that are no state, or that are named as the batch, with the numbers of
    their arrays that have dims, among the step's leaves."""
    arguments, named = step.arguments, step.batch_argnums
    arrays, leaves = arguments.arrays(), step.leaves
    numbers = [
        n for n, dynamic in zip(arguments.argnums, arguments.dynamic, strict=True) if dynamic
    ]
    state = {n for n, leaf in zip(numbers, leaves, strict=True) if leaf.role == "state"}
    found: dict[int, list[int]] = {}
    for k, number in enumerate(numbers):
        wanted = number not in state if named is None else number in named
        if wanted and leaves[k].aval.shape and (named is not None or not is_key(arrays[k])):
            found.setdefault(number, []).append(k)
    return found


def _first(array: PyTree, dim: int) -> PyTree:
    """Return an array, or its shape, with a dim moved in front of all others."""
    if dim == 0:
        return array
    if isinstance(array, jax.ShapeDtypeStruct):
        shape = (array.shape[dim], *array.shape[:dim], *array.shape[dim + 1 :])
        return jax.ShapeDtypeStruct(shape, array.dtype)
    if isinstance(array, jax.Array):
        return jnp.moveaxis(array, dim, 0)
    if not isinstance(array, np.ndarray):
        raise PlanError(
            f"the examples of this batch lie along dim {dim} of a {type(array).__name__} of shape "
            f"{tuple(array.shape)}, which can be read along dim 0 only; give it the examples first "
            "and transpose it inside the step"
        )
    return np.moveaxis(array, dim, 0)


def _moving_back(
    function: Function[PyTree], dims: Sequence[int], static_argnums: tuple[int, ...]
) -> Function[PyTree]:
    @functools.wraps(function, updated=())
    def moved(*args: PyTree) -> PyTree:
        flat = flat_arguments(args, static_argnums)
        pairs = zip(flat.arrays(), dims, strict=True)
        return function(
            *flat.call_with(jnp.moveaxis(one, 0, dim) if dim else one for one, dim in pairs)
        )

    return moved
