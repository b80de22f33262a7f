"""Where a re-planned pipeline changes: with how much memory, on how fast a link.

A search takes some tenths of a second; to price a pipeline that is known, with the best rows for
the place, takes a hundredth. So pipelines are searched for at a few places, the far ends first, and
a threshold lies where another of those that were met is the best one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from attrs import evolve, frozen

import stage_dp
from alpa_interchange.menu import JointPlan, JointProblem
from alpa_meta.planning.menu_prices import near_counts, rows_of
from alpa_meta.planning.menu_problem import problem_of
from alpa_meta.planning.replanning import (
    Replanned,
    changed_cluster,
    choices,
    link_of,
    solved,
)
from stage_dp import Known

PRECISION = 0.02  # of a threshold on a link: predictions are no better
MEMORY_PRECISION = 0.005  # of the memory from which on a plan is looked for that needs more
BETTER = 1e-3  # by which a searched pipeline must be better than those met to count
REACH = 16.0  # times faster and slower links that thresholds are looked for on
ROUNDS = 3  # of looking for a threshold among those met, and for others beside it
MAX_THRESHOLDS = 4  # on memory, downwards from what there is
MAX_STEPS = 12  # downwards, most of them to other shardings of the same choices


@frozen(kw_only=True)
class Threshold:
    """Where a plan changes: with less than `value` of `what` it is `below`, else `above`.

    `value`: bytes of memory per device, or bytes/s of a link. A plan of None: none fits.
    `below_recompute`, `above_recompute`: what each layer of them computes again.
    """

    what: str
    value: float
    below: JointPlan | None
    above: JointPlan | None
    below_recompute: tuple[str, ...] = ()
    above_recompute: tuple[str, ...] = ()


def _threshold(
    found: Replanned, what: str, value: float, below: JointPlan | None, above: JointPlan | None
) -> Threshold:
    """Return a threshold of a re-planned pipeline, whose menu tells what layers recompute."""
    kinds = [
        () if plan is None else tuple(row.recomputation for row in rows_of(found.menu.menu, plan))
        for plan in (below, above)
    ]
    return Threshold(
        what=what,
        value=value,
        below=below,
        above=above,
        below_recompute=kinds[0],
        above_recompute=kinds[1],
    )


class _Met:
    """The pipelines met so far."""

    def __init__(self, found: Replanned) -> None:
        self.known = [found.base.known]
        self._add(found.plan)

    def _add(self, plan: JointPlan) -> None:
        one = Known.of(plan)
        if one not in self.known:
            self.known.append(one)

    def best(self, problem: JointProblem) -> JointPlan | None:
        """Return the best of them in a problem, None if none fits."""
        found = None
        for one in self.known:
            try:
                plan = stage_dp.price_stages(
                    problem,
                    one.stages,
                    one.num_microbatches,
                    one.schedule,
                    num_meshes=one.num_meshes,
                )
            except stage_dp.InfeasibleError:
                continue
            if found is None or plan.step_seconds < found.step_seconds:
                found = plan
        return found

    def searched(self, problem: JointProblem) -> JointPlan | None:
        """Return the best of all pipelines in a problem, which is then met; None if none fits."""
        starts = [one for one in self.known if one.num_microbatches in (problem.counts or ())]
        found = solved(problem, starts)
        if found is not None:
            self._add(found)
        return found


def memory_thresholds(found: Replanned) -> list[Threshold]:
    """Return the bytes per device at which a re-planned pipeline changes: where it would with more
    memory, then with less and less.

    A pipeline stays the best one until its fullest stage no longer fits: that is a threshold.
    """
    met = _Met(found)
    down = _downwards(found, met)
    if down and down[-1].below is not None:
        least = down[-1].below
        there = met.searched(_with_memory(found.problem, max(least.device_bytes)))
        if there is not None and there.step_seconds < least.step_seconds * (1 - BETTER):
            down = _downwards(found, met)
    return [*_upwards(found, met), *down]


def _downwards(found: Replanned, met: _Met) -> list[Threshold]:
    result: list[Threshold] = []
    above: JointPlan | None = found.plan
    for _ in range(MAX_STEPS):
        if above is None or len(result) == MAX_THRESHOLDS:
            break
        value = max(above.device_bytes)
        less = _with_memory(found.problem, value * (1 - 1e-6))
        below = met.best(less) or met.searched(less)
        if below is not None and below.step_seconds < above.step_seconds:
            if result:  # it is the better one with more memory, too
                last = result.pop()
                if last.above is None or choices(less, below) != choices(less, last.above):
                    result.append(_threshold(found, "memory", last.value, below, last.above))
        elif below is None or choices(less, below) != choices(less, above):
            result.append(_threshold(found, "memory", value, below, above))
        above = below
    return result


def _upwards(found: Replanned, met: _Met) -> Iterator[Threshold]:
    """Yield where a pipeline of the known ones that needs more memory would be better."""
    here = choices(found.problem, found.plan)
    everywhere = problem_of(found.menu, found.cluster, None, found.plan.num_microbatches)
    near = min(group.memory for group in found.problem.device_groups)
    far = max(group.device.memory for group in found.cluster.host_groups)
    if far <= near:
        return
    everywhere = evolve(found.problem, device_groups=everywhere.device_groups)
    above = met.best(_with_memory(everywhere, far))
    if above is None or choices(everywhere, above) == here:
        return
    while far / near > 1 + MEMORY_PRECISION:
        middle = math.sqrt(near * far)
        there = met.best(_with_memory(everywhere, middle))
        if there is None or choices(everywhere, there) == here:
            near = middle
        else:
            far, above = middle, there
    if above.step_seconds < found.plan.step_seconds:
        yield _threshold(found, "memory", max(above.device_bytes), found.plan, above)


def _with_memory(problem: JointProblem, most: float) -> JointProblem:
    return evolve(
        problem,
        device_groups=tuple(
            evolve(group, memory=min(group.memory, most)) for group in problem.device_groups
        ),
    )


def is_used(found: Replanned, link: str) -> bool:
    """Return whether devices are joined by a link of replanning.LINKS at all."""
    groups = found.cluster.host_groups
    if link == "inter-host":
        return any(group.num_hosts > 1 for group in groups)
    return link != "intra-host" or any(group.devices_per_host > 1 for group in groups)


def link_thresholds(found: Replanned, link: str) -> Iterator[Threshold]:
    """Yield the bytes/s of a link at which a re-planned pipeline changes next: below those of its
    cluster, and above."""
    if not is_used(found, link):
        return
    met = _Met(found)
    count = found.plan.num_microbatches

    def problem_at(bandwidth: float) -> JointProblem:
        there = changed_cluster(found.cluster, links={link: bandwidth})
        return near_counts(problem_of(found.menu, there, found.memory, count), count)

    now = link_of(found.cluster, link).bandwidth
    for reach in (1 / REACH, REACH):
        one = _next_change(found, link, met, problem_at, now, now * reach)
        if one is not None:
            yield one


def _next_change(
    found: Replanned,
    link: str,
    met: _Met,
    problem_at: Callable[[float], JointProblem],
    now: float,
    far: float,
) -> Threshold | None:
    """Return the bandwidth next to `now` where the choices change, None if those at `far` are the
    same."""
    here = choices(found.problem, found.plan)
    there = met.searched(problem_at(far))
    if there is None or choices(problem_at(far), there) == here:
        return None
    for _ in range(ROUNDS):
        near, side, end = now, found.plan, far
        while abs(math.log(end / near)) > PRECISION:
            middle = math.sqrt(near * end)
            problem = problem_at(middle)
            plan = met.best(problem)
            if plan is None or choices(problem, plan) != here:
                end, there = middle, plan
            else:
                near, side = middle, plan
        # A pipeline that was not met may be the best beside the threshold, and before it.
        other = met.searched(problem_at(end))
        if other is None or there is None:
            break
        if other.step_seconds >= there.step_seconds * (1 - BETTER):
            break
    below, above = (there, side) if end < near else (side, there)
    return _threshold(found, link, math.sqrt(near * end), below, above)
