"""A program in layers, whole or with its scans over layers in pieces, as one stage."""

from __future__ import annotations

import functools

from attrs import evolve

import stage_dp
from alpa_interchange import (
    ClusterSpec,
    ParallelPlan,
)
from alpa_meta.inter_op.candidates import (
    Outlook,
)
from alpa_meta.inter_op.layer_work import op_sequence
from alpa_meta.inter_op.layering import Layering, assign_layers, clustered_positions
from alpa_meta.inter_op.recomputation import chosen_recomputation, recomputed
from alpa_meta.inter_op.scan_stages import cut_evenly
from alpa_meta.inter_op.staging import assign_stages
from alpa_meta.options import Options
from alpa_meta.step.program import Program, Step


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
    source = like or program
    wanted = num_layers or options.num_layers
    if wanted is None and options.num_stages and options.num_stages > 1:
        wanted = _at_least(source, options.num_stages, cluster)
    forward = [source.jaxpr.eqns[k] for k in clustered_positions(source)]
    clustered: tuple[int, ...] = ()
    if forward:
        clustered = stage_dp.cluster_layers(op_sequence(forward, cluster), wanted).layer_of_op
    layering = _layers(program, clustered)
    chosen = chosen_recomputation(options.recompute, layering.num_layers)
    layering = recomputed(layering, chosen, program)
    staging = assign_stages(layering, [], program.jaxpr.outvars)
    return Outlook(program, staging, layering.num_layers), layering


@functools.lru_cache(maxsize=4)  # asked for every kind of recomputation of one program
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


def _at_least(program: Program, num_stages: int, cluster: ClusterSpec) -> int | None:
    """Return a number of layers if fewer than `num_stages` would be chosen, else None."""
    forward = [
        eqn
        for eqn, phase in zip(program.jaxpr.eqns, program.phases.of_eqn, strict=True)
        if phase == "forward"
    ]
    chosen = stage_dp.cluster_layers(op_sequence(forward, cluster)).num_layers if forward else 0
    return None if chosen >= num_stages else num_stages
