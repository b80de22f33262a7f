"""The optimiser's arrays in the memory of the hosts, chosen where no plan fits with them elsewhere.

Each update then waits for the hosts' links, which recomputation, sharded moments and smaller
microbatches do not: they are all searched first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from attrs import evolve

from alpa_interchange import ClusterSpec
from alpa_meta.errors import InfeasibleError
from alpa_meta.options import Options
from alpa_meta.planning.chosen_plan import Planned
from alpa_meta.planning.memory_floor import check_state_fits
from alpa_meta.step.program import Step

Plan = Callable[[Step, ClusterSpec, Options], Planned]
"""Plans a step whose state fits; InfeasibleError if the rest does not."""


def can_offload(cluster: ClusterSpec, options: Options) -> bool:
    """Return whether the hosts have memory of their own that the runtime can reach."""
    apart = all(group.host_link is not None for group in cluster.host_groups)
    return apart and options.runtime == "in-process"


def with_offload(
    step: Step,
    cluster: ClusterSpec,
    options: Options,
    plan: Plan,
    advised: Callable[[InfeasibleError], InfeasibleError],
) -> Planned:
    """Return what `plan` finds; where nothing fits and the options say nothing of it, the plan with
    the optimiser's arrays in the memory of the hosts.

    Raises the InfeasibleError of the first search where the second fails as well, `advised` of
    remedies, which that of a state too large for the cluster has already.
    """
    state_fits = False
    try:
        check_state_fits(step, cluster, options)
        state_fits = True
        return plan(step, cluster, options)
    except InfeasibleError as error:
        if options.offload is None and can_offload(cluster, options):
            far, told = step.with_offload(), evolve(options, offload="moments")
            if far.program(1).inputs != step.program(1).inputs:
                with contextlib.suppress(InfeasibleError):
                    check_state_fits(far, cluster, told)
                    return plan(far, cluster, told)
        if not state_fits:
            raise
        raise advised(error) from None
