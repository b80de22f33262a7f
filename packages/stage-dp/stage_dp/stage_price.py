"""The price of a pipeline whose stages, microbatches and schedule are given."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import evolve

from alpa_interchange.menu import JointPlan, JointProblem
from stage_dp.device_pool import DevicePool
from stage_dp.fixed_stages import fixed_stages
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
    links, rule = Links(problem), SCHEDULE_RULES[schedule]
    table = MenuTable(problem, num_microbatches)
    pool = DevicePool(problem.device_groups, list(dict.fromkeys(links.submeshes)))
    sequences = Sequences(problem.menu.class_of_layer)
    costs = CountCosts(table, Space.of(sequences, problem.menu.num_layers, pool, False))
    if rule.interleaves:
        best = InterleavedChains(costs, links).of_stages(stages, num_meshes)
    else:
        best = fixed_stages(stages, costs, rule, links)
    if best is None:
        raise InfeasibleError(
            f"no rows of the menu run the {len(stages)} given stages with {num_microbatches} "
            f"microbatches under {schedule!r} within the memory"
        )
    return plan_of(best, problem, links, 0.0, ())
