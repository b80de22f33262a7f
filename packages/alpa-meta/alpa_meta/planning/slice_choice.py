"""Token slices that nobody asked for: chosen where few sequences leave a pipeline mostly bubble.

lengths   by `stage_dp.slice_tokens`, from what slices take by the step's own operators and the
          plan's own stages, or more of them                         -> token_slices.slice_seconds
plan      of the step in these slices, taken if it is predicted to be faster
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import numpy as np
from attrs import evolve, frozen

import stage_dp
from alpa_interchange import ClusterSpec
from alpa_meta.compat import shape_of
from alpa_meta.errors import PlanError
from alpa_meta.inter_op.layer_work import one_device
from alpa_meta.inter_op.meshes import divisors
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
    pipelines = _pipelines(planned, step, cluster, options)
    if not pipelines:
        return planned
    count = pipelines[0].num_microbatches
    try:
        found = _lengths(step, count, pipelines, cluster)
        if found is None or found[0] > GAIN * planned.plan.step_seconds:
            return planned
        _, lengths, num_stages = found
        told = evolve(options, num_stages=num_stages, num_microbatches=count)
        sliced = in_whole_chunks(
            Slices(lengths),
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


def _pipelines(
    planned: Planned, step: Step, cluster: ClusterSpec, options: Options
) -> list[_Pipeline]:
    """Return the pipelines that slices are chosen for, of more stages than microbatches: that of a
    plan, and equal stages, more of them, that do its work on all devices in the same time; of a
    plan that has one stage, a stage for every device."""
    stages = [stage.candidate for stage in planned.plan.stage_plan.stages]
    num_layers, devices = len(planned.plan.layers), cluster.num_devices
    if len(stages) == 1:
        count = min(options.num_stages or devices, num_layers)
        microbatches = options.num_microbatches or step.batch_size or 1
        seconds, schedule = [(0.0,) * count], options.schedule
    else:
        microbatches = planned.plan.num_microbatches
        seconds = [tuple(max(one.seconds, 1e-12) for one in stages)]
        schedule = planned.plan.stage_plan.schedule
        if options.num_stages is None:
            work = sum(one.seconds * one.submesh.num_devices for one in stages)
            counts = [one for one in divisors(devices) if len(stages) < one <= num_layers]
            seconds += [(work / devices,) * count for count in counts]
    update = max(one.step_seconds for one in stages)
    return [
        _Pipeline(each, update, microbatches, schedule)
        for each in seconds
        if len(each) > microbatches
    ]


def _lengths(
    step: Step, num_microbatches: int, pipelines: Sequence[_Pipeline], cluster: ClusterSpec
) -> tuple[float, tuple[int, ...], int] | None:
    """Return the predicted step, the lengths of the best slices, and the stages of their pipeline;
    None: one slice is best."""
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
        cells = min(CELLS, slices.tokens)
        table = slice_seconds(analysis, one_device(cluster), cells)
        if table[0, -1] > 0:
            found = [_best(table, slices, pipeline, cluster) for pipeline in pipelines]
            return min((one for one in found if one is not None), default=None)
    return None


def _best(
    table: Array, slices: Slices, pipeline: _Pipeline, cluster: ClusterSpec
) -> tuple[float, tuple[int, ...], int] | None:
    """Return the step, the lengths and the stages of the coarsest slices that are about as fast as
    any."""
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
    return seconds, tuple(np.diff(bounds).tolist()), len(pipeline.seconds)


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
