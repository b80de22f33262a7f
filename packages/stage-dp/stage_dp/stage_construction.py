"""Stage construction: cut the layers into stages on disjoint submeshes.

For every microbatch count among the candidates and every schedule, a search over the bottleneck M
minimises sum a_i + max b_i (-> stage_table.py for the recurrences):

    T = min over M of F_M(0, all devices) + M,    F_M with only candidates of bottleneck <= M

F_M falls as M grows, so on thresholds lo < M <= hi the total is at least F_hi + (the smallest
threshold above lo). Intervals are bisected best bound first, and dropped when their bound is no
better than a plan in hand: exact, with tens of sweeps where enumeration takes thousands. A sweep
without memory comes first, and the one with memory only where its plan does not fit. -> _search()

Every plan met on the way is scored by the exact longest path through its schedule, and the best by
that score is returned. -> _score()

The returned lower bound is on that exact score, over all plans from the candidates, schedules and
microbatch counts given, without memory limit, and with forward plus backward replaced by each
candidate's `lower_bound_seconds`. -> stage_bound.py

Interleaved pipelines are searched apart. -> interleaved_search.py
Where nothing fits, the error names the cheapest change after which something would.
-> stage_remedies.py
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

import numpy as np
from attrs import evolve, frozen
from numpy.typing import NDArray

from alpa_interchange.stage import PlacedStage, StageCandidate, StagePlan, StageProblem
from stage_dp.device_pool import place
from stage_dp.infeasibility import check_bound
from stage_dp.interleaved_search import (
    INTERLEAVED,
    device_seconds_bound,
    interleaved_plans,
)
from stage_dp.mesh_memory import with_device_bytes
from stage_dp.pipeline_time import pipeline_time
from stage_dp.schedules import (
    SCHEDULE_RULES,
    Schedule,
    default_warmups,
    extra_in_flight,
    order,
)
from stage_dp.stage_bound import quick_bound, refined_bound
from stage_dp.stage_remedies import infeasible
from stage_dp.stage_table import StageTable, Sweep, tables_of

STAGE_SCHEDULES = tuple(name for name, rule in SCHEDULE_RULES.items() if rule.has_backward)
PLANS_SCORED = 24  # per microbatch count and schedule


@frozen
class _Found:
    """A plan with its estimate (sum of costs plus bottleneck) and, once scored, its step time."""

    estimate: float
    candidates: tuple[StageCandidate, ...]
    schedule: str
    num_microbatches: int
    step_seconds: float = math.inf
    in_flight: tuple[int, ...] = ()
    num_meshes: int | None = None  # None: one per stage


def solve_stages(problem: StageProblem) -> StagePlan:
    """Return the pipeline with the least predicted step time, with its proven lower bound.

    Raises InfeasibleError with the missing bytes and the cheapest remedy where no plan fits.
    """
    _check(problem)
    tables = tables_of(problem)
    bounds = [quick_bound(table) for table in tables]
    best: _Found | None = None
    for bound, table in sorted(zip(bounds, tables, strict=True), key=lambda item: item[0]):
        if best is not None and bound >= best.step_seconds:
            break
        schedules: dict[tuple[int, ...], Schedule] = {}
        for found in _plans(table):
            scored = _score(found, schedules, table.problem)
            if not table.pool.exact and not _packs(problem, found):
                continue
            if best is None or scored.step_seconds < best.step_seconds * (1 - 1e-12):
                best = scored
    lower, lacking = math.inf, math.inf
    if INTERLEAVED in problem.schedules:
        lower = device_seconds_bound(problem)
        if best is None or lower < best.step_seconds:
            found_apart, lacking = _interleaved(problem)
            if found_apart is not None and (
                best is None or found_apart.step_seconds < best.step_seconds * (1 - 1e-12)
            ):
                best = found_apart
    if best is None:
        raise infeasible(problem, tables, lacking)
    for bound, table in zip(bounds, tables, strict=True):
        if bound < best.step_seconds:
            bound = refined_bound(table, bound, best.step_seconds)
        if (table.schedule, table.num_microbatches) == (best.schedule, best.num_microbatches):
            check_bound(bound, best.step_seconds, "the chosen pipeline")
        lower = min(lower, bound)
    num_meshes = best.num_meshes or len(best.candidates)
    delayed = SCHEDULE_RULES[best.schedule].least_delayed
    submeshes = [candidate.submesh for candidate in best.candidates[:num_meshes]]
    places = place(problem.device_groups, submeshes)
    stages = tuple(
        PlacedStage(candidate=candidate, device_ids=places[stage % num_meshes])
        for stage, candidate in enumerate(best.candidates)
    )
    plan = StagePlan(
        stages=stages,
        num_microbatches=best.num_microbatches,
        schedule=best.schedule,
        step_seconds=best.step_seconds,
        lower_bound=min(lower, best.step_seconds),
        peak_bytes=tuple(
            peak_bytes(c, k, delayed + k - least)
            for c, k, least in zip(
                best.candidates, best.in_flight, _least_in_flight(best), strict=True
            )
        ),
        in_flight=best.in_flight,
    )
    return with_device_bytes(plan)


def _least_in_flight(found: _Found) -> tuple[int, ...]:
    if SCHEDULE_RULES[found.schedule].interleaves:
        return found.in_flight
    return in_flight_counts(found.candidates, found.schedule)


def _interleaved(problem: StageProblem) -> tuple[_Found | None, float]:
    """Return the fastest of the interleaved plans, or None and the bytes that the leanest lacks."""
    best, lacking = None, math.inf
    for plan in interleaved_plans(problem):
        if plan.missing_bytes > 0:
            lacking = min(lacking, plan.missing_bytes)
            continue
        chain = plan.candidates
        seconds = step_seconds(chain, INTERLEAVED, num_meshes=plan.num_meshes)
        if best is None or seconds < best.step_seconds:
            best = _Found(
                plan.estimate,
                chain,
                INTERLEAVED,
                chain[0].num_microbatches,
                seconds,
                plan.in_flight,
                plan.num_meshes,
            )
    return best, lacking


def _packs(problem: StageProblem, found: _Found) -> bool:
    try:
        place(problem.device_groups, [candidate.submesh for candidate in found.candidates])
    except ValueError:
        return False
    return True


def step_seconds(
    candidates: Sequence[StageCandidate],
    schedule: str,
    in_flight: Sequence[int] | None = None,
    *,
    num_meshes: int | None = None,
) -> float:
    """Return the exact step time of a pipeline of `candidates`, first to last, under `schedule`.

    `in_flight` [stages] is for "adaptive" and "zero-bubble-h1"; by default what `in_flight_counts`
    says. `num_meshes` is for interleaved schedules.
    """
    if SCHEDULE_RULES[schedule].interleaves:
        count = candidates[0].num_microbatches
        slices = _num_slices(candidates)
        plan = order(schedule, len(candidates), count, num_meshes=num_meshes, num_slices=slices)
        return _time(candidates, plan)
    in_flight = in_flight or in_flight_counts(candidates, schedule)
    plan = order(
        schedule,
        len(candidates),
        candidates[0].num_microbatches,
        warmups=in_flight,
        num_slices=_num_slices(candidates),
    )
    return _time(candidates, plan)


def _num_slices(candidates: Sequence[StageCandidate]) -> int:
    counts = {len(one.token_slices) for one in candidates}
    if len(counts) > 1:
        raise ValueError(
            f"all stages must have the same token slices, got {sorted(counts)} of them; give every "
            "StageCandidate.token_slices or none"
        )
    return max(1, *counts)


def bound_in_slices(bound: float, num_stages: int) -> float:
    """Return a bound on pipelines of up to `num_stages` meshes whose microbatches are cut into
    token slices, given one on those whose microbatches are not.

    Uncut, a mesh or a link is busy at any time: n meshes in a ring take at most the sum of n loads
    of meshes and 2 n of links. Cut, a step takes at least the largest of these loads.
    """
    return bound / (3 * num_stages) if num_stages > 1 else bound


def schedule_of(plan: StagePlan) -> Schedule:
    """Return the order in which each mesh of `plan` runs its stages."""
    interleaves = SCHEDULE_RULES[plan.schedule].interleaves
    return order(
        plan.schedule,
        len(plan.stages),
        plan.num_microbatches,
        num_meshes=plan.num_meshes if interleaves else None,
        warmups=None if interleaves else plan.in_flight,
        num_slices=_num_slices([stage.candidate for stage in plan.stages]),
    )


def in_flight_counts(candidates: Sequence[StageCandidate], schedule: str) -> tuple[int, ...]:
    """Return the microbatches in flight on each stage of a pipeline of `candidates`."""
    num_microbatches = candidates[0].num_microbatches
    if schedule != "adaptive":
        return default_warmups(schedule, len(candidates), num_microbatches)
    counts = [1]
    for candidate in reversed(candidates[:-1]):
        extra = 0
        if candidate.seconds > 0:
            extra = extra_in_flight(candidate.boundary_seconds, candidate.seconds)
        counts.append(counts[-1] + 1 + extra)
    return tuple(min(num_microbatches, count) for count in reversed(counts))


def peak_bytes(candidate: StageCandidate, in_flight: int, num_delayed: int = 0) -> float:
    """Return the bytes per device that a stage needs with `in_flight` microbatches alive.

    Of `num_delayed` there is what the backward by weight reads: all but one of them wait for it.
    """
    each, waiting = candidate.waiting_bytes, max(num_delayed - 1, 0)
    if each is None:
        each = candidate.activation_bytes + candidate.delayed_bytes
    fixed = candidate.state_bytes + candidate.transient_bytes
    own = (in_flight - waiting) * candidate.activation_bytes
    return fixed + own + (num_delayed - waiting) * candidate.delayed_bytes + waiting * each


def _check(problem: StageProblem) -> None:
    for schedule in problem.schedules:
        if schedule not in STAGE_SCHEDULES:
            raise ValueError(
                f"StageProblem.schedules must be among {STAGE_SCHEDULES}, got {schedule!r}"
            )
    if not problem.schedules or not problem.candidates:
        raise ValueError("StageProblem needs at least one schedule and one candidate")
    if problem.num_stages is not None and not 1 <= problem.num_stages <= problem.num_layers:
        raise ValueError(
            f"StageProblem.num_stages must be between 1 and num_layers={problem.num_layers}, got "
            f"{problem.num_stages}"
        )
    for candidate in problem.candidates:
        if candidate.layer_stop > problem.num_layers:
            raise ValueError(
                f"a candidate covers layers {candidate.layer_start}..{candidate.layer_stop}, but "
                f"the problem has {problem.num_layers}"
            )


def _plans(table: StageTable) -> list[_Found]:
    """Return the plans to score: where the backward is split, those of 1f1b too.

    The estimate takes every part by weight for delayed as far as is of use. Where memory or few
    microbatches forbid that, the best plan is nearer to 1f1b's: of 475 random problems of up to 4
    layers 6 were not solved by their best plan without those, 3 with them.
    """
    found = _search(table)
    if SCHEDULE_RULES[table.schedule].splits_backward:
        alike = StageTable(table.problem, table.candidates, "1f1b", table.pool, True)
        found += [evolve(one, schedule=table.schedule) for one in _search(alike)]
    return found


def _search(table: StageTable) -> list[_Found]:
    """Return the plans met, by estimate, best first; the first has the least estimate of all."""
    allowed = table.holds >= 1
    thresholds = np.unique(table.bottleneck[allowed])
    if not len(thresholds):
        return []
    found: dict[tuple[int, ...], float] = {}

    def solve(number: int) -> tuple[float, float]:
        """Return F at a threshold and the bottleneck its plan has."""
        below = allowed & (table.bottleneck <= thresholds[number])
        relaxed = Sweep(table, allowed=below, weight=table.cost, use_memory=False)
        if math.isinf(relaxed.best()):
            return math.inf, math.inf
        plan = relaxed.plan()
        if not _fits(table, plan):
            sweep = Sweep(table, allowed=below, weight=table.cost)
            if math.isinf(sweep.best()):
                return math.inf, math.inf
            plan = sweep.plan()
        total = float(table.cost[plan].sum())
        slowest = float(table.bottleneck[plan].max())
        found[tuple(plan)] = total + slowest
        return total, slowest

    _add_front_loaded(table, allowed, found)
    top = len(thresholds) - 1
    value, slowest = solve(top)
    if math.isinf(value):
        return []
    best = value + slowest
    # Intervals of thresholds lo..hi (inclusive) with the least F they can have, by their bound.
    stop = int(np.searchsorted(thresholds, slowest)) - 1
    heap = [(value + float(thresholds[0]), 0, stop, value)] if stop >= 0 else []
    while heap:
        bound, low, high, least = heapq.heappop(heap)
        if bound >= best * (1 - 1e-12):
            break
        middle = (low + high) // 2
        value, slowest = solve(middle)
        if not math.isinf(value):
            best = min(best, value + slowest)
            stop = int(np.searchsorted(thresholds, slowest)) - 1
            if stop >= low:
                heapq.heappush(heap, (value + float(thresholds[low]), low, stop, value))
        if middle < high:
            bound = least + float(thresholds[middle + 1])
            heapq.heappush(heap, (bound, middle + 1, high, least))
    ranked = sorted(found.items(), key=lambda item: item[1])[:PLANS_SCORED]
    return [
        _Found(
            estimate,
            tuple(table.candidates[c] for c in plan),
            table.schedule,
            table.num_microbatches,
        )
        for plan, estimate in ranked
    ]


def _add_front_loaded(
    table: StageTable, allowed: NDArray[np.bool_], found: dict[tuple[int, ...], float]
) -> None:
    """Add the plan whose bound W is least: it has the slowest stage where it starts early."""
    num = table.num_microbatches
    seconds = table.forward + table.backward
    for use_memory in (False, True):
        sweep = Sweep(
            table,
            allowed=allowed,
            weight=table.cost,
            floor=num * seconds,
            extra_at_start=table.update,
            use_memory=use_memory,
        )
        if math.isinf(sweep.best()):
            return
        plan = sweep.plan()
        if _fits(table, plan):
            found[tuple(plan)] = float(table.cost[plan].sum() + table.bottleneck[plan].max())
            return


def _fits(table: StageTable, plan: Sequence[int]) -> bool:
    candidates = [table.candidates[c] for c in plan]
    counts = in_flight_counts(candidates, table.schedule)
    return bool(np.all(table.holds[list(plan)] >= np.array(counts)))


def _score(
    found: _Found, schedules: dict[tuple[int, ...], Schedule], problem: StageProblem
) -> _Found:
    counts = _most_in_flight(found, problem)
    schedule = schedules.get(counts)
    if schedule is None:
        schedule = order(found.schedule, len(counts), found.num_microbatches, warmups=counts)
        schedules[counts] = schedule
    return evolve(found, step_seconds=_time(found.candidates, schedule), in_flight=counts)


def _most_in_flight(found: _Found, problem: StageProblem) -> tuple[int, ...]:
    """Return as many microbatches in flight on each stage as its schedule uses and memory holds."""
    least, rule = in_flight_counts(found.candidates, found.schedule), SCHEDULE_RULES[found.schedule]
    most = rule.most_in_flight
    if most is None:
        return least

    def fits(candidate: StageCandidate, count: int, delayed: int) -> bool:
        memory = problem.device_groups[candidate.submesh.host_group].memory
        return peak_bytes(candidate, count, delayed) <= memory * (1 + 1e-12)

    return tuple(
        next(
            (
                k
                for k in range(upper, lower, -1)
                if fits(candidate, k, rule.least_delayed + k - lower)
            ),
            lower,
        )
        for candidate, lower, upper in zip(
            found.candidates, least, most(len(least), found.num_microbatches), strict=True
        )
    )


def _time(candidates: Sequence[StageCandidate], schedule: Schedule) -> float:
    forward, backward, weight, boundary = zip(*map(_unit_seconds, candidates), strict=True)
    repeats = (1, schedule.num_microbatches)
    return pipeline_time(
        schedule,
        np.tile(forward, repeats),
        np.tile(backward, repeats),
        np.tile(boundary, repeats)[:-1],
        [
            sum(c.step_seconds for c in candidates[mesh :: schedule.num_meshes])
            for mesh in range(schedule.num_meshes)
        ],
        weight=np.tile(weight, repeats),
    ).step_seconds


def _unit_seconds(candidate: StageCandidate) -> tuple[list[float], ...]:
    """Return forward, backward, backward by weight and boundary seconds of each slice of a
    microbatch, or of all of it; a slice sends its share of the tokens."""
    if not candidate.token_slices:
        return (
            [candidate.forward_seconds],
            [candidate.backward_seconds],
            [candidate.backward_weight_seconds],
            [candidate.boundary_seconds],
        )
    tokens = sum(one.tokens for one in candidate.token_slices)
    return (
        [one.forward_seconds for one in candidate.token_slices],
        [one.backward_seconds for one in candidate.token_slices],
        [one.backward_weight_seconds for one in candidate.token_slices],
        [candidate.boundary_seconds * one.tokens / tokens for one in candidate.token_slices],
    )
