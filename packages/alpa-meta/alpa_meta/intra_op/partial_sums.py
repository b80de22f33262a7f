"""Sums that an operator leaves partial: which may stay so, and what completing them costs."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from alpa_interchange import ShardingSpec
from alpa_meta.compat import Literal, is_drop, subjaxprs
from alpa_meta.intra_op.bucketed_traffic import completion_steps
from alpa_meta.intra_op.mesh_costs import MeshCosts
from alpa_meta.intra_op.stage_problem import Source, StageEqns
from alpa_meta.rules import linear_operands
from alpa_meta.rules.operator import shape_of
from ilp_sharding.strategies import completed_specs


def may_stay_partial(stage: StageEqns) -> frozenset[Any]:
    """Return the values that may remain unreduced sums until the update.

    Accumulated gradients, and values that reach them through linear operators only.
    """
    if stage.num_microbatches == 1:
        return frozenset()
    allowed: set[Any] = set()
    blocked: set[Any] = set()
    for eqn, phase in zip(reversed(stage.eqns), reversed(stage.phases), strict=True):
        if phase == "update":
            continue
        outputs = [var for var in eqn.outvars if not is_drop(var)]
        for var in outputs:
            if var in stage.accumulated and var not in blocked:
                allowed.add(var)
        passes = (
            bool(outputs)
            and all(var in allowed for var in outputs)
            and not subjaxprs(eqn)
            and linear_operands(eqn)
        )
        for atom in eqn.invars:
            if isinstance(atom, Literal) or not shape_of(atom):
                continue
            if passes and atom not in blocked:
                allowed.add(atom)
            else:
                blocked.add(atom)
                allowed.discard(atom)
    return frozenset(allowed - blocked)


def completions(
    costs: MeshCosts, natural: Source, allowed: bool, late: bool
) -> tuple[tuple[ShardingSpec, ...], np.ndarray]:
    """Return the specs sums can be completed in, and [natural, completed] seconds, remembered.

    `allowed` sums may also stay partial; `late` ones travel in buckets.
    """
    key = (costs.number(natural.specs), natural.shape, natural.bytes, allowed, late)
    if key not in costs.completed:
        reachable = {
            spec: completed_specs(spec, natural.shape, costs.mesh, allowed)
            for spec in dict.fromkeys(natural.specs)
        }
        finals = tuple(dict.fromkeys(f for specs in reachable.values() for f in specs))
        position = {spec: number for number, spec in enumerate(finals)}
        matrix = np.full((len(natural.specs), len(finals)), math.inf)
        for row, spec in enumerate(natural.specs):
            for final in reachable[spec]:
                matrix[row, position[final]] = sum(
                    costs.collective_seconds(*sent, in_buckets=late)
                    for sent in completion_steps(costs.mesh, natural.bytes, spec, final)
                )
        costs.completed[key] = (finals, matrix)
    return costs.completed[key]
