"""One search over layer ranges, meshes, rows per layer, microbatch counts and schedules."""

from __future__ import annotations

import math

from alpa_interchange.menu import JointPlan, JointProblem, JointStage, TriedCount
from stage_dp.cell_fronts import Fronts
from stage_dp.device_pool import DevicePool
from stage_dp.infeasibility import InfeasibleError
from stage_dp.joint_chain import Scored
from stage_dp.joint_enumeration import Budget, Enumeration
from stage_dp.joint_links import Links
from stage_dp.joint_schedules import RULES
from stage_dp.menu_table import BACKWARD, FORWARD, STEP, WEIGHT, MenuTable, Sequences


def microbatch_counts(batch_size: int) -> tuple[int, ...]:
    """Return the divisors of `batch_size` that are powers of two, and it divided by them."""
    powers = [1 << k for k in range(batch_size.bit_length()) if batch_size % (1 << k) == 0]
    return tuple(sorted({*powers, *(batch_size // p for p in powers)}))


def solve_joint(problem: JointProblem) -> JointPlan:
    counts = problem.counts or microbatch_counts(problem.batch_size)
    links = Links(problem)
    sequences = Sequences(problem.menu.class_of_layer)
    pool = DevicePool(problem.device_groups, list(dict.fromkeys(links.submeshes)))
    best: Scored | None = None
    budget = Budget(10**9)
    for count in counts:
        table = MenuTable(problem, count)
        fronts = Fronts(table, sequences, 10**9)
        for name in problem.schedules:
            limit = best.step_seconds if best else math.inf
            found, complete = Enumeration(
                table, RULES[name], fronts, pool, links, budget, limit
            ).run()
            best = found or best
    if best is None:
        raise InfeasibleError("no pipeline fits in memory")
    return plan_of(best, problem, links, best.step_seconds, ())


def plan_of(
    best: Scored,
    problem: JointProblem,
    links: Links,
    lower_bound: float,
    tried: tuple[TriedCount, ...],
) -> JointPlan:
    """Return the plan with its stages placed."""
    devices = links.placed([s.mesh for s in best.stages]) or ()
    crossing = (*best.crossing, 0.0)
    stages = tuple(
        JointStage(
            layer_start=s.layer_start,
            layer_stop=s.layer_stop,
            mesh=s.mesh,
            rows=s.rows,
            device_ids=ids,
            forward_seconds=float(s.columns[FORWARD]),
            backward_seconds=float(s.columns[BACKWARD]),
            weight_seconds=float(s.columns[WEIGHT]),
            step_seconds=float(s.columns[STEP]),
            boundary_seconds=c,
        )
        for s, ids, c in zip(best.stages, devices, crossing, strict=True)
    )
    return JointPlan(
        stages=stages,
        num_microbatches=best.num_microbatches,
        schedule=best.rule.name,
        step_seconds=best.step_seconds,
        lower_bound=lower_bound,
        peak_bytes=tuple(s.need(k) for s, k in zip(best.stages, best.in_flight, strict=True)),
        in_flight=best.in_flight,
        tried=tried,
    )
