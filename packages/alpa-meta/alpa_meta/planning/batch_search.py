"""Which dim of the arrays of a batch the examples lie along: the first, unless it cannot be cut."""

from __future__ import annotations

from collections.abc import Callable

from alpa_interchange import ClusterSpec, ParallelPlan
from alpa_meta.compat import shape_of
from alpa_meta.errors import PlanError
from alpa_meta.inter_op.candidates import microbatch_counts
from alpa_meta.options import Options
from alpa_meta.planning.collection_pause import collections_paused
from alpa_meta.planning.memory_floor import check_arguments_fit
from alpa_meta.planning.outlooks import short_step_of
from alpa_meta.planning.plan_identity import fingerprint
from alpa_meta.planning.range_search import may_cut
from alpa_meta.step.batch_dims import BatchDims, other_dims
from alpa_meta.step.program import Step


def trace_step(step: Step, cluster: ClusterSpec, options: Options) -> None:
    """Trace a step; before that, raise InfeasibleError where its arguments cannot fit."""
    check_arguments_fit(step.args, cluster, options)
    options.progress("trace", 0, 1)
    step.traced(None)
    options.progress("trace", 1, 1)


def batch_dims_of(
    step: Step,
    cluster: Callable[[], ClusterSpec],
    options: Options,
    moved: Callable[[BatchDims], Step],
) -> BatchDims:
    """Return the dims of the examples of a step that is given with its arguments as they are;
    `moved` makes the step whose batches have these dims in front.

    It is the first dim where microbatches can be cut along it, else the first other one that all
    arrays of the batch have and along which they compute the same; of a given plan, which needs no
    cluster, that which it was made for.
    """
    with collections_paused():
        if options.plan is not None:
            return _planned_dims(step, options.plan, moved)
        trace_step(step, cluster(), options)
        if not _is_refused(step, cluster(), options):
            return ()
        for dims in other_dims(step):
            if _can_be_cut(moved(dims)):
                return dims
    return ()


def _is_refused(step: Step, cluster: ClusterSpec, options: Options) -> bool:
    """Return whether microbatches are wanted and refused, by the program that the planner asks."""
    given = options.num_microbatches
    if given == 1:
        return False
    if step.batch_size is None:
        return True
    possible = step.microbatch_counts
    counts = microbatch_counts(possible, options.num_stages, None)
    count = max([given if given in possible else 1, *counts, *possible[:2]])
    short = short_step_of(step, options, cluster) if may_cut(2, cluster, options) else None
    try:
        program = (short or step).program(count)
    except PlanError:  # which says what is wrong with an operator, whatever the dims
        return False
    return bool(program.inexact or program.averaged)


def _can_be_cut(step: Step) -> bool:
    """Return whether microbatches along these dims compute the same, and each its own examples.

    Along features they may compute the same too, but what products make of all of them is then a
    sum over the microbatches, which is read whole; such sums over examples are numbers or counts,
    as of the tokens of each expert.
    """
    try:
        program = step.program(step.microbatch_counts[-1])
    except PlanError:
        return False
    exact = not program.inexact and not program.averaged
    numbers = all(len(shape_of(var)) < 2 for var in program.totals)
    return program.num_microbatches > 1 and exact and numbers


def _planned_dims(step: Step, plan: ParallelPlan, moved: Callable[[BatchDims], Step]) -> BatchDims:
    """Return the dims that a plan was made for, the first where it was made for no such step."""
    shapes = {item.path: tuple(item.shape) for item in plan.program.inputs}

    def fits(one: Step) -> bool:
        inputs = ((leaf.path, tuple(leaf.aval.shape)) for leaf in one.leaves)
        return all(shapes.get(path) == shape for path, shape in inputs)

    if fits(step) and fingerprint(step) == plan.program.fingerprint:
        return ()
    for dims in other_dims(step):
        other = moved(dims)
        if fits(other) and fingerprint(other) == plan.program.fingerprint:
            return dims
    return ()
