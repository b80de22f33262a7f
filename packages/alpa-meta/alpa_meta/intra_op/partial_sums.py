"""Sums that an operator leaves partial: which may stay so, and what completing them costs."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import numpy as np

from alpa_meta.compat import (
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
    closed,
    is_drop,
    open_jaxpr,
    scan_counts,
    shape_of,
)
from alpa_meta.intra_op.mesh_costs import Completed, MeshCosts
from alpa_meta.intra_op.stage_problem import Source, StageEqns
from alpa_meta.operators import linear_operands
from alpa_meta.operators.regions import is_region
from alpa_meta.program_caches import cached_by_program

if TYPE_CHECKING:
    pass


@cached_by_program(16)  # stages are on many meshes
def may_stay_partial(stage: StageEqns) -> frozenset[Var]:
    """Return the values that may remain unreduced sums until the update.

    Accumulated gradients, and values that reach them through linear operators only. What other
    stages read is sent complete.
    """
    if stage.num_microbatches == 1:
        return frozenset()
    before_update = [
        eqn for eqn, phase in zip(stage.eqns, stage.phases, strict=True) if phase != "update"
    ]
    read = stage.joined | stage.sent
    return _reaching(before_update, stage.accumulated - stage.joined, read)


def may_leave_partial(jaxpr: Jaxpr, leaving: Collection[int]) -> frozenset[Var]:
    """Return the values of a region's body that may remain unreduced sums until its end.

    The outputs numbered in `leaving`, and values that reach them through linear operators only.
    """
    seeds: set[Var] = set()
    read: set[Var] = set()
    for number, atom in enumerate(jaxpr.outvars):
        if not isinstance(atom, Literal):
            (seeds if number in leaving else read).add(atom)
    return _reaching(jaxpr.eqns, seeds, read)


def summed_carries(eqn: JaxprEqn) -> frozenset[int]:
    """Return the numbers of a scan's carries that may remain unreduced sums until its end.

    Those that a body only adds to, and passes on to such carries or to scanned outputs.
    """
    num_consts, num_carry, _ = scan_counts(eqn)
    jaxpr = open_jaxpr(closed(eqn.params["jaxpr"]))
    carried = jaxpr.invars[num_consts : num_consts + num_carry]
    made = {var for inner in jaxpr.eqns for var in inner.outvars}
    found = {
        number
        for number, (outer, after) in enumerate(
            zip(eqn.invars[num_consts:], jaxpr.outvars[:num_carry], strict=False)
        )
        if not isinstance(outer, Literal) and not isinstance(after, Literal) and after in made
    }
    size = -1
    while len(found) != size:
        size = len(found)
        allowed = may_leave_partial(jaxpr, {*found, *range(num_carry, len(jaxpr.outvars))})
        found = {n for n in found if carried[n] in allowed and jaxpr.outvars[n] in allowed}
    return frozenset(found)


def _reaching(
    eqns: Sequence[JaxprEqn], seeds: Collection[Var], read: Collection[Var] = ()
) -> frozenset[Var]:
    """Return the `seeds` that nothing else reads, and what reaches them through linear operators
    only; `read` values are read by others."""
    allowed, blocked = set(seeds), set(read)
    for eqn in reversed(eqns):
        outputs = [var for var in eqn.outvars if not is_drop(var)]
        passes = (
            bool(outputs)
            and all(var in allowed and var not in blocked for var in outputs)
            and not is_region(eqn)
            and linear_operands(eqn)
        )
        for atom in eqn.invars:
            if isinstance(atom, Literal) or not shape_of(atom):
                continue
            (allowed if passes else blocked).add(atom)
    return frozenset(allowed - blocked)


def completions(costs: MeshCosts, natural: Source, allowed: bool, late: bool) -> Completed:
    """Return the specs sums can be completed in, and what that takes, remembered, at its own size
    and at others.

    `allowed` sums may also stay partial; `late` ones travel in buckets.
    """
    number = costs.number(natural.specs)
    key = (number, natural.shape, natural.bytes, natural.other_bytes, allowed, late)
    known = costs.completed.get(key)
    if known is None:
        found = costs.layouts.completions(number, natural.shape, allowed)
        matrices = []
        for size in (natural.bytes, *natural.other_bytes):
            seconds = np.zeros(len(found.rows))
            found.steps.added_to(
                seconds,
                [
                    costs.collective_seconds(kind, size / parts, axes, in_buckets=late)
                    for kind, parts, axes in found.steps.distinct
                ],
            )
            matrix = np.full((len(natural.specs), len(found.finals)), math.inf)
            matrix[found.rows, found.columns] = seconds
            matrices.append(matrix)
        known = costs.completed[key] = Completed(found.finals, tuple(matrices))
    return known
