"""The plan of one task: strategies from the stage's solution, added equations follow their
value."""

from __future__ import annotations

from collections.abc import Mapping

from alpa_interchange import ShardingSpec, Strategy
from alpa_meta.compat import Atom, JaxprEqn, Literal, Var, shape_of
from alpa_meta.execution.tasks import Task
from alpa_meta.operators import sharding_rule
from alpa_meta.spmd import JaxprPlan, RegionPlan


def task_plan(
    task: Task,
    specs: Mapping[Var, ShardingSpec],
    strategies: Mapping[JaxprEqn, Strategy | RegionPlan],
) -> JaxprPlan:
    """Return the plan of a task: `strategies` of equations, `specs` of values.

    Equations that were added for accumulation keep the sharding of the value they follow; sums
    that were left partial are completed before they leave the update.
    """
    complete = task.spec.phase == "update"
    chosen: list[Strategy | RegionPlan] = []
    for position, eqn in enumerate(task.eqns):
        if position in task.follows:
            chosen.append(_following(eqn, specs[task.follows[position]]))
        else:
            chosen.append(strategies[eqn])
    return JaxprPlan(
        tuple(specs[var] for var in task.invars),
        tuple(chosen),
        tuple(ShardingSpec(specs[var].dims) if complete else specs[var] for var in task.outvars),
    )


def _following(eqn: JaxprEqn, spec: ShardingSpec) -> Strategy:
    rule = sharding_rule(eqn)
    rank = len(spec.dims)
    assignment: dict[str, tuple[str, ...]] = {}
    if rule is not None:
        for dim, axes in zip(rule.results[0], spec.dims, strict=True):
            if dim and axes:
                assignment[dim[0]] = axes

    def keep(atom: Atom) -> ShardingSpec:
        same = len(shape_of(atom)) == rank and rank
        if same or (not rank and not isinstance(atom, Literal)):
            return spec
        return ShardingSpec.replicated(len(shape_of(atom)))

    return Strategy(
        assignment=tuple(sorted(assignment.items())),
        operands=tuple(keep(atom) for atom in eqn.invars),
        results=tuple(spec for _ in eqn.outvars),
    )
