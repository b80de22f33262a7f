"""Operators that read or write at computed places: gather, scatter and dynamic slices."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from alpa_interchange import ShardingRule
from alpa_meta.compat import JaxprEqn, dtype_of, shape_of
from alpa_meta.operators.operator import (
    FIRST,
    Dim,
    Factors,
    LocalCall,
    Operator,
    operand_shapes,
    result_shapes,
)
from alpa_meta.operators.work import copied_results, nothing, operand_bytes, operand_elements
from alpa_meta.types import DType, Params

_SCATTER_REDUCTIONS = {
    "scatter-add": "add",
    "scatter_add": "add",
    "scatter-sub": "add",
    "scatter_sub": "add",
    "scatter-min": "min",
    "scatter_min": "min",
    "scatter-max": "max",
    "scatter_max": "max",
}
SCATTERS = (*_SCATTER_REDUCTIONS, "scatter", "scatter-mul", "scatter_mul")
"""The primitives that write or add elements at computed places."""


def _gather_rule(eqn: JaxprEqn) -> ShardingRule:
    """Return the rule of a gather.

    Index dims and whole window dims are parallel. A dim looked up one element at a time (the
    vocabulary of an embedding) is a reduction: each device looks up what it holds, and the sum over
    devices of the results, zero where another device holds the row, is the answer.
    """
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    operand_shape, index_shape = operand_shapes(eqn)
    (result_shape,) = result_shapes(eqn)
    factors = Factors()
    operand: list[Dim] = [()] * len(operand_shape)
    index: list[Dim] = [()] * len(index_shape)
    result: list[Dim] = [()] * len(result_shape)
    places = [d for d in range(len(result_shape)) if d not in numbers.offset_dims]
    for k, place in enumerate(places):
        result[place] = index[k] = factors.new(result_shape[place])
    for a, b in zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims):
        operand[a] = index[b]
    for place, d in zip(numbers.offset_dims, _window_dims(eqn, numbers.collapsed_slice_dims)):
        if sizes[d] == operand_shape[d] and d not in numbers.start_index_map:
            result[place] = operand[d] = factors.new(operand_shape[d])
    for d in numbers.start_index_map:
        if sizes[d] == 1:
            operand[d] = _looked_up(factors, operand_shape[d], dtype_of(eqn.outvars[0]))
    return factors.rule([operand, index], [result])


def _looked_up(factors: Factors, size: int, dtype: DType) -> Dim:
    """Return the dim of `size` elements of which one is read, by the device that holds it."""
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return ()
    reduction = "or" if dtype == np.bool_ else "add"
    return factors.new(size, "reduction", reduction=reduction)


def _window_dims(eqn: JaxprEqn, left_out: tuple[int, ...]) -> list[int]:
    """Return the operand dims that appear in a gather's result, or a scatter's updates."""
    batching = eqn.params["dimension_numbers"].operand_batching_dims
    return [
        d for d in range(len(operand_shapes(eqn)[0])) if d not in left_out and d not in batching
    ]


def _run_gather(call: LocalCall) -> list[Array]:
    numbers, mode = call.eqn.params["dimension_numbers"], call.eqn.params["mode"]
    operand, index = call.operands
    whole, sizes = operand_shapes(call.eqn)[0], list(call.eqn.params["slice_sizes"])
    for d, local in enumerate(operand.shape):
        if sizes[d] == whole[d]:
            sizes[d] = local
    params: Params = {"slice_sizes": tuple(sizes)}
    sharded = {d: call.operand_axes(0, d) for d in numbers.start_index_map}
    if not any(sharded.values()):
        return call.bind(**params)
    index = index.astype(_index_dtype(index.dtype))
    inside, owned = jnp.bool_(True), jnp.bool_(True)
    columns = []
    for k, d in enumerate(numbers.start_index_map):
        column = index[..., k]
        last = whole[d] - call.eqn.params["slice_sizes"][d]
        if not _fills(mode):
            column = jnp.clip(column, 0, last)
        inside = inside & (column >= 0) & (column <= last)
        if sharded[d]:
            column, held = call.held(sharded[d], column, operand.shape[d])
            owned = owned & held
        columns.append(column)
    local_index = jnp.stack(columns, axis=-1)
    params |= {"indices_are_sorted": False, "unique_indices": False}
    (found,) = call.bind([operand, local_index], **params)
    places = [d for d in range(found.ndim) if d not in numbers.offset_dims]

    def spread(mask: Array) -> Array:
        return lax.broadcast_in_dim(jnp.broadcast_to(mask, index.shape[:-1]), found.shape, places)

    result = jnp.where(spread(inside & owned), found, jnp.zeros((), found.dtype))
    if _fills(mode):
        axes = tuple(axis for names in sharded.values() for axis in names)
        outside = spread(~inside & (call.index(axes) == 0))
        result = jnp.where(outside, _fill_value(call.eqn), result)
    return [result]


def _fills(mode: object) -> bool:
    """Return whether a gather fills in for indices out of bounds; otherwise XLA moves them inside.

    That holds for promised indices too: whole programs rely on it where a promise is broken.
    """
    return "fill" in str(mode).lower()


def _clips(mode: object) -> bool:
    """Return whether a scatter moves indices inside; otherwise XLA drops those out of bounds."""
    return "clip" in str(mode).lower()


def _index_dtype(dtype: DType) -> DType:
    """Return a signed type that holds an index and its distance to any shard."""
    wide = np.issubdtype(dtype, np.signedinteger) and dtype.itemsize >= 4
    return dtype if wide else np.dtype(np.int32)


def _fill_value(eqn: JaxprEqn) -> Array:
    """Return what a gather yields for an index out of bounds."""
    dtype, value = dtype_of(eqn.outvars[0]), eqn.params["fill_value"]
    if value is not None:
        return jnp.asarray(value, dtype)
    if jnp.issubdtype(dtype, jnp.inexact):
        return jnp.asarray(jnp.nan, dtype)
    if dtype == np.bool_:
        return jnp.asarray(True, dtype)
    info = jnp.iinfo(dtype)  # type: ignore[no-untyped-call]
    return jnp.asarray(info.min if info.min < 0 else info.max, dtype)


def _scatter_rule(eqn: JaxprEqn) -> ShardingRule:
    """Return the rule of a scatter.

    Whole window dims and batching dims are parallel, and so is a dim written one element at a time:
    each device takes the updates that fall into its part. Update dims are reductions where the
    updates combine by add, min or max, and stay whole otherwise.
    """
    numbers = eqn.params["dimension_numbers"]
    operand_shape, index_shape, update_shape = operand_shapes(eqn)
    reduction = _SCATTER_REDUCTIONS.get(eqn.primitive.name)
    factors = Factors()
    operand: list[Dim] = [()] * len(operand_shape)
    index: list[Dim] = [()] * len(index_shape)
    update: list[Dim] = [()] * len(update_shape)
    batches = dict(zip(numbers.scatter_indices_batching_dims, numbers.operand_batching_dims))
    places = [d for d in range(len(update_shape)) if d not in numbers.update_window_dims]
    for k, place in enumerate(places):
        size = update_shape[place]
        if k in batches:
            update[place] = index[k] = operand[batches[k]] = factors.new(size)
        elif reduction is not None:
            update[place] = index[k] = factors.new(size, "reduction", reduction=reduction)
    windows = _window_dims(eqn, numbers.inserted_window_dims)
    for place, d in zip(numbers.update_window_dims, windows):
        if (
            update_shape[place] == operand_shape[d]
            and d not in numbers.scatter_dims_to_operand_dims
        ):
            update[place] = operand[d] = factors.new(operand_shape[d])
    for d in numbers.scatter_dims_to_operand_dims:
        if d in numbers.inserted_window_dims or _written_one_by_one(
            numbers, windows, d, update_shape
        ):
            operand[d] = factors.new(operand_shape[d])
    return factors.rule([operand, index, update], [operand])


def _written_one_by_one(
    numbers: lax.ScatterDimensionNumbers,
    windows: list[int],
    dim: int,
    update_shape: tuple[int, ...],
) -> bool:
    return bool(update_shape[numbers.update_window_dims[windows.index(dim)]] == 1)


def _run_scatter(call: LocalCall) -> list[Array]:
    numbers = call.eqn.params["dimension_numbers"]
    operand, index, update = call.operands
    whole = operand_shapes(call.eqn)[0]
    reduced = tuple(
        axis
        for dim in call.rule.operands[1]
        for name in dim
        if call.rule.factor(name).kind == "reduction"
        for axis in call.strategy.axes(name)
    )
    if reduced and _SCATTER_REDUCTIONS[call.eqn.primitive.name] == "add":
        operand = jnp.where(call.index(reduced) == 0, operand, jnp.zeros_like(operand))
    sharded = {d: call.operand_axes(0, d) for d in numbers.scatter_dims_to_operand_dims}
    if not any(sharded.values()):
        return call.bind([operand, index, update])
    index = index.astype(_index_dtype(index.dtype))
    columns = []
    for k, d in enumerate(numbers.scatter_dims_to_operand_dims):
        column = index[..., k]
        if _clips(call.eqn.params["mode"]):
            column = jnp.clip(column, 0, whole[d] - _update_window(call.eqn, d))
        if sharded[d]:
            column, held = call.held(sharded[d], column, operand.shape[d])
            column = jnp.where(held, column, -1)
        columns.append(column)
    # XLA reads a slice of a slice without moving the inner start inside, as it does where an update
    # is dropped and the operand was itself cut from an array: the barrier keeps the two apart
    operand = lax.optimization_barrier(operand)
    return call.bind(
        [operand, jnp.stack(columns, axis=-1), update],
        mode=lax.GatherScatterMode.FILL_OR_DROP,
        indices_are_sorted=False,
        unique_indices=False,
    )


def _update_window(eqn: JaxprEqn, dim: int) -> int:
    """Return how many elements along operand `dim` one update writes."""
    numbers = eqn.params["dimension_numbers"]
    if dim in numbers.inserted_window_dims:
        return 1
    windows = _window_dims(eqn, numbers.inserted_window_dims)
    place = numbers.update_window_dims[windows.index(dim)]
    return int(operand_shapes(eqn)[2][place])


def _dynamic_slice_rule(eqn: JaxprEqn) -> ShardingRule:
    """Return the rule of a slice at a computed start.

    Whole dims are parallel; a dim cut to one element is a reduction, looked up where it is held.
    """
    shapes = operand_shapes(eqn)
    sizes = eqn.params["slice_sizes"]
    factors = Factors()
    operand: list[Dim] = []
    result: list[Dim] = []
    for size, total in zip(sizes, shapes[0]):
        if size == total:
            operand.append(factors.new(total))
            result.append(operand[-1])
        else:
            dtype = dtype_of(eqn.outvars[0])
            operand.append(_looked_up(factors, total, dtype) if size == 1 else ())
            result.append(())
    starts: list[list[Dim]] = [[()] * len(shape) for shape in shapes[1:]]
    return factors.rule([operand, *starts], [result])


def _run_dynamic_slice(call: LocalCall) -> list[Array]:
    operand, *starts = call.operands
    whole, sizes = operand_shapes(call.eqn)[0], list(call.eqn.params["slice_sizes"])
    owned: Array | None = None
    for d, local in enumerate(operand.shape):
        axes = call.operand_axes(0, d)
        if sizes[d] == whole[d]:
            sizes[d] = local
        elif axes:
            start = jnp.clip(starts[d].astype(_index_dtype(starts[d].dtype)), 0, whole[d] - 1)
            starts[d], held = call.held(axes, start, local)
            owned = held if owned is None else owned & held
    (found,) = call.bind([operand, *starts], slice_sizes=tuple(sizes))
    return [found if owned is None else jnp.where(owned, found, jnp.zeros_like(found))]


def _dynamic_update_slice_rule(eqn: JaxprEqn) -> ShardingRule:
    """Return the rule of an update at a computed start.

    Whole dims are parallel, and so is a dim of which one element is written: the device that holds
    it writes it.
    """
    shapes = operand_shapes(eqn)
    factors = Factors()
    operand: list[Dim] = []
    update: list[Dim] = []
    for total, size in zip(shapes[0], shapes[1]):
        operand.append(factors.new(total) if size in (total, 1) else ())
        update.append(operand[-1] if size == total else ())
    starts: list[list[Dim]] = [[()] * len(shape) for shape in shapes[2:]]
    return factors.rule([operand, update, *starts], [operand])


def _run_dynamic_update_slice(call: LocalCall) -> list[Array]:
    operand, update, *starts = call.operands
    whole, written = operand_shapes(call.eqn)[:2]
    owned: Array | None = None
    for d, local in enumerate(operand.shape):
        axes = call.operand_axes(0, d)
        if axes and written[d] != whole[d]:
            start = jnp.clip(starts[d].astype(_index_dtype(starts[d].dtype)), 0, whole[d] - 1)
            starts[d], held = call.held(axes, start, local)
            owned = held if owned is None else owned & held
    if owned is not None:
        current = lax.dynamic_slice(operand, starts, update.shape)
        update = jnp.where(owned, update, current)
    return call.bind([operand, update, *starts])


def _indices(_: JaxprEqn) -> tuple[int, ...]:
    """Return the operand of a gather or scatter that holds its indices."""
    return (1,)


def _read_starts(eqn: JaxprEqn) -> list[int]:
    return _starts(1, shape_of(eqn.outvars[0]), shape_of(eqn.invars[0]))


def _written_starts(eqn: JaxprEqn) -> list[int]:
    return _starts(2, shape_of(eqn.invars[1]), shape_of(eqn.invars[0]))


def _starts(first: int, sizes: Sequence[int], whole: Sequence[int]) -> list[int]:
    """Return the operands, from `first` on one per dim, that are starts of dims not taken whole."""
    return [first + d for d, size in enumerate(sizes) if size < whole[d]]


def _scatter(name: str) -> Operator:
    linear = not name.endswith(("mul", "min", "max"))
    return Operator(
        _scatter_rule,
        _run_scatter,
        linear_in=((0, 2),) if linear else (),
        indices=_indices,
        written=2,
        flops=operand_elements(2),
        bytes=operand_bytes(2, 3),
        heavy=True,
        liveness="written",
    )


OPERATORS = {
    "gather": Operator(
        _gather_rule,
        _run_gather,
        linear_in=FIRST,
        indices=_indices,
        flops=nothing,
        bytes=copied_results,
        heavy=True,
        liveness="gathered",
    ),
    "dynamic_slice": Operator(
        _dynamic_slice_rule,
        _run_dynamic_slice,
        linear_in=FIRST,
        indices=_read_starts,
        flops=nothing,
        bytes=copied_results,
        liveness="fused",
    ),
    "dynamic_update_slice": Operator(
        _dynamic_update_slice_rule,
        _run_dynamic_update_slice,
        linear_in=((0, 1),),
        indices=_written_starts,
        written=1,
        flops=nothing,
        bytes=operand_bytes(1, 2),
        liveness="written",
    ),
} | {name: _scatter(name) for name in SCATTERS}
