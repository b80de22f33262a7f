"""What a slice of the tokens takes: the work of its rows with the keys up to its end.

Every operator is priced on what a slice holds of its operands and results, by the cost model that
prices it for a plan. Of a product with few rows tiles are partly empty, and fewer of them than a
device has units: its rate is that of the whole one times the ratio of what their shapes reach. On
one device: a plan's own seconds say how a stage compares with that.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
from attrs import evolve, frozen
from numpy.typing import NDArray

from alpa_meta.compat import Atom, JaxprEqn, Literal, shape_of
from alpa_meta.inter_op.layering import tensor_bytes
from alpa_meta.intra_op.arithmetic import arithmetic
from alpa_meta.intra_op.mesh_costs import MeshCosts
from alpa_meta.operators import flops, kernel_kind, traffic_bytes
from alpa_meta.operators.contraction import product_dims
from alpa_meta.token_slices.places import KEY, ROW, Layout, kinds
from alpa_meta.token_slices.values import (
    AFTER,
    Added,
    Analysis,
    Blocks,
    Branches,
    KeyBlocks,
    Known,
    Moved,
    MovedKeys,
    Recomputed,
    Region,
    Running,
    Sliced,
    TokenLoop,
    Window,
    WindowSum,
)

Array = NDArray[np.float64]
_KINDS = (frozenset[str](), frozenset({ROW}), frozenset({KEY}), frozenset({ROW, KEY}))


@frozen
class _Work:
    """The work of an operator: `held` are its bytes by what holds them (`_KINDS`), `each` says by
    what a slice has fewer of it, those of the loops over blocks around."""

    kernel: str
    dtype: str
    flops: float
    of: frozenset[str]
    held: tuple[float, ...]
    product: tuple[tuple[int, frozenset[str]], ...] = ()  # its batch, m, n, k, and what holds each
    each: frozenset[str] = frozenset()


def slice_seconds(analysis: Analysis, costs: MeshCosts, num_cells: int) -> Array:
    """Return [num_cells + 1, num_cells + 1] the seconds, forward and backward, of cells i..j of the
    tokens (i < j, others are 0), where a sequence has `num_cells` equal ones."""
    start, stop = np.meshgrid(np.arange(num_cells + 1), np.arange(num_cells + 1), indexing="ij")
    rows, keys = np.maximum(stop - start, 0) / num_cells, stop / num_cells
    share = dict(zip(_KINDS, (np.ones_like(rows), rows, keys, rows * keys), strict=True))
    total = np.zeros_like(rows)
    work: Counter[_Work] = Counter()
    for one, times in _work(analysis, costs.platform, 1):
        work[one] += times
    for one, times in work.items():
        amount = one.flops * share[one.of]
        moved = sum(size * share[of] for size, of in zip(one.held, _KINDS, strict=True))
        if one.kernel == "elementwise":
            found = np.asarray(moved) / costs.model.device(costs.host_group).memory_bandwidth
        else:
            group = costs.host_group
            if one.product:
                amount = amount * _slowed(one, share, costs, start < stop)
            found = costs.model.compute_seconds(
                amount, moved, one.dtype, one.kernel, host_group=group
            )
        total += times * share[one.each] * found
    return np.where(start < stop, total, 0.0)


def _slowed(
    work: _Work, share: dict[frozenset[str], Array], costs: MeshCosts, used: NDArray[np.bool_]
) -> Array:
    """Return [start, stop] how much longer a flop of a product takes in a slice than in the
    whole."""

    @functools.cache
    def rate(shape: tuple[int, ...]) -> float:
        found = (
            float(
                costs.model.compute_seconds(
                    amount, 0.0, work.dtype, "matmul", shape, host_group=costs.host_group
                )
            )
            for amount in (2e9, 1e9)
        )
        return next(found) - next(found)  # without the launch

    whole = rate(tuple(size for size, _ in work.product))
    sizes = np.stack([np.maximum(1, np.round(size * share[of])) for size, of in work.product], -1)
    slowed = np.ones(used.shape)
    shapes = sizes[used].astype(int).tolist()
    slowed[used] = [rate(tuple(shape)) / whole for shape in shapes]
    return slowed


def _work(analysis: Analysis, platform: str, times: int) -> Iterator[tuple[_Work, int]]:
    """Yield the work of all operators that slices run, and how often."""
    eqns = analysis.closed.jaxpr.eqns
    for eqn, decision, sweep in zip(eqns, analysis.decisions, analysis.sweeps, strict=True):
        if sweep == AFTER:
            continue
        if isinstance(decision, Region):
            trips = int(eqn.params["length"]) if decision.is_scan else 1
            yield from _work(decision.body, platform, times * trips)
        elif isinstance(decision, Blocks):
            for work, often in _work(decision.body, platform, int(eqn.params["length"])):
                yield evolve(work, each=work.each | {ROW}), times * often
        elif isinstance(decision, KeyBlocks):
            for work, often in _work(decision.body, platform, int(eqn.params["length"])):
                yield evolve(work, each=work.each | {KEY}), times * often
        elif isinstance(decision, Branches):
            for one in decision.bodies:  # any may be taken: all are priced, as in a plan
                yield from _work(one, platform, times)
        elif isinstance(decision, TokenLoop | Running | Window | WindowSum | Moved):
            again = isinstance(decision, TokenLoop | Running) and decision.again
            yield _scaled(eqn, platform, frozenset({KEY if again else ROW})), times
        elif isinstance(decision, MovedKeys):
            yield _scaled(eqn, platform, frozenset({ROW, KEY})), times
        elif isinstance(decision, Added | Recomputed):
            yield _scaled(eqn, platform, frozenset()), times
        elif isinstance(decision, Sliced):
            reading = decision.reading
            yield _placed(eqn, platform, reading.operands, reading.results), times
            if reading.combined:  # added to what the slices before made
                made = sum(map(tensor_bytes, eqn.outvars))
                added = [0.0, 0.0, 0.0, 0.0]
                added[_KINDS.index(frozenset().union(*map(kinds, reading.results)))] = 3.0 * made
                yield _Work("elementwise", "", 0.0, frozenset(), tuple(added)), times
        elif isinstance(decision, Known):
            layouts = [analysis.value(var).layout for var in eqn.outvars]
            if any(map(any, layouts)):
                yield _scaled(eqn, platform, frozenset().union(*map(kinds, layouts))), times


def _scaled(eqn: JaxprEqn, platform: str, of: frozenset[str]) -> _Work:
    """Return the work of an operator of which a slice has the share of rows or keys."""
    dtype, passes = arithmetic(eqn, platform)
    held = [0.0, 0.0, 0.0, 0.0]
    held[_KINDS.index(of)] = traffic_bytes(eqn)
    return _Work(kernel_kind(eqn), dtype, passes * flops(eqn), of, tuple(held))


def _placed(
    eqn: JaxprEqn, platform: str, operands: Sequence[Layout], results: Sequence[Layout]
) -> _Work:
    """Return the work of an operator, its bytes by the layouts of operands and results."""
    dtype, passes = arithmetic(eqn, platform)
    sizes = np.zeros(4)
    atoms: list[Atom] = [*eqn.invars, *eqn.outvars]
    for atom, layout in zip(atoms, (*operands, *results), strict=True):
        if not isinstance(atom, Literal):
            sizes[_KINDS.index(frozenset(kinds(layout)))] += tensor_bytes(atom)
    if sizes.sum():
        sizes *= traffic_bytes(eqn) / sizes.sum()
    of = frozenset().union(*map(kinds, (*operands, *results)))
    held = tuple(float(size) for size in sizes)
    kernel, product = kernel_kind(eqn), _product(eqn, operands)
    return _Work(kernel, dtype, passes * flops(eqn), of, held, product)


def _product(eqn: JaxprEqn, operands: Sequence[Layout]) -> tuple[tuple[int, frozenset[str]], ...]:
    """Return the sizes batch, m, n, k of a product, and what of the tokens holds each."""
    paired = product_dims(eqn)
    if paired is None:
        return ()
    contracted, batch = paired
    dims = []
    for atom, layout, summed, shared in zip(eqn.invars, operands, contracted, batch, strict=True):
        shape = shape_of(atom)
        free = [d for d in range(len(shape)) if d not in (*summed, *shared)]
        for group in (shared, free, summed):
            held = frozenset().union(*(kinds((layout[d],)) for d in group))
            dims.append((math.prod(shape[d] for d in group), held))
    (outer, m, inner), (_, n, _) = dims[:3], dims[3:]
    return outer, m, n, inner
