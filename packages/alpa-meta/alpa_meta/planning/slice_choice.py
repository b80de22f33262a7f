"""Token slices that nobody asked for: chosen where few sequences leave a pipeline mostly bubble.

lengths   by `stage_dp.slice_tokens`, from what slices take by the step's own operators and the
          plan's own stages                                          -> token_slices.slice_seconds
plan      of the step in these slices, taken if it is predicted to be faster
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
from attrs import evolve, frozen

import stage_dp
from alpa_interchange import ClusterSpec
from alpa_meta.compat import shape_of
from alpa_meta.errors import PlanError
from alpa_meta.inter_op.layer_work import one_device
from alpa_meta.options import Options
from alpa_meta.planning.chosen_plan import Planned
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
GAIN = 0.9  # of the step without slices that a predicted one must be below to be planned at all


@frozen
class _Pipeline:
    """A pipeline that slices are chosen for: seconds of each stage for one microbatch, and once."""

    seconds: tuple[float, ...]
    step_seconds: float
    num_microbatches: int
    schedule: str | None


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
    step: Step,
    cluster: ClusterSpec,
    options: Options,
    plan: Callable[[Step, Options], Planned],
) -> Planned:
    """Return the plan of a step in token slices if that is faster, else `planned`."""
    pipeline = _pipeline(planned, step, cluster, options)
    num_stages = len(pipeline.seconds)
    if pipeline.num_microbatches >= num_stages:
        return planned
    try:
        found = _lengths(step, pipeline, cluster)
        if found is None or found[1] > GAIN * planned.plan.step_seconds:
            return planned
        told = evolve(options, num_stages=num_stages, num_microbatches=pipeline.num_microbatches)
        sliced = in_whole_chunks(
            Slices(found[0]),
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


def _pipeline(planned: Planned, step: Step, cluster: ClusterSpec, options: Options) -> _Pipeline:
    """Return the stages of a plan, or, of a plan that has one, a stage for every device."""
    stages = [stage.candidate for stage in planned.plan.stage_plan.stages]
    if len(stages) > 1:
        return _Pipeline(
            tuple(max(one.seconds, 1e-12) for one in stages),
            max(one.step_seconds for one in stages),
            planned.plan.num_microbatches,
            planned.plan.stage_plan.schedule,
        )
    count = min(options.num_stages or cluster.num_devices, len(planned.plan.layers))
    microbatches = options.num_microbatches or step.batch_size or 1
    return _Pipeline((0.0,) * count, stages[0].step_seconds, microbatches, options.schedule)


def _lengths(
    step: Step, pipeline: _Pipeline, cluster: ClusterSpec
) -> tuple[tuple[int, ...], float] | None:
    """Return the lengths of the best slices and the predicted step; None: one slice is best."""
    program = step.program(pipeline.num_microbatches)
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
        cells = min(CELLS, slices.tokens)
        table = slice_seconds(analysis, one_device(cluster), cells)
        if table[0, -1] > 0:
            return _best(table, slices, pipeline, cluster)
    return None


def _best(
    table: Array, slices: Slices, pipeline: _Pipeline, cluster: ClusterSpec
) -> tuple[tuple[int, ...], float] | None:
    """Return the lengths and the step of the coarsest slices that are about as fast as any."""
    cells = len(table) - 1
    found, most = [], _most_slices(pipeline, cluster)
    for grain in (one for one in range(cells // 2, 0, -1) if cells % one == 0):
        plan = _sliced(table[::grain, ::grain], pipeline)
        cut = max((one for _, one in plan.groups), key=len)
        if 1 < len(cut) <= most:
            found.append((plan.step_seconds, tuple(grain * one for one in cut)))
    if not found:
        return None
    enough = ENOUGH * min(found)[0]
    seconds, cut = next(one for one in found if one[0] <= enough)
    bounds = np.cumsum((0, *cut)) * slices.tokens // cells
    return tuple(np.diff(bounds).tolist()), seconds


def _sliced(table: Array, pipeline: _Pipeline) -> stage_dp.TokenPlan:
    """Return the best slices of cells of `table` [positions, positions], one device's seconds."""
    count, whole = len(pipeline.seconds), float(table[0, -1])
    known = any(pipeline.seconds)
    mean = float(np.mean(pipeline.seconds)) if known else whole / count
    problem = stage_dp.TokenProblem(
        seconds=(table * (mean / whole))[None],
        num_samples=pipeline.num_microbatches,
        stage_scale=tuple(one / mean for one in pipeline.seconds) if known else (1.0,) * count,
        step_seconds=pipeline.step_seconds,
    )
    return stage_dp.slice_tokens(problem)


def _most_slices(pipeline: _Pipeline, cluster: ClusterSpec) -> int:
    """Return the slices whose programs a host compiles, of its share of the stages."""
    hosts = sum(group.num_hosts for group in cluster.host_groups)
    share = -(-len(pipeline.seconds) // hosts)
    return MAX_PROGRAMS // num_programs(share, pipeline.schedule or "1f1b", 1)
