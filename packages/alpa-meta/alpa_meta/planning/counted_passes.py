"""Stages solved for what a step takes, in place of what they take themselves.

A stage's own seconds are m (f + b) + u: m microbatches of a forward and a backward pass, and an
update. In a pipeline, a second more of f + b delays the step by m where the stage is the slowest,
by about one where it waits for others; its update delays the step where it ends last. So passes
are counted by the ratio of both delays                               -> counted_passes()
and the stage is solved as if it had so many microbatches             -> solved_for()
"""

from __future__ import annotations

from collections.abc import Callable

from attrs import evolve

import ilp_sharding
import stage_dp
from alpa_interchange import ShardingSolution, StageCandidate, StagePlan
from alpa_meta.intra_op.selection import Selection

# Share of a pass by which stages are made longer to see what that does to the step: the rows of
# equal stages differ by less.
LONGER = 0.02


def counted_passes(plan: StagePlan) -> tuple[int, ...]:
    """Return how often the passes of each stage count beside its update once, at least twice; up to
    as often as all microbatches and the filling of the pipeline where its update hides behind
    others."""
    chain = [stage.candidate for stage in plan.stages]
    most = plan.num_microbatches + len(chain) - 1

    def delay(k: int, longer: StageCandidate) -> float:
        changed = [*chain[:k], longer, *chain[k + 1 :]]
        seconds = stage_dp.step_seconds(
            changed, plan.schedule, plan.in_flight, num_meshes=plan.num_meshes
        )
        return seconds - plan.step_seconds

    counts = []
    for k, one in enumerate(chain):
        passes = evolve(
            one,
            forward_seconds=one.forward_seconds * (1 + LONGER),
            backward_seconds=one.backward_seconds * (1 + LONGER),
            backward_weight_seconds=one.backward_weight_seconds * (1 + LONGER),
        )
        added = (one.forward_seconds + one.backward_seconds) * LONGER
        update = delay(k, evolve(one, step_seconds=one.step_seconds + added))
        ratio = delay(k, passes) / update if update > 0 else most
        counts.append(round(min(max(ratio, 2), most)))
    return tuple(counts)


def solved_for(
    selection: Selection,
    passes: int,
    limit: float,
    choose: Callable[[Selection, float], ShardingSolution],
) -> ShardingSolution:
    """Return what `choose` answers under a limit in bytes where the passes of a stage count so
    often, without a bound."""
    stage, ratio = selection.stage, passes / selection.stage.num_microbatches
    often = [1.0 if phase == "update" else ratio for phase in stage.phases]
    times = stage.times or [1] * len(stage.eqns)
    counted = selection.seconds.counted(selection.problem, often, times)
    found = choose(evolve(selection, problem=counted), limit)
    if not found.choice:
        return choose(selection, limit)
    judged = ilp_sharding.check(evolve(selection.problem, memory_limit=None), found.choice)
    return evolve(found, objective=float(judged.cost), lower_bound=None, status="feasible")
