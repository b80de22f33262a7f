"""The numbers of microbatches to plan for, and why others are refused."""

from __future__ import annotations

from alpa_meta.errors import PlanError
from alpa_meta.inter_op.candidates import (
    microbatch_counts,
)
from alpa_meta.inter_op.short_step import ShortStep
from alpa_meta.options import Options
from alpa_meta.step.program import Step


def microbatch_counts_of(
    step: Step, options: Options, short: ShortStep | None = None
) -> tuple[list[int], str]:
    """Return the numbers of microbatches to plan for, and why only one if others were refused.

    `short` is the step without repeated layers, which can be cut as the step can.
    """
    given = options.num_microbatches
    counts = microbatch_counts(step.microbatch_counts, options.num_stages, given)
    if given is None:
        refusals = {count: refusal(short or step, count, options) for count in counts if count > 1}
        exact = [count for count in counts if not refusals.get(count)] or [1]
        return exact, step.uncut or next(iter(refusals.values()), "") if exact == [1] else ""
    check_exact(step, given, options)
    return counts, ""


def check_exact(step: Step, count: int, options: Options) -> None:
    """Raise PlanError where `count` microbatches would change the result, unless that is
    accepted."""
    if count > 1 and options.exact and step.program(count).inexact:
        raise PlanError(
            f"{count} microbatches would change the result: {step.program(count).inexact[0]}; use "
            "num_microbatches=1, or Options(exact=False) to accept it"
        )


def refusal(step: Step | ShortStep, count: int, options: Options) -> str:
    """Return why the planner may not cut the batch into `count` parts, empty if it may."""
    try:
        reasons = step.program(count).inexact
    except PlanError as error:
        return str(error)
    return reasons[0] if options.exact and reasons else ""


def larger_counts(tried: int, step: Step, options: Options) -> list[int]:
    """Return the next numbers of microbatches to try for their smaller activations."""
    if options.num_microbatches is not None or (options.exact and step.inexact):
        return []
    return [count for count in step.microbatch_counts if count >= 4 * tried][:1]
