"""Where a re-planned pipeline changes: with how much memory, on how fast a link.

A search takes a second or more; to price pipelines that are known, with the best rows for the
place, takes hundredths. So pipelines are searched for at the far ends, and a threshold lies where
another of those that were met, the best ones of other microbatch counts and schedules among them,
becomes the best one.

Pipelines are told apart by their microbatches, schedule, the meshes of their stages and the kinds
of recomputation in use. Which layers recompute, and where exactly stages begin, changes with every
little memory.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Iterator, Sequence

from attrs import evolve, frozen

import stage_dp
from alpa_interchange.menu import JointPlan, JointProblem
from alpa_meta.planning.menu_prices import at_places, near_counts, of_meshes, rows_of
from alpa_meta.planning.menu_problem import problem_of
from alpa_meta.planning.replanning import Replanned, changed_cluster, link_of, solved
from stage_dp import Known

PRECISION = 0.02  # of a threshold on a link: predictions are no better
MEMORY_PRECISION = 0.005  # of the memory from which on a plan is looked for that needs more
# Share of the step time that another pipeline must save, or less memory must cost: predictions
# cannot tell plans apart that differ by less.
TELLING = 0.01
REACH = 8.0  # times faster and slower links that are looked at: three generations
# Times more and fewer microbatches that are searched there; and pipelines kept beside the best one,
# of up to so many times its seconds: each is priced at every place, in hundredths of a second.
NEAR = 2
RIVALS, CLOSE = 4, 1.1
MAX_THRESHOLDS = 4  # on memory, downwards from what there is
MAX_STEPS = 40  # downwards, most of them to other rows of the same pipeline

At = Callable[[Sequence[int] | None], JointProblem]
"""The problem at a value of memory or of a link, with the meshes at these places or all."""


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
        self.known = _here(found)
        self._add(found.plan)

    def _add(self, plan: JointPlan) -> None:
        for one in [Known.of(plan), *Known.rivals(plan, CLOSE)[: RIVALS + 1]]:
            if one not in self.known:
                self.known.append(one)

    def best(self, at: At) -> JointPlan | None:
        """Return the best of them in a problem, None if none fits."""
        return _priced(at, self.known)

    def searched(self, at: At) -> JointPlan | None:
        """Return the best of all pipelines in a problem, which is then met; None if none fits."""
        problem = at(None)
        starts = [one for one in self.known if one.num_microbatches in (problem.counts or ())]
        found = solved(problem, starts)
        if found is not None:
            self._add(found)
        return found


def _here(found: Replanned) -> list[Known]:
    """Return the old pipeline by the meshes of the new problem, none where one does not fit."""
    before, meshes = found.base.problem.menu.meshes, found.problem.menu.meshes
    place = {(mesh.submesh, mesh.logical.shape): k for k, mesh in enumerate(meshes)}
    known = found.base.known
    used = {m: (before[m].submesh, before[m].logical.shape) for _, _, m in known.stages}
    if not place.keys() >= set(used.values()):
        return []
    return [evolve(known, stages=tuple((a, b, place[used[m]]) for a, b, m in known.stages))]


def _priced(at: At, known: Sequence[Known]) -> JointPlan | None:
    """Return the best of some pipelines in a problem, priced with their own meshes alone."""
    places = sorted({mesh for one in known for _, _, mesh in one.stages})
    found = stage_dp.best_known(at(places), [at_places(one, places) for one in known])
    if found is None:
        return None
    return evolve(
        found, stages=tuple(evolve(stage, mesh=places[stage.mesh]) for stage in found.stages)
    )


def _told_by(found: Replanned, plan: JointPlan) -> Hashable:
    """Return what tells a pipeline from others."""
    return (
        plan.num_microbatches,
        plan.schedule if len(plan.stages) > 1 else "",
        plan.num_meshes,
        tuple(stage.mesh for stage in plan.stages),
        frozenset(row.recomputation for row in rows_of(found.problem.menu, plan)),
    )


def memory_thresholds(found: Replanned) -> list[Threshold]:
    """Return the bytes per device at which a re-planned pipeline changes: where it would with more
    memory, then with less and less.

    A pipeline stays the best one until its fullest stage no longer fits: that is a threshold, where
    what comes next is told apart or takes `TELLING` longer.
    """
    met = _Met(found)
    down = list(_downwards(found, met))
    return [*_upwards(found, met), *down]


def _downwards(found: Replanned, met: _Met) -> Iterator[Threshold]:
    first = last = found.plan
    left = MAX_THRESHOLDS
    for _ in range(MAX_STEPS):
        value = max(stage_dp.device_bytes(last))
        at = functools.partial(_with_memory, found, value * (1 - 1e-6))
        below = met.best(at) or met.searched(at)
        slower = below is None or below.step_seconds > first.step_seconds * (1 + TELLING)
        if below is None or slower or _told_by(found, below) != _told_by(found, first):
            yield _threshold(found, "memory", value, below, last)
            left -= 1
            if below is None or not left:
                break
            first = below
        last = below


def _upwards(found: Replanned, met: _Met) -> Iterator[Threshold]:
    """Yield where a pipeline of the known ones that needs more memory would be better."""
    near = min(group.memory for group in found.problem.device_groups)
    far = max(group.device.memory for group in found.cluster.host_groups)
    if far <= near:
        return
    full = problem_of(found.menu, found.cluster, None, found.plan.num_microbatches)
    above: JointPlan | None = None
    at = functools.partial(_with_memory, found, problem=full)
    most = met.best(functools.partial(at, far))
    if most is None or most.step_seconds > found.plan.step_seconds * (1 - TELLING):
        return
    above = most
    while far / near > 1 + MEMORY_PRECISION:
        middle = math.sqrt(near * far)
        there = met.best(functools.partial(at, middle))
        if there is None or there.step_seconds > found.plan.step_seconds * (1 - TELLING):
            near = middle
        else:
            far, above = middle, there
    yield _threshold(found, "memory", max(stage_dp.device_bytes(above)), found.plan, above)


def _with_memory(
    found: Replanned,
    most: float,
    places: Sequence[int] | None = None,
    problem: JointProblem | None = None,
) -> JointProblem:
    """Return a problem, that of the re-planned pipeline if none is given, with so much memory."""
    problem = problem or found.problem
    groups = problem.device_groups
    problem = evolve(
        problem,
        device_groups=tuple(evolve(one, memory=min(one.memory, most)) for one in groups),
    )
    return problem if places is None else of_meshes(problem, places)


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
    now = link_of(found.cluster, link).bandwidth
    for reach in (1 / REACH, REACH):
        one = _next_change(found, link, met, now, now * reach)
        if one is not None:
            yield one


def _next_change(
    found: Replanned, link: str, met: _Met, now: float, far: float
) -> Threshold | None:
    """Return the bandwidth next to `now` from which on another pipeline is the best, None if none
    is better by `TELLING` even at `far`."""
    count, here = found.plan.num_microbatches, _told_by(found, found.plan)

    def problem_at(bandwidth: float, places: Sequence[int] | None) -> JointProblem:
        there = changed_cluster(found.cluster, links={link: bandwidth})
        return near_counts(problem_of(found.menu, there, found.memory, count, places), count, NEAR)

    there = met.searched(functools.partial(problem_at, far))
    same = _priced(functools.partial(problem_at, far), [Known.of(found.plan)])
    if there is None or _told_by(found, there) == here:
        return None
    if same is not None and there.step_seconds > same.step_seconds * (1 - TELLING):
        return None
    near, side, end = now, found.plan, far
    while abs(math.log(end / near)) > PRECISION:
        middle = math.sqrt(near * end)
        plan = met.best(functools.partial(problem_at, middle))
        if plan is None or _told_by(found, plan) != here:
            end, there = middle, plan
        else:
            near, side = middle, plan
    below, above = (there, side) if end < near else (side, there)
    return _threshold(found, link, math.sqrt(near * end), below, above)
