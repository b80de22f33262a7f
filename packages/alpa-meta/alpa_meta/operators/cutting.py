"""Operators that cut, pad, join or reverse along dims of their operands.

A dim that the operator leaves alone is parallel. One that it cuts, pads, joins or reverses may be
sharded where the number of devices divides its size in every operand and result: the devices then
exchange the pieces that they need (`rules.moves`). Taking every n-th element, or putting zeros
between elements, moves none where the sizes are those of n elements for one.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
from attrs import frozen
from jax import Array

from alpa_interchange import LogicalMesh, ShardingRule, Strategy
from alpa_meta.compat import JaxprEqn, dtype_of, shape_of
from alpa_meta.operators.moves import Piece, Run, exchanges, move, pieces, reversal
from alpa_meta.operators.operator import (
    FIRST,
    Dim,
    Factors,
    LocalCall,
    Operator,
    always,
    jointly,
    operand_shapes,
    result_shapes,
    same_params,
)
from alpa_meta.operators.work import copied_results, nothing
from alpa_meta.types import Params


def _tensors(eqn: JaxprEqn) -> list[tuple[int, ...]]:
    """Return the shapes of the operands, but for the value that is padded with."""
    shapes = operand_shapes(eqn)
    return shapes[:1] if eqn.primitive.name == "pad" else shapes


def _moving_dims(eqn: JaxprEqn) -> set[int]:
    """Return the dims along which elements change their place."""
    name, params = eqn.primitive.name, eqn.params
    if name == "rev":
        return set(params["dimensions"])
    if name == "concatenate":
        return {params["dimension"]}
    if name == "split":
        return {params["axis"]}
    if name == "pad":
        return {d for d, amount in enumerate(params["padding_config"]) if any(amount)}
    before, after = operand_shapes(eqn)[0], result_shapes(eqn)[0]
    return {d for d in range(len(before)) if before[d] != after[d]}


def _spacing(eqn: JaxprEqn, dim: int) -> tuple[int, int]:
    """Return the first place and the distance of the elements taken out, or padded with zeros."""
    if eqn.primitive.name == "pad":
        low, _, between = eqn.params["padding_config"][dim]
        return int(low), int(between) + 1
    if eqn.primitive.name == "slice":
        strides = eqn.params["strides"]
        return int(eqn.params["start_indices"][dim]), int(strides[dim]) if strides else 1
    return 0, 1


def _sizes(eqn: JaxprEqn, dim: int) -> tuple[list[int], list[int]]:
    """Return the sizes of `dim` in the operands and in the results."""
    return [shape[dim] for shape in _tensors(eqn)], [shape[dim] for shape in result_shapes(eqn)]


def _rule(eqn: JaxprEqn) -> ShardingRule:
    factors, moving = Factors(), _moving_dims(eqn)
    keys = jnp.issubdtype(dtype_of(eqn.outvars[0]), jax.dtypes.prng_key)
    operands: list[list[Dim]] = [[] for _ in _tensors(eqn)]
    results: list[list[Dim]] = [[] for _ in eqn.outvars]
    for d in range(len(_tensors(eqn)[0])):
        before, after = _sizes(eqn, d)
        sizes = before + after
        first, distance = _spacing(eqn, d)
        shared, kind = min(sizes), "parallel"
        if d in moving and (keys or shared == 0):
            shared = 1
        elif d in moving and distance == 1:
            shared, kind = math.gcd(*sizes), "permutation"
        elif d in moving and not (max(sizes) == shared * distance and 0 <= first < distance):
            shared = 1
        dim = factors.new(shared, kind)
        for size, dims in zip(sizes, operands + results, strict=True):
            dims.append(dim + factors.new(size // shared, "replicate") if dim else ())
    scalars: list[list[Dim]] = [[]] * (len(eqn.invars) - len(operands))
    return factors.rule(operands + scalars, results)


def _run(call: LocalCall) -> list[Array]:
    eqn, name = call.eqn, call.eqn.primitive.name
    sharded = {d: call.operand_axes(0, d) for d in sorted(_moving_dims(eqn))}
    across = [d for d, axes in sharded.items() if axes and _spacing(eqn, d)[1] == 1]
    filler = call.operands[1] if name == "pad" else 0
    if name in ("concatenate", "split") and across:
        values = [list(call.operands)] * len(eqn.outvars)
    else:
        values = [[value] for value in _run_alone(call, across)]
    for d in across:
        axes, count, sizes = sharded[d], call.shards(sharded[d]), _sizes(eqn, d)[1]
        values = [
            [move(call, parts, axes, d, moved, size // count, filler)]
            for parts, moved, size in zip(values, _pieces(eqn, d, count), sizes, strict=True)
        ]
    return [value for (value,) in values]


def _run_alone(call: LocalCall, across: list[int]) -> list[Array]:
    """Return what a device makes of its parts alone, elements along dims `across` left in place."""
    name, params = call.eqn.primitive.name, call.eqn.params
    if name == "pad":
        config = [
            (0, 0, 0) if d in across else amount
            for d, amount in enumerate(params["padding_config"])
        ]
        return call.bind(padding_config=tuple(config))
    if name == "slice":
        starts, stops = list(params["start_indices"]), list(params["limit_indices"])
        (value, *_), moving = call.operands, _moving_dims(call.eqn)
        for d, size in enumerate(value.shape):
            if d not in moving or call.operand_axes(0, d):
                starts[d], stops[d] = min(starts[d], size), size
            if d in across:
                starts[d] = 0
        return call.bind(start_indices=tuple(starts), limit_indices=tuple(stops))
    return call.bind()


def _pieces(eqn: JaxprEqn, dim: int, count: int) -> list[tuple[Piece, ...]]:
    """Return per result the pieces that `count` devices exchange along `dim`."""
    before, after = _sizes(eqn, dim)
    if eqn.primitive.name == "rev":
        return [reversal(before[0], count)]
    return [
        pieces(tuple(runs), tuple(before), size, count)
        for runs, size in zip(_runs(eqn, dim), after, strict=True)
    ]


def _runs(eqn: JaxprEqn, dim: int) -> list[list[Run]]:
    """Return per result the runs of the operands that it consists of along `dim`."""
    before, after = _sizes(eqn, dim)
    if eqn.primitive.name == "concatenate":
        places = itertools.accumulate(before, initial=0)
        return [[Run(k, 0, size, place) for k, (size, place) in enumerate(zip(before, places))]]
    if eqn.primitive.name == "split":
        places = itertools.accumulate(after, initial=0)
        return [[Run(0, place, size, 0)] for size, place in zip(after, places)]
    if eqn.primitive.name == "slice":
        return [[Run(0, _spacing(eqn, dim)[0], after[0], 0)]]
    low, high, _ = map(int, eqn.params["padding_config"][dim])
    kept = before[0] + min(low, 0) + min(high, 0)
    return [[Run(0, max(-low, 0), kept, max(low, 0))]]


def _exchanges(
    eqn: JaxprEqn, strategy: Strategy, mesh: LogicalMesh
) -> Iterator[tuple[str, float, tuple[str, ...]]]:
    """Yield kind, bytes per device and mesh axes of each collective."""
    for d in _moving_dims(eqn):
        axes = strategy.operands[0].dims[d]
        if not axes or _spacing(eqn, d)[1] != 1:
            continue
        before, after = _sizes(eqn, d)
        count = mesh.size(axes)
        for moved, var, spec in zip(
            _pieces(eqn, d, count), eqn.outvars, strategy.results, strict=True
        ):
            others = tuple(a for e, names in enumerate(spec.dims) if e != d for a in names)
            each = math.prod(shape_of(var)) // shape_of(var)[d] / mesh.size(others)
            for kind, elements in exchanges(moved, sum(before) // count, count):
                yield kind, each * elements * dtype_of(var).itemsize, axes


def _sliced_piece(eqn: JaxprEqn, length: int) -> Params:
    return {**eqn.params, "limit_indices": (length, *eqn.params["limit_indices"][1:])}


_cut = functools.partial(
    Operator, _rule, _run, exchanges=_exchanges, flops=nothing, liveness="fused"
)


def is_front(eqn: JaxprEqn, dim: int) -> bool:
    """Return whether an operator takes the first elements along a dim, and leaves the others."""
    return eqn.primitive.name == "slice" and _spacing(eqn, dim) == (0, 1)


@frozen
class Taken:
    """What an operator takes of its operand along `dim`: `size` elements from `start` on, every
    `stride`-th; of the other dims all."""

    dim: int
    start: int
    size: int
    stride: int


def taken(eqn: JaxprEqn) -> Sequence[Taken]:
    """Return what each result of a cut along one dim is of its operand, empty for anything else."""
    name, params = eqn.primitive.name, eqn.params
    if name == "split":
        places = itertools.accumulate(params["sizes"], initial=0)
        pairs = zip(places, params["sizes"])
        return [Taken(params["axis"], int(start), int(size), 1) for start, size in pairs]
    dims = _moving_dims(eqn) if name == "slice" else set()
    if len(dims) != 1:
        return []
    (dim,) = dims
    size, strides = result_shapes(eqn)[0][dim], params["strides"]
    stride = 1 if strides is None or size == 1 else strides[dim]
    return [Taken(dim, params["start_indices"][dim], size, stride)]


def joined_dim(eqn: JaxprEqn) -> int | None:
    """Return the dim along which an equation puts its operands one behind the other, a new one or
    not, if it does."""
    names = {"concatenate": "dimension", "stack": "axis"}
    name = names.get(eqn.primitive.name)
    return None if name is None else int(eqn.params[name])


def moved_blocks(eqn: JaxprEqn, dim: int, size: int) -> list[int] | None:
    """Return how many blocks of `size` elements along `dim` each result of a cut consists of, where
    blocks are moved whole; None where they are not, or nothing moves along that dim."""
    moves = rearrangement(eqn) is not None and dim in _moving_dims(eqn)
    if not moves or _spacing(eqn, dim)[1] != 1:
        return None
    before, after = _sizes(eqn, dim)
    places = [
        place
        for runs in _runs(eqn, dim)
        for run in runs
        for place in (run.start, run.length, run.target)
    ]
    if any(place % size for place in (*before, *after, *places)):
        return None
    return [length // size for length in after]


def params_of_parts(eqn: JaxprEqn, dim: int, count: int) -> Params:
    """Return the parameters of a cut that moves blocks along `dim`, on one of `count` equal parts
    of each block."""

    def part(numbers: Sequence[int]) -> tuple[int, ...]:
        return tuple(n // count if d == dim else n for d, n in enumerate(numbers))

    params = dict(eqn.params)
    if eqn.primitive.name == "split":
        params["sizes"] = tuple(size // count for size in params["sizes"])
    elif eqn.primitive.name == "slice":
        limits = params["limit_indices"]
        params.update(start_indices=part(params["start_indices"]), limit_indices=part(limits))
    elif eqn.primitive.name == "pad":
        config = list(params["padding_config"])
        low, high, between = config[dim]
        config[dim] = (low // count, high // count, between)
        params["padding_config"] = tuple(config)
    return params


REARRANGEMENTS = {"slice": "part", "pad": "padded", "concatenate": "joined", "split": "parts"}


def rearrangement(eqn: JaxprEqn) -> str | None:
    """Return how an operator's results hold elements of its operands along a dim: a "part" of them,
    "padded", "joined" one behind the other, in "parts"; None if it does none of it."""
    return REARRANGEMENTS.get(eqn.primitive.name)


OPERATORS = {
    "slice": _cut(
        linear_in=FIRST,
        order_survives=always,
        bytes=copied_results,
        piece_params=_sliced_piece,
    ),
    "pad": _cut(linear_in=jointly, apart=True, piece_params=same_params),
    "rev": _cut(linear_in=FIRST, order_survives=always, piece_params=same_params),
    "concatenate": _cut(linear_in=jointly, apart=True, piece_params=same_params),
    "split": _cut(linear_in=FIRST, liveness="stored", piece_params=same_params),
}
