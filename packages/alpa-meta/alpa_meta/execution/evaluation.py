"""A planned step without its backward: what it returns beside its new state, on the same meshes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import jax
import numpy as np
from attrs import evolve

from alpa_meta.compat import ClosedJaxpr, Literal, Var
from alpa_meta.execution.executable import Executable
from alpa_meta.execution.ray_meshes import RayPool
from alpa_meta.execution.tasks import build_tasks
from alpa_meta.inter_op.staging import Staging
from alpa_meta.passes.added_equations import jaxpr_of
from alpa_meta.planning.chosen_plan import Planned
from alpa_meta.types import PyTree

SCHEDULE = "forward-only"
NOTHING = Literal(np.int32(0), jax.core.ShapedArray((), np.dtype(np.int32)))
"""Stands for an output that is not computed."""


T = TypeVar("T")


class Evaluation:
    """The evaluation of a planned step, compiled: its microbatches pass forward through the stages
    of the step's own plan."""

    def __init__(self, planned: Planned, trace: str, pool: RayPool | None = None) -> None:
        evaluated, self.computed = forward_only(planned)
        self.executable = Executable(evaluated, trace=trace, donate=False, pool=pool)

    def __call__(self, inputs: Sequence[PyTree]) -> list[PyTree]:
        """Return the array leaves of the result, None for those that are not computed."""
        return self.executable(inputs, self.computed)


def forward_only(planned: Planned) -> tuple[Planned, tuple[bool, ...]]:
    """Return the plan of the evaluation of a step, and which outputs of its program it computes.

    Those are the outputs that replace no input and depend on no equation of the backward pass. The
    rest are not computed: new state is the old one, others are nothing.
    """
    program, staging = planned.program, planned.staging
    jaxpr = program.jaxpr
    producer = {var: k for k, eqn in enumerate(staging.eqns) for var in eqn.outvars}
    needed: set[int] = set()
    computed: list[bool] = []
    outvars: list[Var | Literal] = []
    for atom, alias in zip(jaxpr.outvars, program.aliases, strict=True):
        if alias is not None:
            computed.append(True)
            outvars.append(jaxpr.invars[alias])
            continue
        found = _ancestors([atom], staging, producer)
        computed.append(found is not None)
        outvars.append(atom if found is not None else NOTHING)
        needed |= found or set()
    needed |= _ancestors(list(program.totals.values()), staging, producer) or set()
    closed = ClosedJaxpr(
        jaxpr_of(jaxpr, list(jaxpr.constvars), jaxpr.invars, outvars, list(jaxpr.eqns)),
        program.closed.consts,
    )
    program = evolve(program, closed=closed)
    staging = _only(staging, sorted(needed))
    tasks = build_tasks(program, staging)
    alive = (1,) * planned.plan.num_stages
    stages = evolve(planned.plan.stage_plan, schedule=SCHEDULE, in_flight=alive)
    plan = evolve(planned.plan, stage_plan=stages, tasks=tasks.graph)
    return evolve(planned, plan=plan, program=program, staging=staging, tasks=tasks), tuple(
        computed
    )


def _ancestors(
    atoms: Sequence[Var | Literal], staging: Staging, producer: dict[Var, int]
) -> set[int] | None:
    """Return the equations that `atoms` depend on, None if one is of the backward pass."""
    found: set[int] = set()
    pending = [producer[a] for a in atoms if not isinstance(a, Literal) and a in producer]
    while pending:
        k = pending.pop()
        if k in found:
            continue
        if staging.phases[k] == "backward":
            return None
        found.add(k)
        read = [a for a in staging.eqns[k].invars if not isinstance(a, Literal)]
        pending += [producer[a] for a in read if a in producer]
    return found


def _only(staging: Staging, kept: list[int]) -> Staging:
    def of(values: tuple[T, ...]) -> tuple[T, ...]:
        return tuple(values[k] for k in kept)

    return evolve(
        staging,
        eqns=of(staging.eqns),
        phases=of(staging.phases),
        stages=of(staging.stages),
        layers=of(staging.layers),
        levels=of(staging.levels),
        by_weight=None,
        forward_only=True,
    )
