"""The price of pipelines whose stages, microbatches and schedules are given."""

from __future__ import annotations

import math
from collections.abc import Sequence

from attrs import evolve

from alpa_interchange.menu import JointPlan, JointProblem
from stage_dp.device_pool import DevicePool
from stage_dp.fixed_stages import Known, fixed_stages
from stage_dp.infeasibility import InfeasibleError
from stage_dp.interleaved_chain import InterleavedChains
from stage_dp.joint_costs import CountCosts
from stage_dp.joint_links import Links
from stage_dp.joint_plan import plan_of
from stage_dp.joint_sweep import Space
from stage_dp.menu_table import MenuTable, Sequences
from stage_dp.schedules import SCHEDULE_RULES

FREE_MEMORY = 1e30  # bytes; sums stay finite


def price_stages(
    problem: JointProblem,
    stages: Sequence[tuple[int, int, int]],
    num_microbatches: int,
    schedule: str,
    *,
    num_meshes: int | None = None,
    any_memory: bool = False,
) -> JointPlan:
    """Return the pipeline of these stages (first layer, stop, mesh) with the best rows found.

    Its bound is 0: nothing is proven. `num_meshes`: submeshes of an interleaved schedule, each of
    which runs several stages on one mesh of the menu. `any_memory`: devices have as much as it
    takes. Raises InfeasibleError where no rows fit, or the stages do not fit on the devices.
    """
    if any_memory:
        free = tuple(evolve(group, memory=FREE_MEMORY) for group in problem.device_groups)
        problem = evolve(problem, device_groups=free)
    best = best_known(problem, [Known(tuple(stages), num_microbatches, schedule, num_meshes)])
    if best is None:
        raise InfeasibleError(
            f"no rows of the menu run the {len(stages)} given stages with {num_microbatches} "
            f"microbatches under {schedule!r} within the memory"
        )
    return best


def best_known(problem: JointProblem, known: Sequence[Known]) -> JointPlan | None:
    """Return the fastest of some pipelines, with the best rows found, None if none fits; its bound
    is 0."""
    floorless = tuple(evolve(mesh, floors=()) for mesh in problem.menu.meshes)
    problem = evolve(problem, menu=evolve(problem.menu, meshes=floorless))
    links, sequences = Links(problem), Sequences(problem.menu.class_of_layer)
    pool = DevicePool(problem.device_groups, list(dict.fromkeys(links.submeshes)))
    space = Space.of(sequences, problem.menu.num_layers, pool, False)
    costs: dict[int, CountCosts] = {}
    best, limit = None, math.inf
    for one in known:
        count, rule = one.num_microbatches, SCHEDULE_RULES[one.schedule]
        if count not in costs:
            costs[count] = CountCosts(MenuTable(problem, count), space)
        if rule.interleaves:
            chains = InterleavedChains(costs[count], links)
            found = chains.of_stages(one.stages, one.num_meshes, limit)
        else:
            found = fixed_stages(one.stages, costs[count], rule, links, limit)
        if found is not None and found.step_seconds < limit:
            best, limit = found, found.step_seconds
    return None if best is None else plan_of(best, problem, links, 0.0, ())
