"""Token slices that nobody asked for: chosen where few sequences leave a pipeline mostly bubble.

number    by the joint search over the plan's own menu, with slices in place of microbatches:
          stages, microbatches, shardings and memory are chosen with it      -> sliced_menu
lengths   by `stage_dp.slice_tokens`, from what slices take by the step's own operators, on
          those stages                                         -> token_slices.slice_seconds
plan      of the step in these slices, taken if it is predicted to be faster
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

import numpy as np
from attrs import evolve, frozen

import stage_dp
from alpa_interchange import ClusterSpec, KeptMenu
from alpa_interchange.menu import JointPlan
from alpa_meta.compat import shape_of
from alpa_meta.errors import PlanError
from alpa_meta.inter_op.layer_work import one_device
from alpa_meta.inter_op.meshes import divisors
from alpa_meta.options import Options
from alpa_meta.planning.chosen_plan import Planned
from alpa_meta.planning.menu_problem import problem_of
from alpa_meta.planning.sliced_menu import whole_in_slices
from alpa_meta.step.program import Step
from alpa_meta.token_slices.analysis import analysed
from alpa_meta.token_slices.budget import MAX_PROGRAMS, num_programs
from alpa_meta.token_slices.places import SliceRequest, Slices
from alpa_meta.token_slices.program import check_work, in_whole_chunks
from alpa_meta.token_slices.slice_seconds import Array, slice_seconds
from alpa_meta.token_slices.values import SlicingError

_LOG = logging.getLogger(__name__)
CELLS = 16  # equal parts of a sequence that slices are made of
ENOUGH = 1.05
"""Coarser slices are taken where the step is no slower than this times the fastest: each slice is a
program to compile for each pass of each stage."""
GAIN = 0.9
"""Of the step without slices that a predicted one must be below to be planned at all, which takes
as long as the first plan: of six steps in slices predictions were from a tenth too slow to a third
too fast."""


@frozen
class _Chosen:
    """Slices and a pipeline for them."""

    lengths: tuple[int, ...]
    num_stages: int
    num_microbatches: int


def may_slice(step: Step, cluster: ClusterSpec, options: Options) -> bool:
    """Return whether slices are tried: nothing was said of them, and a batch has fewer sequences
    than a pipeline has stages."""
    asked = options.num_token_slices is not None or options.token_slices is not None
    stages = options.num_stages or cluster.num_devices
    if asked or stages == 1 or step.batch_size is None or options.preset is not None:
        return False
    fewer = (options.num_microbatches or step.batch_size) < stages
    return fewer and options.dynamic_dims is None and options.schedule != "forward-only"


def with_slices(
    planned: Planned,
    menu: KeptMenu,
    step: Step,
    cluster: ClusterSpec,
    options: Options,
    plan: Callable[[Step, Options], Planned],
) -> Planned:
    """Return the plan of a step in token slices if that is faster, else `planned`; `menu` is of the
    step as it is."""
    try:
        found = _chosen(planned.plan.step_seconds, menu, step, cluster, options)
        if found is None:
            return planned
        count = found.num_microbatches
        told = evolve(options, num_stages=found.num_stages, num_microbatches=count)
        sliced = in_whole_chunks(
            Slices(found.lengths),
            lambda slices: plan(step.in_slices(SliceRequest(slices.lengths)), told),
            fewer=True,
        )
    except PlanError as error:
        _LOG.info("the step is not cut into token slices: %s", error)
        return planned
    if sliced.plan.step_seconds >= planned.plan.step_seconds:
        return planned
    bound = min(sliced.plan.lower_bound, planned.plan.lower_bound)  # of both kinds of plans
    return evolve(sliced, plan=evolve(sliced.plan, lower_bound=bound))


def _chosen(
    known: float, menu: KeptMenu, step: Step, cluster: ClusterSpec, options: Options
) -> _Chosen | None:
    """Return the slices and the pipeline whose step is predicted to be fastest, None where none is
    worth planning beside one of `known` seconds."""
    table = _slice_table(step, min(menu.counts), cluster)
    if table is None:
        return None
    slices, seconds = table
    # All sequences at once are no microbatch that a menu has rows of, but slices may be of them.
    problem = problem_of(menu, cluster, options.memory, options.num_microbatches or 1)
    cells, limit = len(seconds) - 1, GAIN * known
    best: tuple[JointPlan, int] | None = None
    for number in divisors(cells)[1:]:
        grain = cells // number
        each = [float(seconds[k * grain, (k + 1) * grain]) for k in range(number)]
        work = sum(each) / float(seconds[0, -1])
        try:
            plan = stage_dp.solve_joint(whole_in_slices(problem, number, work), worth=limit)
        except stage_dp.InfeasibleError:
            continue
        # Slices of one stage fill no bubble; too many programs would not be compiled.
        fits = 1 < len(plan.stages) and number <= _most_slices(len(plan.stages), cluster, options)
        if fits and plan.step_seconds < limit:
            best, limit = (plan, number), plan.step_seconds
    if best is None:
        return None
    plan, number = best
    lengths = _lengths(seconds, slices, plan, number)
    return _Chosen(lengths, len(plan.stages), plan.num_microbatches // number)


def _slice_table(
    step: Step, num_microbatches: int, cluster: ClusterSpec
) -> tuple[Slices, Array] | None:
    """Return two slices that the step can be cut into, and what slices between any two of some
    equal cells take on one device (`slice_seconds`); None where it cannot be cut."""
    program = step.program(num_microbatches)
    if program.inexact:
        return None
    holds = [leaf.role == "batch" for leaf in program.inputs]
    variables = zip(program.jaxpr.invars, holds, strict=False)
    sizes = [shape_of(var)[1] for var, held in variables if held and len(shape_of(var)) > 1]
    for slices in SliceRequest(count=2).candidates(sizes):
        try:
            analysis = in_whole_chunks(
                slices, lambda some: analysed(program.closed, program.phases.of_eqn, holds, some)
            )
            check_work(analysis)
        except SlicingError as error:
            _LOG.info("no slices of %d tokens: %s", slices.tokens, error)
            continue
        table = slice_seconds(analysis, one_device(cluster), min(CELLS, slices.tokens))
        if table[0, -1] > 0:
            return slices, table
    return None


def _lengths(table: Array, slices: Slices, plan: JointPlan, num_slices: int) -> tuple[int, ...]:
    """Return the lengths of the coarsest slices, at most `num_slices`, that are about as fast as
    any on the stages of a plan of so many equal ones."""
    cells, times = (
        len(table) - 1,
        [one.forward_seconds + one.backward_seconds for one in plan.stages],
    )
    mean = float(np.mean(times))
    equal = cells // num_slices
    each = sum(float(table[k, k + equal]) for k in range(0, cells, equal)) / num_slices
    found = []
    for grain in (one for one in divisors(cells)[::-1] if one < cells):
        cut = stage_dp.slice_tokens(
            stage_dp.TokenProblem(
                seconds=(table[::grain, ::grain] * (mean / each))[None],
                num_samples=plan.num_microbatches // num_slices,
                stage_scale=tuple(max(one / mean, 1e-9) for one in times),
                step_seconds=max(one.step_seconds for one in plan.stages),
            )
        )
        longest = max((one for _, one in cut.groups), key=len)
        if 1 < len(longest) <= num_slices:
            found.append((cut.step_seconds, tuple(grain * one for one in longest)))
    enough = ENOUGH * min(found, default=(math.inf,))[0]
    whole = (enough, (equal,) * num_slices)
    bounds = np.cumsum((0, *next((one for one in found if one[0] <= enough), whole)[1]))
    return tuple(np.diff(bounds * slices.tokens // cells).tolist())


def _most_slices(num_stages: int, cluster: ClusterSpec, options: Options) -> int:
    """Return the slices whose programs a host compiles, of its share of the stages."""
    hosts = sum(group.num_hosts for group in cluster.host_groups)
    share = -(-num_stages // hosts)
    return MAX_PROGRAMS // num_programs(share, options.schedule or "1f1b", 1)
