"""What would make a step fit that does not: a remedy is planned before it is named.

The step is planned once with the memory that it lacks, in as many microbatches as came closest.
What that plan holds (state, gradients, activations, temporaries) says how far each remedy has to
go; it is then planned like the step, on the mesh that came closest, and named with the bytes per
device that its plan takes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

from attrs import define, evolve, frozen

from alpa_interchange import ClusterSpec
from alpa_meta.errors import InfeasibleError, PlanError
from alpa_meta.intra_op.liveness import KINDS
from alpa_meta.options import Options
from alpa_meta.planning.chosen_plan import Planned
from alpa_meta.planning.memory_floor import room
from alpa_meta.planning.offload_choice import can_offload
from alpa_meta.step.program import Step

Plan = Callable[[Step, ClusterSpec, Options], Planned]
"""Plans with the number of microbatches that the options name; InfeasibleError if nothing fits."""

MOST_DOUBLINGS = 10  # of the devices: beyond 1024 times as many, no advice
MOST_TRIALS = 8  # plans after which no further kind of remedy is looked for, once there is one
SOLVER_SECONDS = 1.0  # of each problem of a trial: that a plan fits is what counts, not its speed
MARGINS = (1.05, 2.0, 16.0)  # of the missing bytes, which are a bound, until there is a plan


@define
class _Trial:
    """A step that does not fit, and how variants of it are planned; `count` have been."""

    step: Step
    cluster: ClusterSpec
    options: Options
    limit: float
    plan: Plan
    count: int = 0

    def peak(
        self,
        options: Options | None = None,
        step: Step | None = None,
        cluster: ClusterSpec | None = None,
    ) -> float | None:
        """Return the bytes per device of a variant's plan, None if it does not fit either."""
        planned = self.planned(options or self.options, step, cluster)
        return None if planned is None else max(planned.plan.device_bytes)

    def planned(
        self, options: Options, step: Step | None = None, cluster: ClusterSpec | None = None
    ) -> Planned | None:
        """Return a variant's plan, None if it does not fit either."""
        self.count += 1
        try:
            return self.plan(step or self.step, cluster or self.cluster, options)
        except PlanError:
            return None


def with_remedies(
    failed: InfeasibleError, step: Step, cluster: ClusterSpec, options: Options, plan: Plan
) -> InfeasibleError:
    """Return the error with the remedies that were found to help, those that change least first."""
    options = evolve(
        options,
        num_microbatches=options.num_microbatches or failed.num_microbatches,
        progress=None,
        solver_seconds=min(options.solver_seconds or SOLVER_SECONDS, SOLVER_SECONDS),
    )
    if options.num_stages in (None, 1):
        shape = failed.mesh_shape or options.mesh_shape
        options = evolve(options, num_stages=1, mesh_shape=shape)
    trial = _Trial(step, cluster, options, room(cluster, options).least, plan)
    roomy = _with_more_memory(trial, failed.missing_bytes)
    found: list[str] = []
    for remedy in _REMEDIES:
        if roomy is not None and (trial.count < MOST_TRIALS or not found):
            found.extend(remedy(trial, roomy))
    none = "none that was tried is enough; use a smaller model or batch"
    if roomy is None and (options.num_stages or 1) > 1:
        none = f"fewer than {options.num_stages} stages, since more memory does not help"
    text = ", or ".join(found) or none
    return InfeasibleError(
        f"{failed}; cheapest remedy: {text}",
        failed.missing_bytes,
        failed.mesh_shape,
        failed.num_microbatches,
    )


@frozen(eq=False)
class _Roomy:
    """A plan with more memory than there is, and what its fullest device holds at its peak."""

    fixed: float  # state and gradients
    moving: float  # activations and temporaries


def _with_more_memory(trial: _Trial, missing: float) -> _Roomy | None:
    for margin in MARGINS:
        memory = trial.limit + margin * missing + 1.0
        planned = trial.planned(evolve(trial.options, memory=memory))
        if planned is not None:
            held = max((s.memory for s in planned.plan.shardings), key=lambda m: sum(m.values()))
            state, gradients, activations, temporaries = (held[kind] for kind in KINDS)
            return _Roomy(state + gradients, activations + temporaries)
    return None


def _figure(peak: float) -> str:
    return f"(then {peak:,.0f} bytes on each device)"


def _least(counts: Iterable[int], enough: float) -> list[int]:
    """Return the two least counts from `enough` on."""
    return sorted(count for count in counts if count >= enough)[:2]


def _parts(trial: _Trial, roomy: _Roomy) -> float:
    """Return into how many parts what moves has to be cut to fit beside what stays."""
    left = trial.limit - roomy.fixed
    return roomy.moving / left if left > 0 else math.inf


def _microbatches(trial: _Trial, roomy: _Roomy) -> Iterator[str]:
    """Yield a number of microbatches that is exact and fits."""
    own = trial.options.num_microbatches or 1
    for count in _least(trial.step.microbatch_counts, max(own * _parts(trial, roomy), own + 1)):
        try:
            exact = not trial.options.exact or not trial.step.program(count).inexact
        except PlanError:
            exact = False
        peak = trial.peak(evolve(trial.options, num_microbatches=count)) if exact else None
        if peak is not None:
            yield f"num_microbatches={count} {_figure(peak)}"
            return


def _no_preset(trial: _Trial, _: _Roomy) -> Iterator[str]:
    """Yield a parallelism that holds less of the optimiser or of the parameters, if it fits."""
    preset = trial.options.preset
    if preset is None:
        return
    for name in ("zero2", "zero3", None) if preset == "dp" else ("zero3", None):
        if name != preset:
            peak = trial.peak(evolve(trial.options, preset=name))
            if peak is not None:
                instead = "no preset" if name is None else f"preset {name!r}"
                yield f"{instead} instead of {preset!r} {_figure(peak)}"
                return


def _smaller_batch(trial: _Trial, roomy: _Roomy) -> Iterator[str]:
    """Yield a number of examples that fits."""
    size, count = trial.step.batch_size or 1, trial.options.num_microbatches or 1
    parts = [part for part in range(2, size + 1) if size % (part * count) == 0]
    for part in _least(parts, _parts(trial, roomy)):
        peak = trial.peak(step=trial.step.with_batch(size // part))
        if peak is not None:
            yield f"a batch of {size // part} examples instead of {size} {_figure(peak)}"
            return


def _more_devices(trial: _Trial, roomy: _Roomy) -> Iterator[str]:
    """Yield a multiple of the devices that fits."""
    if len(trial.cluster.host_groups) > 1:
        return
    (group,) = trial.cluster.host_groups
    shape = trial.options.mesh_shape
    times_each = [1 << k for k in range(1, MOST_DOUBLINGS + 1)]
    for times in _least(times_each, (roomy.fixed + roomy.moving) / trial.limit):
        larger = evolve(group, num_hosts=group.num_hosts * times)
        cluster = evolve(trial.cluster, host_groups=(larger,))
        longer = None if shape is None else (shape[0] * times, *shape[1:])
        peak = trial.peak(evolve(trial.options, mesh_shape=longer), cluster=cluster)
        if peak is not None:
            yield f"{cluster.num_devices} devices {_figure(peak)}"
            return


def _recomputation(trial: _Trial, _: _Roomy) -> Iterator[str]:
    """Yield the recomputation of every layer that fits, selective if that is enough."""
    if trial.options.recompute is None:
        for kind in ("selective", "full"):
            peak = trial.peak(evolve(trial.options, recompute=kind))
            if peak is not None:
                yield f"recompute={kind!r} {_figure(peak)}"
                return


def _offload(trial: _Trial, _: _Roomy) -> Iterator[str]:
    """Yield the optimiser's arrays in the memory of the hosts, where that is another."""
    if trial.options.offload == "none" and can_offload(trial.cluster, trial.options):
        options = evolve(trial.options, offload="moments")
        peak = trial.peak(options, trial.step.with_offload())
        if peak is not None:
            yield f"offload='moments' {_figure(peak)}"


_REMEDIES = (_microbatches, _no_preset, _recomputation, _offload, _smaller_batch, _more_devices)
