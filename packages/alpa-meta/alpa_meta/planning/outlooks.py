"""A program in layers, whole or with its scans over layers in pieces, as one stage."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

from attrs import evolve

import stage_dp
from alpa_interchange import (
    ClusterSpec,
    ParallelPlan,
)
from alpa_meta.compat import Var
from alpa_meta.errors import PlanError
from alpa_meta.inter_op.candidates import (
    Outlook,
)
from alpa_meta.inter_op.layer_work import op_sequence
from alpa_meta.inter_op.layering import Layering, assign_layers, clustered_positions
from alpa_meta.inter_op.recomputation import chosen_recomputation, recomputed
from alpa_meta.inter_op.scan_stages import cut_evenly
from alpa_meta.inter_op.short_step import KEPT, ShortStep, short_step
from alpa_meta.inter_op.staging import assign_stages
from alpa_meta.inter_op.window import UnlikeCopiesError
from alpa_meta.options import Options
from alpa_meta.program_caches import cached_by_program
from alpa_meta.step.phases import holds_gradient
from alpa_meta.step.program import Program, Step

Found = TypeVar("Found")


def outlook_of(
    program: Program,
    options: Options,
    cluster: ClusterSpec,
    num_layers: int | None = None,
    like: Program | None = None,
) -> tuple[Outlook, Layering]:
    """Return the program in layers, with what they recompute, and as one stage.

    `like` is a program of the same structure at other sizes: its layers are kept.
    """
    layering = layers_of(program, options, cluster, num_layers, like)
    chosen = chosen_recomputation(options.recompute, layering.num_layers)
    layering = recomputed(layering, chosen, program)
    staging = assign_stages(layering, [], program.jaxpr.outvars)
    return Outlook(program, staging, layering.num_layers, pins=options.pins), layering


def layers_of(
    program: Program,
    options: Options,
    cluster: ClusterSpec,
    num_layers: int | None = None,
    like: Program | None = None,
) -> Layering:
    """Return the program in layers, without what they recompute (`like`: `outlook_of`).

    They are clustered from the whole batch, so that any number of microbatches has the same; where
    a microbatch has nothing of the last one, as that is made of the whole batch at once, from the
    microbatch.
    """
    source = program.whole or program
    wanted = num_layers or options.num_layers
    stages = options.num_stages if wanted is None else None
    known = source if like is None else like.whole or like
    clustered = _clustered(known, cluster, wanted, stages or 1)
    if program is not source:
        part = _of_part(program, source, clustered)
        last = max(clustered, default=0)
        alike = max(part, default=0) == last
        clustered = part if alike else _clustered(program, cluster, last + 1, 1)
    return _layers(program, clustered)


def short_step_of(
    step: Step, options: Options, cluster: ClusterSpec, kept: int = KEPT[0]
) -> ShortStep | None:
    """Return `step` with `kept` copies of repeated layers, None if that leaves nothing out."""
    least = options.num_stages or 1  # layers
    layering = layers_of(step.program(1), options, cluster)
    chosen = chosen_recomputation(options.recompute, layering.num_layers)
    key = (cluster, str((options.num_layers, least, options.pins, chosen)), kept)
    if key not in step.short:
        step.short[key] = short_step(step, layering, options.pins, chosen, kept)
    return cast(ShortStep | None, step.short[key])


def by_short_step(
    step: Step,
    options: Options,
    cluster: ClusterSpec,
    look: Callable[[Step | ShortStep], Found],
) -> Found:
    """Return what `look` finds in `step` without most of its repeated layers, where that can stand
    for it, else in the whole step; `look` raises UnlikeCopiesError where a short step cannot."""
    for kept in KEPT:
        short = short_step_of(step, options, cluster, kept)
        if short is not None:
            try:
                return look(short)
            except UnlikeCopiesError:
                continue
    return look(step)


@cached_by_program(4)  # asked for every microbatch size
def _clustered(
    program: Program, cluster: ClusterSpec, wanted: int | None, least: int
) -> tuple[int, ...]:
    """Return the layer of each forward equation that is clustered, of `least` layers or more."""
    forward = [program.jaxpr.eqns[k] for k in clustered_positions(program)]
    if not forward:
        return ()
    ops = op_sequence(forward, cluster)
    found = stage_dp.cluster_layers(ops, wanted)
    if wanted is None and found.num_layers < least:
        found = stage_dp.cluster_layers(ops, least)
    return found.layer_of_op


def _of_part(program: Program, whole: Program, clustered: tuple[int, ...]) -> tuple[int, ...]:
    """Return the layers of a program's equations by those of the whole one it was cut from.

    What the cut added belongs to the next equation of the whole.
    """
    layer_of = _layer_of_value(whole, clustered)
    found: list[int] = []
    layer = max(clustered, default=0)
    for k in reversed(clustered_positions(program)):
        made = (program.origin.get(var, var) for var in program.jaxpr.eqns[k].outvars)
        layer = next((layer_of[var] for var in made if var in layer_of), layer)
        found.append(layer)
    return tuple(reversed(found))


@cached_by_program(4)  # asked for every microbatch size
def _layer_of_value(program: Program, clustered: tuple[int, ...]) -> dict[Var, int]:
    eqns = program.jaxpr.eqns
    pairs = zip(clustered_positions(program), clustered, strict=True)
    return {var: layer for k, layer in pairs for var in eqns[k].outvars}


@cached_by_program(16)  # asked for the whole program and microbatches of a few sizes
def _layers(program: Program, clustered: tuple[int, ...]) -> Layering:
    return assign_layers(program, lambda eqns, inputs: clustered)


def outlook_in_pieces(
    program: Program,
    options: Options,
    cluster: ClusterSpec,
    num_layers: int | None = None,
    like: Program | None = None,
) -> tuple[Outlook, Layering] | None:
    """Return the program with its scans over layers in pieces, None if it has none."""
    cut = None if program.totals else cut_evenly(program)  # totals are sums over whole layers
    if cut is None:
        return None
    outlook, layering = outlook_of(cut.program, options, cluster, num_layers, like)
    kinds = set(chosen_recomputation(options.recompute, outlook.num_layers).values())
    if len(kinds) > 1:  # what one scan cannot do
        return evolve(outlook, cut=cut), layering
    whole = evolve(options, recompute=kinds.pop())
    return evolve(outlook, cut=cut, uncut=outlook_of(program, whole, cluster)), layering


def check_num_stages(num_stages: int | None, outlook: Outlook) -> None:
    """Raise PlanError where the layers of the step are fewer than the stages asked for."""
    most = outlook.num_layers
    if num_stages is None or num_stages <= most:
        return
    why, remedy = "", f"use num_stages={most}"
    if any(map(holds_gradient, outlook.program.jaxpr.eqns)):
        why = ", as its gradients are made inside a loop"
        remedy += ", or parallelize the step that the loop runs, and call that in a loop"
    raise PlanError(
        f"{num_stages} stages need as many layers, but the forward pass of the step cannot be cut "
        f"into more than {most}{why}; {remedy}"
    )


def staged_outlook(
    step: Step, plan: ParallelPlan, options: Options, like: Program | None = None
) -> tuple[Outlook, Layering]:
    """Return the layers of `step` that the stages of `plan` are cut from (`like`: `outlook_of`)."""
    program = step.program(plan.num_microbatches)
    count = len(plan.layers)
    options = evolve(options, recompute=[layer.recomputation for layer in plan.layers])
    found = None
    if plan.num_stages > 1:
        found = outlook_in_pieces(program, options, plan.cluster, count, like)
    return found or outlook_of(program, options, plan.cluster, count, like)
