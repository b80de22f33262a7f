"""The optimisation barriers of a program for accelerators, all of them: what each is for is said
where it is made."""

from __future__ import annotations

from attrs import evolve

from alpa_meta.execution.fences import with_fences
from alpa_meta.execution.own_constants import with_own_constants
from alpa_meta.execution.second_gathers import WORTH, with_second_gathers
from alpa_meta.execution.tasks import Task
from alpa_meta.planning.chosen_plan import Planned
from alpa_meta.spmd import JaxprPlan


def with_barriers(planned: Planned, task: Task, plan: JaxprPlan) -> tuple[Task, JaxprPlan]:
    """Return a task and its plan with the barriers that keep its memory as planned."""
    stage = planned.selections[task.spec.stage].stage
    phase_of = dict(zip(stage.eqns, stage.phases, strict=True))
    phases = [phase_of.get(eqn, "update") for eqn in task.eqns]
    mesh = planned.plan.shardings[task.spec.stage].mesh.logical
    least = WORTH * planned.plan.stage_plan.peak_bytes[task.spec.stage]
    eqns, plan, outvars, places = with_fences(task.eqns, plan, task.outvars, phases)
    eqns, plan = with_second_gathers(eqns, plan, task.invars, places, mesh, least)
    eqns, plan = with_own_constants(eqns, plan)
    return evolve(task, eqns=eqns, outvars=outvars), plan
